"""Where a response states its answer, and what answers of the same content have in common."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_LONGEST, _LONGEST_STATEMENT, _MOST_STATEMENTS = 20_000, 500, 20
"""Characters from the end of a response in which its answer is looked for, characters of what it states there, and how
often it may state something that cannot be read: so that no response takes long, whatever it holds."""


@dataclass(frozen=True)
class Statement:
    """What a response states as its answer."""

    text: str
    announced: bool


_ANNOUNCED = re.compile(
    r"\banswers?(?:\s+(?:is|are|should be|must be|would be)\b\s*:?|\s*[:=])|\b(?:choice|option)\s+(?:is|should be)\b"
    r"|\bI\s+(?:choose|select|pick)\b|####|答案(?:应?该?[是为选]|\s|:)*|[故应]?选(?!项)[择为]?",
    re.IGNORECASE,
)
_BOX = "\\boxed{"


def statements(response: str, *, strict: bool = False) -> list[Statement]:
    """Return what a response may state as its answer: what its last box holds; what it announces ("the answer is", four
    hashes, 答案), the last first, up to the end of the line; and, unless ``strict``, its last line. The first of these
    that can be read is its answer."""
    text, found = nfkc(response[-_LONGEST:]).strip(), []
    if (start := text.rfind(_BOX)) >= 0:
        found.append(Statement(_braced(text[start + len(_BOX) :]), True))
    for mark in reversed(list(_ANNOUNCED.finditer(text))[-_MOST_STATEMENTS:]):
        found.append(Statement(text[mark.end() :].lstrip(" :*\n").partition("\n")[0], True))
    if not strict:
        found.append(Statement(text.rpartition("\n")[2], False))
    cut = [Statement(statement.text.strip()[:_LONGEST_STATEMENT], statement.announced) for statement in found]
    return [statement for statement in cut if statement.text]


def _braced(text: str) -> str:
    """Return the text up to the brace that closes the one before it."""
    depth = 1
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if not depth:
            return text[:at]
    return text


def nfkc(text: str) -> str:
    """Return the text with the usual forms of full-width letters, digits and punctuation."""
    return unicodedata.normalize("NFKC", text)


_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|rm|operatorname)\s*\{([^{}]*)\}")
_FORMAT = re.compile(r"\\\$|\\(?:left|right|displaystyle|quad)(?![A-Za-z])|\\[,;! ()\[\]]|\*\*|[$`~]")


def plain(text: str) -> str:
    """Return the text without what only formats it."""
    return _FORMAT.sub(" ", _WRAPPED.sub(r"\1", nfkc(text))).strip()


def key(text: str) -> str:
    """Return what answers of the same content have in common."""
    text = re.sub(r"^(?:the|an?)\s+", "", plain(text).strip(" \"'“”"), flags=re.IGNORECASE)
    return re.sub(r"\s+", "", text).rstrip("。.,;:?")
