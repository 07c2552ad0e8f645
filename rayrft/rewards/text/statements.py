"""Find the statements of a response that may be its answer, and normalise their text."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from itertools import accumulate

_LONGEST, LONGEST_STATEMENT, _MOST_STATEMENTS = 20_000, 500, 20
"""Bounds of the time: characters from the end of a response, characters of a statement, statements of a response."""


@dataclass(frozen=True)
class Statement:
    """A possible answer in a response; for the last line, also the text ``before`` it."""

    text: str
    announced: bool
    boxed: bool = False
    before: str = ""

    @property
    def readings(self) -> list[str]:
        """The text, and its rest after a lead-in such as "so it must be"."""
        rest = self.text[_LEAD_IN.match(self.text).end() :]  # type: ignore[union-attr]  # it always matches
        return [self.text, rest] if rest and rest != self.text else [self.text]

    @property
    def last_lines(self) -> list[str]:
        """The text, and up to 20 lines before it that are not blank."""
        lines = [line for line in self.before[-8 * LONGEST_STATEMENT :].split("\n") if line.strip()]
        return [*lines[-20:], self.text]


_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|well|clearly|I (?:think|believe|guess|would say)|I'd say)\b\s*[,:]?\s*"
    r"|(?:所以|因此|因而|故|那么|我认为|我觉得|我想)[,:]?\s*)*+"
    r"(?:I (?:would |will )?(?:choose|select|pick|say)\b\s*|I'd (?:choose|select|pick|say)\b\s*"
    r"|(?:我|应|(?<=故))选择?[为:]?)?+"
    r"(?:\b(?:it|that|this)(?:['’]s| is| must be| should be| would be| has to be| can only be)\b\s*:?"
    r"|(?:这|那|它)?(?:应该|应当|只能|肯定|一定|就|应)?[是为](?!否|不是|没))?+\s*",
    re.IGNORECASE,
)

_IS = (
    r"\s+(?:is|are|(?:should|must|would|will|can\s+only|ha(?:s|ve)\s+to|ought\s+to)\s+be)\b"
    r"(?:\s+(?:therefore|thus|hence|clearly|indeed|obviously|definitely|simply|probably|(?:most\s+)?likely)\b)*\s*:?"
)
_OPTION = r"(?:选项|答案|说法|叙述|表述|描述|判断|结论|一[项个]|项)"
_CHOOSES = r"选择?(?:选项|[为:\s*$])*(?=[(\[]?\s*(?:[A-Z]{1,8}|[a-z])(?![A-Za-z0-9=]))"
"""Before letters only: "select 2 of 5" is not an answer."""
_CONCLUDES = r"(?:故|所以|因此|因而|综上(?:所述)?|可知)"
_FIELD = re.compile(
    r"""[\s*]*+(?:"((?:[^"\\]|\\.)*+)"|'((?:[^'\\]|\\.)*+)'|\[([^\[\]{}]*+)\]|([-\w.]++)[^\S\n]*+(?=[,}\n]|$))"""
)
"""The value of a field of JSON: a text, a list of texts and numbers, or one word or number."""
_ANNOUNCED = re.compile(
    rf"(?P<field>(?<=[\"'])(?:final_|correct_)?answer[\"']\s*:)|"
    rf"\banswers?\b(?:\s+(?:to|for)\b[^.\n]{{0,60}}?)?\**\]?(?:{_IS}|\s*[:=])|<answer>|\bI\s+(?:choose|select|pick)\b"
    rf"|\b(?:choices?|options?)\**{_IS}"
    rf"|\b(?:correct|right|true)\s+(?:(?:choice|option)s?\**\s*:|(?:statement|one|letter)s?\**(?:{_IS}|\s*:))"
    rf"|####(?!#)(?=[^\n]*\s*\Z)|【?答案】?(?:应?该?[就即]?(?:[是为]|{_CHOOSES})|[ \t:])*"
    rf"|(?:正确|符合(?:题意|要求|条件))(?:的{_OPTION}?|{_OPTION})\**(?:[是为有]|\s*:)"
    rf"|(?:^|(?<=[\s,;:.!?。】)])|{_CONCLUDES},?|我|则|[本此该]题)(?:[本此该]题|其实|应该?|只能|必须|就)*{_CHOOSES}",
    re.IGNORECASE | re.MULTILINE,
)
_OF_ANOTHER = re.compile(
    r"(?:\b(?:wrong|incorrect|false|mistaken|tempting)\s+(?:\w+\s+)?|\bif\s+|错误的?|易错的?|干扰|不|非)\Z"
    r"|(?:误|易错|别|不[要可能应该]|勿|以为|有人|同学)[^,;:.!?。\n]*\Z",
    re.IGNORECASE,
)
"""The text before an announcement of another's, or a wrong, answer."""
_SUPPOSED = re.compile(r"(?:若|如果|假如|假设|要是|倘若)[^;.!?。\n]*\Z")
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_CLOSED_BOX = rf"{_BOX.pattern}((?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*+\}})*+\}})*+)\}}"
_BOXES = re.compile(
    rf"{_CLOSED_BOX}(?:[\s$]*(?:[,;、]\s*(?:and\b|or\b)?|\band\b|\bor\b|或者?|和|与)[\s$]*(?:[A-Za-z]\s*=\s*)?{_CLOSED_BOX})+"
)
"""Boxes in a list: ``\\boxed{5}, \\boxed{6}``."""
_ITEM = r"\n\s*(?:(?:[-*•]|\d{1,2}[.)])\s+|\(\d\)\s*)([^\n]+)"
_LIST = re.compile(rf"[ \t:*]*(?:{_ITEM}){{1,20}}")


