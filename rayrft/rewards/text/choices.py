"""Read which options of a question an answer chooses, in English and Chinese."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rayrft.experience import Task
from rayrft.rewards.base import RewardResult, task_value
from rayrft.rewards.text.statements import LONGEST_STATEMENT, Statement, nfkc, normal_form, plain
from rayrft.rewards.text.verdicts import verdict

_IN_BRACKETS = r"[(\[]\s*(?:[A-Z]{1,8}|[a-z])\s*[)\]]"
_BARE = r"[A-Z]{1,8}(?![A-Za-z])"
_LETTER = rf"(?:{_IN_BRACKETS}|{_BARE})"
_AND = r"\s*(?:[,;&+/、]\s*(?:and\b\s*|还有)?|\band\b|\bas\s+well\s+as\b|和|与|及|以及|还有)\s*"
# What follows a letter in brackets without a sign between is the text of its option: "(B) C and D are isotopes".
_LETTERS = rf"(?>{_LETTER}(?:{_AND}{_LETTER}|\s*{_IN_BRACKETS}|(?<![)\]])\s*{_BARE})*)(?:(?<=[)\]])|(?![A-Za-z0-9]))"
_LEADING = re.compile(
    rf"(?:(?:(?i:only|just|both|options?|choices?|letters?)|选项|只有|not\s++{_LETTERS}\s*+,?\s*+but|不是{_LETTERS},?\s*+而是)"
    rf"[\s:]*+)*+({_LETTERS}|(?:(?<=ption )|(?<=hoice )|(?<=选项))[a-z]\b)"
)
_OPEN = re.compile(
    r"[\s,(]*(?:or\b|或者?|还是|\|)|\s*(?:\?|吗)|\s*(?:is|are)\s+(?:the\s+)?(?:not\b|in|wrong|false|almost\b|part)|(?:选项|[项是均都并也])*(?:错|不)"
)
"""What follows letters that are not chosen, or of which it is left open."""
_ENDS = re.compile(r"\s*(?:$|[^\sA-Za-z]|(?:because|since|as|is|are|which|with|for|due|instead|rather|not|but)\b)")
_ASIDE = re.compile(
    rf"^([^,;]*{_LETTER})[,;]\s*(?:(?:and|but|while)\s+)?{_LETTER}\s*(?:is\s+(?:not|in|wrong|false)|选?项?(?:错|不)).*"
)
"""After an announced letter, what another one is not."""
_LABELLED = re.compile(rf"[\s*•-]*{_LETTERS}(?:\s*[.:)、]|\s-\s|(?<=[)\]]))\s*(?=\S)")
_JUDGED = re.compile(
    rf"(?:^|(?<=[\s,;.。*]))(?P<label>{_LETTERS})(?:\s*[.:)、]|\s-\s|(?<=[)\]])(?=\s*[^\s,;.。]))"
    rf"|(?<![A-Za-z])(?P<subject>{_LETTERS})\s*(?:选?项)?(?=\s*(?:(?:is|are)\b|[是均都也不正错对符√✓×✗]))"
)
_DENIED = re.compile(
    r"\b(?:not|never|neither|nor|none|doubt|if|whether|suppose)\b|n['’]t\b|如果|若|假设|是否", re.IGNORECASE
)
_THE_ANSWER = re.compile(
    r"(?:\bthe\s+)?\b(?:(?:correct|right|best|only)\s+)?(?:answer|option|choice)s?\b|正确(?:答案|选项)|符合(?:题意|要求)"
)
_OF_OTHERS = re.compile(r"(?:\b(?:others?|rest|remaining)\b|其余|其他|其它|另外)[^,;.。\n]*")
_ASKS_WRONG = re.compile(r"不正确|错误|有误|不符合|\b(?:NOT|EXCEPT|(?i:incorrect|false|wrong))\b")
_NAMED_WRONG = re.compile(
    r"(?:(?:错误|不正确|有误)的?(?:选项|说法|叙述|表述|一?项)?[是为有:]|\b(?:wrong|incorrect|false|untrue)(?:\s+\w+)?\s+(?:is|are)\b)"
    rf"\s*(?:option\s*|选项)?({_LETTERS})"
)


@dataclass(frozen=True)
class _Question:
    """The texts of the options, the last letter, and whether the wrong option is asked for."""

    options: Sequence[str]
    last: str
    asks_wrong: bool


def choice(task: Task, found: Sequence[Statement], partial: float = 0.0) -> RewardResult:
    """Score the chosen letters; some of the right ones give ``partial``."""
    given = task_value(task, "options", Sequence[str] | dict[str, str], ())
    given = [given[letter] for letter in sorted(given)] if isinstance(given, dict) else given
    texts = [re.sub(r"^\s*(?:\([A-Z]\)|[A-Z][).:、])", "", nfkc(text)) for text in given]
    options = [normal_form(text) for text in texts]
    reference, last = nfkc(task.answer).upper(), chr(ord("A") + (len(options) or 26) - 1)
    right = set(re.findall("[A-Z]", reference))
    if not re.fullmatch(r"[^\w]*[A-Z](?:[^\w]*[A-Z])*[^\w]*", reference) or max(right) > last:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} names no option")
    question = _Question(options, last, bool(_ASKS_WRONG.search(nfkc(task.question))))
    read = (_chosen(each, question) if each.announced else _concluded(each, question) for each in found)
    chosen = next((letters for letters in read if letters is not None), set[str]())
    value = 1.0 if chosen == right else partial * bool(chosen) * (chosen < right)
    return RewardResult(value, {"parsed": float(bool(chosen))}, answer="".join(sorted(chosen)))


def _concluded(statement: Statement, question: _Question) -> set[str] | None:
    """Return the chosen letters of the last lines: options judged right one by one, else those of the line before."""
    lines = [line[:LONGEST_STATEMENT] for line in statement.last_lines]
    last = takewhile(lambda line: _LABELLED.match(plain(line)) or any(_judged(line, question)), reversed(lines))
    judging = list(last)
    one = _LABELLED.sub("", plain(statement.text), count=1)
    if len(judging) > 1 or (judging and len(lines) > 1 and normal_form(one) not in question.options):
        right, wrong = _judged("\n".join(reversed(judging)), question)
        if right:
            return set() if right & wrong else right
        for line in lines[: -len(judging)][-1:]:
            if chosen := _chosen(Statement(line.strip(), False), question):
                return chosen
        if wrong or len(judging) > 1:
            return set()
    return _chosen(statement, question)


def _chosen(statement: Statement, question: _Question) -> set[str] | None:
    """Return the chosen letters, empty if the choice is open; None if nothing can be read."""
    read = (_read(replace(statement, text=text), question) for text in statement.readings)
    return next((letters for letters in read if letters is not None), None)


def _read(statement: Statement, question: _Question) -> set[str] | None:
    text, last = plain(statement.text).strip(" \"'“”_-"), question.last
    if statement.announced:
        text = _ASIDE.sub(r"\1", text)
    bare = re.fullmatch(r"[\s(\[]*([a-zA-Z])[\s)\].。,]*", text)
    if bare and bare[1] <= last:
        return {bare[1]}
    for fold in (str, str.casefold):
        said = fold(normal_form(statement.text))
        same = [index for index, option in enumerate(question.options) if option and fold(option) == said]
        if len(same) == 1:
            return {chr(ord("A") + same[0])}
    if bare:
        return {bare[1].upper()}
    leading = _LEADING.match(text)
    letters, rest = (_each(leading[1]), text[leading.end() :]) if leading else (set[str](), "")
    known = bool(letters) and max(letters) <= last
    right, wrong = _judged(text, question)
    # "A" may be the first word of a sentence: "A train …".
    ends = _ENDS.match(rest) or (statement.announced and letters != {"A"})
    if known and ends and not letters <= right | wrong and not _OPEN.match(rest):
        return letters
    if right:
        return set() if right & wrong else right
    if question.asks_wrong and (named := _NAMED_WRONG.search(text)) and max(_each(named[1])) <= last:
        return _each(named[1])
    return set() if wrong or (known and _OPEN.match(rest)) else None


def _judged(text: str, question: _Question) -> tuple[set[str], set[str]]:
    """Return the letters of the options that are called right, and of those called wrong."""
    judged: dict[bool, set[str]] = {True: set(), False: set()}
    marks = list(_JUDGED.finditer(text := plain(text)))
    for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(text)], strict=False):
        letters, said = _each(mark["label"] or mark["subject"]), text[mark.end() : end]
        [*_, before] = re.split(r"[,.;。\n]", text[: mark.start()])
        if mark["subject"]:
            [said, *_] = re.split(r"[,.;。\n]", said)
        denied = _DENIED.search(before) and verdict(before) is None
        if max(letters) > question.last or denied or normal_form(said) in question.options:
            continue
        if (truth := verdict(_THE_ANSWER.sub("correct", _OF_OTHERS.sub("", said)))) is not None:
            judged[truth] |= letters
    swap = question.asks_wrong and len(judged[True]) > 1 and judged[False]
    return (judged[False], judged[True]) if swap else (judged[True], judged[False])


def _each(letters: str) -> set[str]:
    return set("".join(re.findall(r"(?<![A-Za-z])(?:[A-Z]+|[a-z])(?![A-Za-z])", letters)).upper())
