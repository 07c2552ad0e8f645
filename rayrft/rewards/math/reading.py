"""Read the text of a mathematical answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from rayrft.rewards.math.formula import CONSTANTS, Node, Unreadable, parse_formula
from rayrft.rewards.text.notation import CURRENCIES, INEQUALITY, normalized, stripped
from rayrft.rewards.text.numbers import Number, read_number, read_quantity, split_unit


@dataclass(frozen=True)
class Formula:
    """A formula, perhaps with variables."""

    text: str
    node: Node
    unit: str = ""


@dataclass(frozen=True)
class Words:
    """A word as an answer: a weekday, a letter of an option."""

    text: str


@dataclass(frozen=True)
class AnswerGroup:
    """Several answers: ``kind`` is ``set`` (order-free), ``blanks`` (in order), ``union``, ``intersection`` or
    ``difference`` (of sets), ``matrix`` (of rows), or the two brackets of a tuple or an interval."""

    text: str
    kind: str
    items: tuple[MathAnswer, ...]


@dataclass(frozen=True)
class Relation:
    """An equation, or an inequality by ``<``, ``\\le`` or ``\\ne``; of an equation ``name = value``, its name."""

    text: str
    op: str
    left: MathAnswer
    right: MathAnswer
    name: str = ""


@dataclass(frozen=True)
class Other:
    """LaTeX of unknown meaning, which equals only its own text."""

    text: str


MathAnswer = Number | Formula | Words | AnswerGroup | Relation | Other


def clear(answer: MathAnswer) -> bool:
    """Whether the whole answer has a known meaning."""
    if isinstance(answer, Relation):
        return clear(answer.left) and clear(answer.right)
    return all(map(clear, answer.items)) if isinstance(answer, AnswerGroup) else not isinstance(answer, Other)


def is_constant(answer: MathAnswer) -> bool:
    """Whether the answer is a number or a formula without variables."""
    return isinstance(answer, Number) or (isinstance(answer, Formula) and not answer.node.names() - CONSTANTS)


_WORDS = re.compile(r"\(?(?:\\text ?\{[^{}]*\}|[A-Za-z]{3,}|no|No|[A-Z])\)?")
_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2\d{4}|\d{4}年\d{1,2}月\d{1,2}[日号]")
_MATRIX = re.compile(r"\\begin ?\{([pbvB]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end ?\{\1\}")
_NAME = re.compile(
    r"(?:\\text ?\{[^{}]*\}|\\angle|\\triangle|[A-Za-z(){}\[\]' _,|]|(?<=[_{A-Za-z])\d+|(?<=[A-Za-z]\()-?\d+(?=\))"
    r"|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|overline|vec|frac|prime)(?![A-Za-z]))+"
)
_RELATIONS = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\approx(?![A-Za-z])|[=<>]")
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{4,}|[A-Za-z]{2,} [A-Za-z]{2,}"
    r"|(?:so|it|is|we|he|of|to|in|at|by|the|for|has|are|was|get|per|all|an|not|no|from|on|as|if|be)\b)",
    re.IGNORECASE,
)
"""Words that formulas do not contain."""
_CLOSING = {"(": ")", "[": "]"}


@lru_cache(maxsize=1024)
def read_answer(text: str) -> MathAnswer:
    """Read a whole text as an answer. Raises TooLarge if it is nested too deeply."""
    return _read(normalized(text))


def _read(text: str) -> MathAnswer:
    if number := read_number(text):
        return number
    text = _undressed(text)
    blanks = _split(text, ";")
    if len(blanks) > 1 and not _enclosed(text):
        return AnswerGroup(text, "blanks", tuple(map(_read, blanks)))
    if text == "\\emptyset" or re.fullmatch(r"\\\{ ?\\\}", text):
        return Words("\\emptyset")
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in matrix[2].split("\\\\") if row.strip()]
        cells = (AnswerGroup(row, "row", tuple(_read(cell.strip()) for cell in row.split("&"))) for row in rows)
        return AnswerGroup(text, "matrix", tuple(cells))
    parts = [part for part in _split(text, ",") if part]
    if len(parts) > 1:
        return AnswerGroup(text, "set", _flat([_read(part) for part in parts]))
    if enclosed := _enclosed(text):
        kind, inner = enclosed
        # The comma of (100,200) separates thousands only if other commas have a space after them.
        items = [_read(item) for item in _split(inner, ",;", thousands=", " in inner) if item]
        if kind == "set":
            return AnswerGroup(text, "set", _flat(items))
        if len(items) > 1:
            return AnswerGroup(text, kind, tuple(items))
    if "\\pm" in text or "\\mp" in text:
        signs = [("\\pm", "+", "\\mp", "-"), ("\\pm", "-", "\\mp", "+")]
        both = (text.replace(a, f" {b} ").replace(c, f" {d} ") for a, b, c, d in signs)
        items = [_read(re.sub(r"\s+", " ", each).strip().removeprefix("+ ")) for each in both]
        return AnswerGroup(text, "set", tuple(items))
    sets = {kind: _split(text, sign) for kind, sign in OF_SETS.items()}
    of_inequalities = any(len(parts) > 1 and all(map(INEQUALITY.search, parts)) for parts in sets.values())
    if not of_inequalities and (related := _related(text)):
        return related
    for kind, parts in sets.items():
        if len(parts) > 1:
            return AnswerGroup(text, kind, tuple(map(_read, parts)))
    return _scalar(text)


OF_SETS = {"difference": "\\setminus", "union": "\\cup", "intersection": "\\cap"}
"""Operations on sets; the first bind least."""


def _undressed(text: str) -> str:
    """Return the text without dollar signs of mathematics, outer braces, and a name before its set (``x \\in``)."""
    if text.count("$") >= 2:
        text = re.sub(r"\$(?!\d[^$]*$)", " ", text)
    text = stripped(text)
    while text.startswith("{") and _end(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    text = _BUILT.sub(r"\1", text)
    return re.sub(r"^[A-Za-z\\]{1,10} ?\\in(?![A-Za-z]) ?", "", text)


_BUILT = re.compile(r"^\\\{ ?[a-zA-Z](?: ?\\in ?\(-\\infty ?,\\infty ?\))? ?(?:\\mid(?![A-Za-z])|\||:) ?(.+?) ?\\\}$")
"""A set by its variable and an inequality."""


def _outside(text: str, start: int = 0) -> Iterator[int]:
    """Yield the indices from ``start`` that are outside of brackets, and those of the outer closing brackets."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if not depth:
            yield at


