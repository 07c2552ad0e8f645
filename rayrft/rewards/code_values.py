"""What a function returned and what a program wrote, and whether it is what was expected.

Values come as trees of JSON, as `code_runner.encode_value` gives them, from a process that may write anything.
"""

from __future__ import annotations

import json
import math
import re
from functools import partial
from typing import Any


def literal(tree: Any, *, key: bool = False, depth: int = 50) -> str:
    """Return an encoded value as a literal of Python. Raises ValueError if it is not one."""
    if depth == 0:
        raise ValueError("nested too deep")
    inner = partial(literal, depth=depth - 1)
    if tree is None or isinstance(tree, bool | int | float | str):
        return repr(tree)
    if isinstance(tree, list) and not key:
        return f"[{', '.join(map(inner, tree))}]"
    if isinstance(tree, dict) and len(tree) == 1:
        [(kind, content)] = tree.items()
        if kind == "int" and isinstance(content, str):
            return hex(int(content, 16))
        if kind == "bytes" and isinstance(content, str):
            return repr(bytes.fromhex(content))
        if kind == "complex" and isinstance(content, list) and len(content) == 2:
            return f"complex({float(content[0])!r}, {float(content[1])!r})"
        of_pairs = isinstance(content, list) and all(isinstance(each, list) and len(each) == 2 for each in content)
        if kind == "dict" and of_pairs and not key:
            pairs = [(inner(name, key=True), inner(each)) for name, each in content]
            return f"dict([{', '.join(f'({name}, {each})' for name, each in pairs)}])"
        if kind in ("tuple", "set", "frozenset") and isinstance(content, list) and not (key and kind == "set"):
            hashed = key or kind != "tuple"
            items = "".join(inner(each, key=hashed) + ", " for each in content)
            return f"({items})" if kind == "tuple" else f"{kind}([{items}])"
    raise ValueError("not a value")


def same_value(wanted: Any, found: Any, tolerance: float = 0.0) -> bool:
    """Whether encoded values are equal as JSON: tuples as lists, 1.0 as 1, and keys as strings if the wanted ones are;
    two floats within the tolerance, relative or absolute."""
    wanted, found = _plain(wanted), _plain(found)
    if isinstance(wanted, float) and isinstance(found, float):
        near = math.isclose(wanted, found, rel_tol=tolerance, abs_tol=tolerance)
        return near or (math.isnan(wanted) and math.isnan(found))
    if isinstance(wanted, list) and isinstance(found, list):
        pairs = zip(wanted, found, strict=False)
        return len(wanted) == len(found) and all(same_value(one, other, tolerance) for one, other in pairs)
    if isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        kind, one = next(iter(wanted.items()))
        other = found[kind]
        if kind in ("set", "frozenset"):
            return _sorted(one) == _sorted(other)
        if kind == "dict":
            if all(isinstance(key, str) for key, _ in one):
                other = [[str(key) if type(key) is int else key, each] for key, each in other]
            return same_value(_sorted(one), _sorted(other), tolerance)
        return same_value(one, other, tolerance)
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (wanted, found))
    return wanted == found and (numbers or type(wanted) is type(found))


def _plain(tree: Any) -> Any:
    """Return a tuple as the list that it is in JSON, and a large integer as one."""
    if isinstance(tree, dict) and tree.keys() & {"tuple", "int"}:
        [(kind, content)] = tree.items()
        return content if kind == "tuple" else int(content, 16)
    return tree


def _sorted(items: list[Any]) -> list[Any]:
    """Items of a set, or pairs of a dictionary, in an order that does not depend on how they were made."""
    return sorted((_ordered(each) for each in items), key=lambda each: json.dumps(each))


def _ordered(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_ordered(each) for each in tree]
    if isinstance(tree, dict):
        [(kind, content)] = tree.items()
        return {kind: (_sorted if kind in ("set", "frozenset", "dict") else _ordered)(content)}
    return tree


def same_text(wanted: str, found: str, tolerance: float = 0.0) -> bool:
    """Whether a program's output is the expected one, but for white space at the ends of lines and of the text. With a
    tolerance, words that are numbers, but not integers, need only be so near."""
    lines, others = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (wanted, found))
    if lines == others or not tolerance or len(lines) != len(others):
        return lines == others
    words = [(line.split(), other.split()) for line, other in zip(lines, others, strict=True)]
    return all(len(line) == len(other) and all(map(partial(_near, tolerance), line, other)) for line, other in words)


def _near(tolerance: float, wanted: str, found: str) -> bool:
    if wanted == found or re.fullmatch(r"[+-]?\d+", wanted):
        return wanted == found
    try:
        return math.isclose(float(wanted), float(found), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False
