"""Find the mathematical answer that a response states."""

from __future__ import annotations

import re

from rayrft.rewards.math.formula import TooLarge
from rayrft.rewards.math.reading import Words, clear, read_answer
from rayrft.rewards.text.notation import CURRENCY_SIGNS, normalized, signs
from rayrft.rewards.text.statements import LONGEST_STATEMENT, nfkc, statements
from rayrft.rewards.text.units import HAN_UNIT, is_unit

_COMMAND = r"\\[A-Za-z]+|\\[{}%]"
_PIECE = (
    rf"(?:{_COMMAND}|\{{(?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*+\}})*+\}})*+\}}|\d+(?:\.\d+)?|\.\d+|(?<![A-Za-z'’])(?![aAI]\s+(?:[A-Za-z]{{2}}|\d))[A-Za-z](?![A-Za-z'’])"
    rf"|[-+*/^_=<>!|()\[\]]|[{CURRENCY_SIGNS}])%?"
)
_AND = r"(?:,\s*+(?:and\b|or\b)?|\band\b|\bor\b)"
_RUN = re.compile(rf"{_PIECE}(?:\s*+{_AND}?\s*+{_PIECE})*+")
_LEAD = re.compile(
    r"[\s:*\"'“]*(?:(?:about|approximately|roughly|exactly|simply|just|only|therefore|thus|then|indeed|equal\s+to|given\s+by"
    r"|either|both|the\s+number|a\s+total\s+of|equals|clearly)\b[\s:*]*)*",
    re.IGNORECASE,
)
_OTHERWISE = r".*(?:\b(?:and|or|but)|[,;])\s+[-\d\\][^,;]*\b(?:at|when|if|for|with|where|otherwise)\b"
_OPEN = re.compile(
    r"[\s:*]*(?:(?:(?:can)?not|n['’]t|never|neither|between|from|at\s+(?:least|most)|(?:more|less|greater|fewer)\s+than"
    r"|over|under)\b(?:\s+\w+){0,2}|(?:不|并?非|至[少多]|最[少多]|[大小多少低高]于|超过|介于|在)[^\d\s,.。]{0,6})\s*[-\d$\\]",
    re.IGNORECASE,
)
_RANGE = (
    r"\?|吗|(?:(?:to|through)\b|[到至~])\s*[-\d$\\]|[–—]\s*\d|[多余]|以[上下内]"
    rf"|(?:at\s+(?:least|most)|or\s+(?:more|less|fewer|higher|lower|above|below))\b|,?\s*(?:when|if|for)\b{_OTHERWISE}"
)
_LEFT_OPEN = re.compile(
    rf"\s*+(?:{_RANGE}|(?:is|are)\s+(?:not|wrong|incorrect)\b|是?(?:错|不对|不正确))", re.IGNORECASE
)
"""The text after a denied number, or after one end of a range."""
_LEFT_OPEN_BEHIND_UNIT = re.compile(rf"\s*+(?:{_RANGE})", re.IGNORECASE)
_BEFORE = re.compile(
    r"(?:(?:\b(?:can)?not|n['’]t|\bnever|\brather\s+than|\binstead\s+of)\s+(?:\w+\s+){0,2}|(?:不|并?非)[^\d\s,.。]{0,4}"
    r"|\d\s*(?:to\b|[–—到至~])\s*)$",
    re.IGNORECASE,
)
_CONTRAST = re.compile(
    r"(?:\b(?:rather\s+than|instead\s+of|as\s+opposed\s+to)|[\d%})]\s*,?\s*(?:and\s+|but\s+)?not)\s+(?:\w+\s+){0,2}$|而[不非]是?\s*$",
    re.IGNORECASE,
)
"""The text before a number that is contrasted with the stated one: "5 rather than 6"."""
_INSTEAD = re.compile(r"\s*(?:not\s+[^\s,]+\s*,?\s*but\s+(?=[-\d$\\])|不是[^,]{1,20},?\s*而是)", re.IGNORECASE)
_CONDITION = re.compile(
    r"(?<=[\w%)}\]]),?\s+(?:at(?!\s+(?:least|most)\b)|when|whenever|if|for|with|where|since|because)\b"
    rf"(?!{_OTHERWISE})",
    re.IGNORECASE,
)
"""A condition or reason of a single answer, unlike "5 if x > 0 and 3 otherwise"."""
_NAMED_CONDITION = re.compile(
    r"(?<=[\d%)}])\s+(?:at|when|whenever|if|for|with|where)\s+(?P<name>[A-Za-z])\s*(?:[=<>]|\\[lgn]e)"
    r"(?:[^\\A-Za-z,;:]|\\[A-Za-z]++|\b[A-Za-z]\b|\band\b)*+$"
)
"""The end of a line that only says where the answer holds: "9 at x = 2"."""
_ASIDE = re.compile(r"(?<=[\w%°})\]])(?P<space>\s*)[(\[](?P<inside>(?:[^()\[\]]|[(\[][^()\[\]]*[)\]])++)(?:[)\]]|$)")
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:(?:arc)?(?:sin|cos|tan)|sec|csc|cot|log|exp|sqrt|max|min)(?![A-Za-z]))[A-Za-z]{3,}"
    r"|\b(?:so|is|as|to|of|in|at|by|or|if|no)\b|[\u4e00-\u9fff]|^\s*(?:\\approx|=)",
    re.IGNORECASE,
)
_WORDS_TOGETHER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}|[A-Za-z]{2,} [A-Za-z]{2,}|[\u4e00-\u9fff]")
_HEDGE = r"(?:(?:maybe|perhaps|possibly|probably|alternatively)\b[\s,]*)"
_HEDGED = re.compile(rf"(?:,|\bor\b|\band\b|(?<=\())[\s,]*{_HEDGE}+(?=[-\d$\\])", re.IGNORECASE)
"""A hedge before a further answer: "3 (or maybe 4)"."""
_ALSO = re.compile(r"\(\s*(?:or|and)\s+(?=[-\d\\]|[A-Za-z]\s*=)([^()]*)\)|\bas\s+well\s+as\b", re.IGNORECASE)
_MORE = re.compile(
    r"\s*(?:[,;]|[,;]?\s*\(?\s*(?:and|or|as\s+well\s+as)\b|或者?|以及|[和与及、])\s*(?:(?:and|or|also)\s+)*[-$\\\d]"
    rf"|[\s,;(]*(?:and|or)?[\s,]*{_HEDGE}+[-$\\\d]",
    re.IGNORECASE,
)
"""The text between the first and a further answer."""
_UNITS = re.compile(
    r"\s*(?:\\text\s*\{[^{}]*\}|(?!(?:to|is|are|and|or|but|so|because|since|as|which|for|not|an?|the|each|of|in|if|when"
    rf"|whenever|with|where|at|rather|instead|from)\b)[A-Za-z°µμ]+|{HAN_UNIT})"
    r"(?:\s*\^\s*\{?\d\}?)?(?:\s*/\s*[A-Za-z]+(?:\s*\^\s*\{?\d\}?)?)?"
)
_MATHEMATICAL = re.compile(r"(?<!\\)\$\$?((?:\\.|[^$\\])+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SPAN = re.compile(r"(?<!\\)\$((?:\\.|[^$\\])*)\$|\\\((.*?)\\\)|\\\[(.*?)\\\]", re.DOTALL)
_SPACED = re.compile(r"\s+(?=[(\[])|\s*\\left(?![A-Za-z])\s*")
"""Space before a bracket, without meaning in a formula."""
_BULLET = re.compile(r"^\s*(?:(?:[-*>#]+|\d+[.)])\s+|\*+)")
_DENIED_BOX = re.compile(r"(?:\b(?:can)?not|n['’]t)\s+(?:be\s+|equal\s+(?:to\s+)?)?\$*$", re.IGNORECASE)
_PLAIN_NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")
_MOST_LINES, _LONGEST_LINE = 20, 500


def find_answer(response: str, *, strict: bool = False) -> str | None:
    """Return the stated answer of a response, or None. Raises TooLarge if a box is longer than an answer."""
    if len(response) < 40 and _PLAIN_NUMBER.fullmatch(response) and not strict:
        return response
    for statement in statements(response, strict=True):
        if statement.boxed:
            if len(statement.text) == LONGEST_STATEMENT:
                raise TooLarge("cut")
            start = max(response.rfind("\\box"), response.rfind("\\fbox"), 0)
            return None if _DENIED_BOX.search(response[max(start - 40, 0) : start]) else statement.text
        text = _INSTEAD.sub("", statement.text, count=1)
        if _OPEN.match(text):
            return None
        found = _announced(text)
        if found is not None:
            return found or None
    return None if strict else _last(response)


def _announced(text: str) -> str | None:
    """Return the first answer of an announcement, or its only one; empty if it is left open, None if it is missing."""
    if not (text := text[_LEAD.match(text).end() :].partition("</")[0]).strip():  # type: ignore[union-attr]
        return None
    span = _MATHEMATICAL.match(text)
    if span and not _MORE.match(rest := text[span.end() :]):
        if _LEFT_OPEN.match(rest):
            return ""
        rest, said = _unmarked(rest), next(filter(None, span.groups()))
        percent = "%" if re.match(r"\s*(?:\\?%|percent\b)", rest) else ""
        return f"{said}{percent or _measure(said.rstrip(), _UNITS.match(rest))}"
    return _run(_unmarked(text))


def _unmarked(text: str) -> str:
    """Return the text without the marks of mathematics and emphasis."""
    text = _SPAN.sub(lambda span: f" {_SPACED.sub('', span[span.lastindex or 0])} ", signs(text).replace("\\!", ""))
    text = re.sub(r"(?<!\\)\\[()\[\],;]|\*\*|\\right(?![A-Za-z])", " ", text).replace("{,}", ",").replace("\\$", "$")
    text = _HEDGED.sub(" or ", text)
    return _ALSO.sub(lambda also: f" and {also[1] or ''}", text) if "(" in text or "as well" in text else text


def _without_asides(text: str) -> str:
    """Return the text without explanations in brackets: "12 (3 × 4)", but not "3 (x + 1)"."""
    return _ASIDE.sub(_part, text) if "(" in text or "[" in text else text


def _part(bracket: re.Match[str]) -> str:
    """Return a bracket that is part of a formula, else nothing."""
    before, inside = bracket.string[: bracket.start()], bracket["inside"]
    if not re.search(r"[\d\\]", before):
        return bracket[0]
    if (_PROSE if bracket["space"] else _WORDS_TOGETHER).search(inside):
        return bracket[0] if before[-1].isalpha() and not bracket["space"] else ""
    multiplied = re.match(r"\s*[\^!/*(\[]", bracket.string[bracket.end() :])
    if not bracket["space"] or not (before[-1].isdigit() or before[-1] == "%") or multiplied:
        return bracket[0]
    named = re.search(r"(?<![\\A-Za-z])[A-Za-z]|\\(?!times|cdot|div|d?frac)", inside)
    return bracket[0] if named and re.search(r"[-+*/^\\]", inside) and "=" not in inside else ""


def _run(text: str) -> str | None:
    text = _without_asides(text.strip())
    if (run := _RUN.match(text)) and (run[0][0] == "^" or not _states(run[0])):
        run = None
    if run and (condition := _CONDITION.search(text, run.end())):
        between = text[run.end() : condition.start()]
        if len(between) < 30 and not re.search(r"[\d,;.]", between):
            text = text[: condition.start()]
    sentence = re.split(r"(?<=[^\s.])[.!](?:\s|$)|。", text, maxsplit=1)[0]
    if len(normalized(sentence)) < 60 and clear(read_answer(sentence)):
        return sentence
    if run:
        return _finished(text, run)
    runs = _runs(sentence, r"\d")
    return _finished(sentence, runs[0]) if len(runs) == 1 else None


def _runs(text: str, holding: str) -> list[re.Match[str]]:
    """Return the runs that match ``holding``, without the powers of units."""
    runs = [run for run in _RUN.finditer(text) if re.search(holding, run[0])]
    return [run for run in runs if run[0][0] != "^" or "=" in run[0] or not run.start()]


def _states(run: str) -> bool:
    """Whether a run of mathematical signs states a value, not only a bracket or the first word of a sentence."""
    letter = re.fullmatch(r"\s*\(?[A-Za-z]\)?\s*", run) and run.strip() not in {"a", "A", "I"}
    return bool(letter or re.search(r"\d|\\[A-Za-z]|[A-Za-z]\s*[-+*/^_=]", run))


def _finished(text: str, run: re.Match[str]) -> str:
    """Return the run with the unit after it; empty if it is left open."""
    rest, said = text[run.end() :], re.sub(r"^\^\s*\{?\d+\}?\s*(?==)", "", run[0].rstrip(" ([-"))
    if said[-1:] in {")", "]"} and not re.search(r"[(\[]", said):
        said = said[:-1]
    if _LEFT_OPEN.match(rest) or _BEFORE.search(text[: run.start()]):
        return ""
    if percent := re.match(r"\s*(?:\\?%|percent\b)", rest):
        return said + percent[0]
    unit = _UNITS.match(rest) if re.search(r"(?:[\d})]|\\pi)$", said) else None
    if unit and _LEFT_OPEN_BEHIND_UNIT.match(rest, unit.end()):
        return ""
    return said + _measure(said, unit)


def _measure(said: str, unit: re.Match[str] | None) -> str:
    """Return the unit after a stated value, else nothing."""
    if not unit or len(unit[0]) > 40 or not (said[-1:].isdigit() or unit[0].isascii()):
        return ""
    known = re.search(r"(?:[\d}]|\\pi)$", said) and is_unit(unit[0].strip(), unit[0][0] == " ")
    return unit[0] if known or "\\text" in unit[0] else ""


def _last(response: str) -> str | None:
    """Return the last formula or number of the last lines that hold one. Raises TooLarge if it is too long."""
    lines = [line for line in nfkc(response).split("\n") if line.strip()]
    for whole_line in reversed(lines[-_MOST_LINES:]):
        line = _BULLET.sub("", whole_line[-_LONGEST_LINE:]).strip()
        if re.fullmatch(r"[\s$\\[\]().,]*", line):
            continue
        whole, cut = _unmarked(line).strip(" :*").rstrip(" .:*。"), len(whole_line) > _LONGEST_LINE
        text = _without_asides(whole)
        if condition := _NAMED_CONDITION.search(text):
            stated = text[: condition.start()]
            solved = re.search(rf"(?<![A-Za-z\\]){condition['name']}(?![A-Za-z])[^=]*=[^=]*$", stated)
            text = text if solved else stated
        if len(text) < 80 and clear(answer := read_answer(text)) and not isinstance(answer, Words):
            return text
        spans = [found for found in _MATHEMATICAL.finditer(line) if re.search(r"\w", found[0])]
        if spans and spans[-1][0] == line.rstrip("."):
            return next(filter(None, spans[-1].groups()))
        runs = _runs(text, r"\d|\\[A-Za-z]{2}")
        if not runs:
            continue
        if cut and runs[-1].start() <= 1:
            raise TooLarge("cut")
        meant = (run for run in reversed(runs) if not _CONTRAST.search(text[max(run.start() - 60, 0) : run.start()]))
        last = next(meant, runs[-1])
        if spans and text == whole and last is runs[-1] and not re.search(r"\d", rest := line[spans[-1].end() :]):
            inner = next(filter(None, spans[-1].groups()))
            if inner.strip() in last[0] and not re.search(r"\b(?:or|and)\b", last[0]):
                left_open = _LEFT_OPEN.match(rest) or _BEFORE.search(line[: spans[-1].start()])
                return None if left_open else inner
        return _finished(text, last) or None
    return None
