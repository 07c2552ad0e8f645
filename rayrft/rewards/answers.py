"""Where a response states its answer, and what answers of the same content have in common."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace

_LONGEST, LONGEST_STATEMENT, _MOST_STATEMENTS = 20_000, 500, 20
"""Characters from the end of a response in which its answer is looked for, characters of what it states there, and how
often it may state something that cannot be read: so that no response takes long, whatever it holds."""


@dataclass(frozen=True)
class Statement:
    """What a response states as its answer."""

    text: str
    announced: bool
    boxed: bool = False

    @property
    def readings(self) -> list[str]:
        """The text and, where it begins like "so it must be", what comes after that."""
        rest = self.text[_LEAD_IN.match(self.text).end() :]  # type: ignore[union-attr]  # it matches nothing, too
        return [self.text, rest] if rest and rest != self.text else [self.text]


_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|well|clearly|I (?:think|believe|guess|would say)|I'd say)\b\s*[,:]?\s*"
    r"|(?:所以|因此|因而|故|那么|我认为|我觉得|我想)[,:]?\s*)*+"
    r"(?:I (?:would |will )?(?:choose|select|pick|say)\b\s*|I'd (?:choose|select|pick|say)\b\s*)?+"
    r"(?:\b(?:it|that|this)(?:['’]s| is| must be| should be| would be| has to be| can only be)\b\s*:?"
    r"|(?:这|那|它)?(?:应该|应当|只能|肯定|一定|就|应)?[是为](?!否|不是|没))?+\s*",
    re.IGNORECASE,
)

_ANNOUNCED = re.compile(
    r"\banswers?\b(?:\s+(?:to|for)\b[^.\n]{0,60}?)?\**\]?(?:\s+(?:is|are|should be|must be|would be)\b"
    r"(?:\s+(?:therefore|thus|clearly|indeed)\b)?\s*:?|\s*[:=])|<answer>|\bI\s+(?:choose|select|pick)\b"
    r"|\b(?:choices?|options?)\**\s+(?:is|are|should be)\b|\b(?:correct|right)\s+(?:choice|option)s?\**\s*:"
    r"|####(?!#)(?=[^\n]*\s*\Z)|【?答案】?(?:应?该?[就即]?(?:[是为]|选(?!项))|\s|:)*|正确(?:选项|一项|的)[是为]"
    r"|(?<!不)(?<!不应)(?<!不能)(?<!不该)[故应]?选(?!项)[择为]?",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")


def statements(response: str, *, strict: bool = False) -> list[Statement]:
    """Return what a response may state as its answer: what its last box holds; what it announces ("the answer is", four
    hashes, 答案), the last first, up to the end of the line; and, unless ``strict``, its last line. The first of these
    that can be read is its answer."""
    text, found = nfkc(response[-_LONGEST:]).strip(), []
    for box in list(_BOX.finditer(text))[-1:]:
        found.append(Statement(_braced(text[box.end() :]), True, boxed=True))
    for mark in reversed(list(_ANNOUNCED.finditer(text))[-_MOST_STATEMENTS:]):
        found.append(Statement(text[mark.end() :].lstrip(" :*\n\t").partition("\n")[0], True))
    if not strict:
        found.append(Statement(text.rpartition("\n")[2], False))
    cut = [replace(statement, text=statement.text.strip()[:LONGEST_STATEMENT]) for statement in found]
    return [statement for statement in cut if statement.text]


def _braced(text: str) -> str:
    """Return the text up to the brace that closes the one before it."""
    depth = 1
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if not depth:
            return text[:at]
    return text


_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")


def nfkc(text: str) -> str:
    """Return the text with the usual forms of full-width letters, digits and punctuation; what is raised becomes a
    power, and ``2½`` two numbers."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda found: "^" + found[0].translate(_RAISED), text)
    text = re.sub(r"(?<=\d)(?=[½¼¾⅓⅔⅛])", " ", text)
    # Long runs of combining marks take quadratic time, and say nothing.
    text = re.sub("[\u0300-\u036f]{4,}", "", text)
    return unicodedata.normalize("NFKC", text).replace("⁄", "/")[-_LONGEST:]


_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mathsf|rm|operatorname)\s*\{([^{}]*)\}")
_FORMAT = re.compile(r"\\\$|\\(?:left|right|displaystyle|quad)(?![A-Za-z])|\\[,;! ()\[\]]|\*\*|[$`~]")


def plain(text: str) -> str:
    """Return the text without what only formats it."""
    return _FORMAT.sub(" ", _WRAPPED.sub(r"\1", nfkc(text))).strip()


def key(text: str) -> str:
    """Return what answers of the same content have in common."""
    text = re.sub(r"^(?:the|an?)\s+", "", plain(text).strip(" \"'“”"), flags=re.IGNORECASE)
    return re.sub(r"\s+", "", re.sub(r"([\^_])\{(-?\w)\}", r"\1\2", text)).rstrip("。.,;:?") or text