def statements(response: str, *, strict: bool = False) -> list[Statement]:
    """Return the possible answers of a response, of which the first readable one counts: the last box, or list of
    boxes; announcements ("the answer is", four hashes, 答案), the last first, up to the end of the line or of a list of
    short items; and, unless ``strict``, the last line."""
    text, found = nfkc(response[-_LONGEST:]).strip(), []
    for box in list(_BOX.finditer(text))[-1:]:
        end = text[-2 * LONGEST_STATEMENT :]
        lists = list(_BOXES.finditer(end)) if end.count("box") > 1 else []
        if lists and "box" not in end[lists[-1].end() :]:
            boxed = ", ".join(re.findall(_CLOSED_BOX, lists[-1][0]))
        else:
            boxed = _braced(text[box.end() :])
        found.append(Statement(boxed, True, boxed=True))
    for mark in reversed([mark for mark in _ANNOUNCED.finditer(text) if _is_its_own(mark)][-_MOST_STATEMENTS:]):
        if listed := _LIST.match(text, mark.end()):
            stated = ", ".join(re.findall(_ITEM, listed[0]))
        else:
            field = _FIELD.match(text, mark.end()) if mark["field"] else None
            stated = _decoded(field) if field else text[mark.end() :].lstrip(" :*\n\t").partition("\n")[0]
        found.append(Statement(stated, True))
    if not strict:
        before, _, line = text.rpartition("\n")
        found.append(Statement(line, False, before=before))
    cut = [replace(statement, text=statement.text.strip()[:LONGEST_STATEMENT]) for statement in found]
    return [statement for statement in cut if statement.text]


def _decoded(field: re.Match[str]) -> str:
    r"""Return the text of a field's value, in which a command of LaTeX may lack JSON's second backslash."""
    if field[3] is not None:
        return ", ".join(_decoded(item) for item in _FIELD.finditer(field[3]))
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), field[field.lastindex or 1])
    return re.sub(r'\\([\\"/])', r"\1", text)


def _is_its_own(mark: re.Match[str]) -> bool:
    """Whether the response announces its own answer."""
    before = mark.string[max(0, mark.start() - 60) : mark.start()]
    concluded = "选" not in mark[0] or re.match(_CONCLUDES, mark[0])
    return not _OF_ANOTHER.search(before) and bool(concluded or not _SUPPOSED.search(before))


def _braced(text: str) -> str:
    """Return the text up to the closing brace of a group that is open."""
    depths = accumulate((char == "{") - (char == "}") for char in text)
    return text[: next((at for at, depth in enumerate(depths) if depth < 0), len(text))]


_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")


def nfkc(text: str) -> str:
    """Return the text with usual forms of full-width characters, superscripts as powers, ``2½`` as two numbers."""
    text = re.sub("[①-⑳]", lambda found: f"({ord(found[0]) - ord('①') + 1})", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda found: "^" + found[0].translate(_RAISED), text)
    text = re.sub(r"(?<=\d)(?=[½¼¾⅓⅔⅛])", " ", text)
    # Long runs of combining marks take quadratic time.
    text = re.sub("[\u0300-\u036f]{4,}", "", text)
    return unicodedata.normalize("NFKC", text).replace("⁄", "/")[-_LONGEST:]


_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mathsf|rm|operatorname)\s*\{([^{}]*)\}")
_FORMAT = re.compile(r"\\\$|\\(?:left|right|displaystyle|quad)(?![A-Za-z])|\\[,;! ()\[\]]|\*\*|[$`~]")


def unwrapped(text: str) -> str:
    """Return the text after `nfkc`, without commands of LaTeX around words."""
    return _WRAPPED.sub(r"\1", nfkc(text))


def plain(text: str) -> str:
    """Return the text without marks and commands of formatting."""
    return _FORMAT.sub(" ", unwrapped(text)).strip()


def normal_form(text: str) -> str:
    """Return the same text for answers that differ only in articles, spaces and punctuation."""
    text = re.sub(r"^(?:the|an?)\s+", "", plain(text).strip(" \"'“”"), flags=re.IGNORECASE)
    return re.sub(r"\s+", "", re.sub(r"([\^_])\{(-?\w)\}", r"\1\2", text)).rstrip("。.,;:?") or text