def _end(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at ``start``; -1 if it is missing."""
    return next(_outside(text, start), -1)


def _enclosed(text: str) -> tuple[str, str] | None:
    """Return the kind of a set, tuple or interval, and the text in its brackets."""
    if text.startswith("\\{") and text.endswith("\\}") and _end(text, 1) == len(text) - 1:
        return "set", text[2:-2].strip()
    if text[:1] in _CLOSING and text[-1:] in {")", "]"} and _end(text, 0) == len(text) - 1:
        return text[0] + text[-1], text[1:-1].strip()
    return None


def _split(text: str, separators: str, *, thousands: bool = True) -> list[str]:
    """Split outside of brackets at one of several characters, but not at commas of thousands, or at a command."""
    several = [separators] if separators.startswith("\\") else [*separators]
    parts, start = list[str](), 0
    for at in _outside(text):
        separator = next((each for each in several if text.startswith(each, at)), None)
        if separator and not (separator == "," and thousands and _in_thousands(text, at)):
            parts.append(text[start:at].strip())
            start = at + len(separator)
    return [*parts, text[start:].strip()]


def _in_thousands(text: str, at: int) -> bool:
    follows = re.match(r",\d{3}(?!\d)", text[at : at + 5])
    return bool(follows and re.search(r"(?<!\d)[1-9]\d{0,2}(?:,\d{3})*$", text[:at]))


def _flat(items: Sequence[MathAnswer]) -> tuple[MathAnswer, ...]:
    sets = (item.items if isinstance(item, AnswerGroup) and item.kind == "set" else [item] for item in items)
    return tuple(chain.from_iterable(sets))


def _related(text: str) -> MathAnswer | None:
    """Read equations and inequalities; constant bounds of a variable become an interval."""
    signs = [found for at in _outside(text) if (found := _RELATIONS.match(text, at))]
    if not signs:
        return None
    ends = [0, *(sign.end() for sign in signs)]
    sides = [text[start:end].strip() for start, end in zip(ends, [*(s.start() for s in signs), len(text)], strict=True)]
    ops = [sign[0] for sign in signs]
    if not all(sides[1:]):
        return Other(text)
    if ops[-1] == "\\approx":  # the exact value stands before
        return _read(text[: signs[-1].start()].strip())
    if set(ops) == {"="}:
        left = _read(sides[0]) if sides[0] else Words("")
        name = re.sub(r"[\s{}]|\\text", "", sides[0]) if not sides[0] or _NAME.fullmatch(sides[0]) else ""
        return Relation(text, "=", left, _read(sides[-1]), name or ("" if sides[0] else "="))
    if len(ops) == 1 and ops[0] == "\\ne":
        if _NAME.fullmatch(sides[0]):
            return _read(f"(-\\infty ,{sides[1]})\\cup ({sides[1]},\\infty )")
        return Relation(text, "\\ne", _read(sides[0]), _read(sides[1]))
    if "=" in ops or "\\ne" in ops or len(ops) > 2:
        return Other(text)
    return _inequality(text, sides, ops)


def _inequality(text: str, sides: list[str], ops: list[str]) -> MathAnswer:
    if ops[0] in {">", "\\ge"}:
        sides, ops = sides[::-1], [{">": "<", "\\ge": "\\le"}.get(op, op) for op in ops[::-1]]
    if not set(ops) <= {"<", "\\le"}:
        return Other(text)
    read = list(map(_read, sides))
    constant = [is_constant(side) or "\\infty" in side.text for side in read]
    opening, closing = {"<": "(", "\\le": "["}, {"<": ")", "\\le": "]"}
    infinity = Formula("\\infty", Node("name", value="\\infty"))
    below = Formula("-\\infty", Node("neg", (infinity.node,)))
    if len(read) == 3 and constant == [True, False, True]:
        return AnswerGroup(text, opening[ops[0]] + closing[ops[1]], (read[0], read[2]))
    if len(read) == 2 and constant == [True, False] and _NAME.fullmatch(sides[1]):
        return AnswerGroup(text, opening[ops[0]] + ")", (read[0], infinity))
    if len(read) == 2 and constant == [False, True] and _NAME.fullmatch(sides[0]):
        return AnswerGroup(text, "(" + closing[ops[0]], (below, read[1]))
    return Relation(text, ops[0], read[0], read[1]) if len(read) == 2 else Other(text)


def _scalar(text: str) -> MathAnswer:
    text = re.sub(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!\d)", lambda found: found[0].replace(",", ""), text)
    if _WORDS.fullmatch(text):
        return Words(text)
    if _DATE.fullmatch(text):
        return Words(re.sub(r"[./年月]", "-", re.sub(r"(?<!\d)0+(?=\d)", "", text)).rstrip("日号"))
    if len(signs := {*text} & {*CURRENCIES}) == 1:  # "3 × ¥4"
        text = (sign := signs.pop()) + text.replace(sign, "").strip()
    if number := read_quantity(text):
        return number
    value, scale, unit = split_unit(text)
    if value != text and isinstance(inner := _read(value), Formula) and not inner.unit:
        scaled = Node("*", (inner.node, Node("number", value=Fraction(scale))))
        return Formula(text, inner.node if scale == 1 else scaled, unit)
    if _PROSE.search(re.sub(r"\\text ?\{[^{}]*\}", " ", text)):
        return Other(text)
    try:
        return Formula(text, parse_formula(text))
    except Unreadable:
        return Other(text)
