"""The language of code, messages and pages: sentences that make a reader stop are found by their patterns."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.conftest import ROOT

PATTERNS = [
    r"\b(go|goes|gone|going) on\b",
    r"\bunder way\b",
    r"\banew\b",
    r"\b(whoever|whichever)\b",
    r"\b(is|are) none of\b",
    r"\bthat (is|are) none\b",
    r'"""Return (what|those|who|whom)\b',
    r"\bfor ever\b",
    r"\bof its own kind\b",
    r"\bsigns? of life\b",
    r"\bmend(s|ed|ing)?\b",
    r"\bown rows?\b",
    r"\bat_rest\b",
    r"\bow(e|es|ed)\b",
    r"\bfates?\b",
    r"\ball the same\b",
    r"\b(is|are|was|were) (told|well)\b",
    r"\bthose that (is|are)\b",
    r"\b(is another one|are others|in vain)\b",
    r'"""What (became|came) of\b',
    r"""(?<!there)(?<!\s)[\s"']+(is|are|was|were) no\b(?! longer)""",
]
PAGES = sorted(
    path
    for folder in ("rayrft", "jobs", "notebooks", "cluster")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".yaml", ".ipynb", ".sh", ".js", ".html"}
)
PAGES += [ROOT / "README.md", ROOT / "tests" / "README.md", ROOT / "tests" / "bench" / "README.md"]
SHARED = {"main", "log", "QUERIES", "TYPE_CHECKING"}
"""Entry points, loggers, the queries of each view, and a switch of type checkers have one name everywhere."""
TYPE_VARIABLES = {"TypeVar", "ParamSpec", "TypeVarTuple"}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_sentence_says_its_subject(pattern: str) -> None:
    sentence = re.compile(pattern.replace(" ", r"\s+(?:#\s+)?"), re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path in PAGES
        for text in [path.read_text()]
        for match in sentence.finditer(text)
    ]
    assert not found, "\n".join(found)


def names_of(node: ast.stmt) -> list[str]:
    """Names that a statement of a module gives to classes, functions, constants and aliases."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in TYPE_VARIABLES:
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def test_no_public_name_stands_for_two_things() -> None:
    """Commands of the command line are named as users type them, and often as the function that they call."""
    homes = defaultdict[str, list[str]](list)
    for path in sorted((ROOT / "rayrft").rglob("*.py")):
        if "cli" not in path.parts:
            for node in ast.parse(path.read_text()).body:
                for name in names_of(node):
                    homes[name].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in homes.items() if len({*places}) > 1 and not name.startswith("_")}
    assert twice.keys() <= SHARED, twice
