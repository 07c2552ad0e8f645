"""Read whether a text calls something true or false, in English and Chinese."""

from __future__ import annotations

import re

from rayrft.rewards.text.statements import plain

_SHORT = {
    **dict.fromkeys(["t", "y", "yes", "right", "correct", "对", "是", "真", "没错", "没有错", "不错"], True),
    **dict.fromkeys(["f", "n", "no", "wrong", "x", "错", "否", "不对", "不是", "假", "不是真"], False),
}
"""Verdicts that fill a clause."""


def _pattern(english: str, after_is: str, chinese: str, signs: str) -> re.Pattern[str]:
    """Return the pattern of a verdict, without its words before a noun, as in "the correct value"."""
    return re.compile(
        rf"(?:\b(?:{english})|(?:(?<=is )|(?<=['’]s )|(?<=not )|(?<=n['’]t )){after_is})\b"
        r"(?!\s+(?!(?:because|since|as|for|that|when|if|in|and|but|or|of|by|to|at|with|so|here|too|given|under)\b)[a-z])"
        rf"|(?:{chinese})(?!的?(?!理由|无误)[\u4e00-\u9fff])|(?<![\w)])[{signs}](?!\s*[\w(])",
        re.IGNORECASE,
    )


_VERDICTS = {
    True: _pattern("true|correct", "right", "正确|无误", "√✓✔✅"),
    False: _pattern("false|incorrect|untrue", "wrong", "错误|有误", "×✗✘❌"),
}
_NEGATION = re.compile(
    r"\b(?:not|cannot|never|hardly|partially|partly|unlikely|doubt(?:ful)?|nor|half|no way|no longer|far from"
    r"|by no means|anything but)\b|n['’]t\b"
    r"|(?:不|未必|无|并[非不]|绝非|决非|远非|没有?|谈不上|难说)(?=(?:[不可能见得一定必完全总都说算是为会够太那么任何存在有])*$)",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"(?<!不)可能|也许|或许|如果|若|假如|是否|能否|才|有时"
    r"|\b(?:may|might|could|would be|sometimes|maybe|perhaps|possibly|if|whether|unless|neither)\b",
    re.IGNORECASE,
)
_ASKED = re.compile(
    r"\b(?:true\s*(?:or|/)\s*false|t\s*/\s*f)\b|(?:正确|对|真)(?:还是|或|与|/)(?:错误?|假)|[^.!?。;\n]*\?",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r"[,.:;!。\n()—]|\s[-–]\s|\b(?:because|since|but|and|so|which|while|whereas|although|though|therefore|hence)\b"
    r"|因为|由于|所以|因此|但是?|故",
    re.IGNORECASE,
)
_OF_IT = re.compile(
    r"(?:(?:thus|then|overall|clearly|indeed|definitely|actually|i|think|believe|say|it|this|that|the|given|above|whole"
    r"|statement|claim|sentence|proposition|assertion|equation|reason|is|are|must|should|be)\b\s*|['’]s\b\s*"
    r"|我认为|我觉得|综上|上述|以上|题目?|说法|说得|句?话|命题|判断|结论|观点|表述|叙述|[这该此本原道个种中的是为应])*+",
    re.IGNORECASE,
)
"""The text before the verdict in a clause that only gives a verdict."""
_PREDICATES = [
    (re.compile(r"\ban? (true|false|correct|incorrect) (?:statement|claim|proposition|assertion|sentence)\b"), r"\1"),
    (re.compile(r"(?<=[是为])(?:一[个种])?(真|假|正确|错误)的?(?:命题|说法|判断|描述|表述|结论|观点|叙述)$"), r"\1"),
    (re.compile(r"^.*\b(?:statement|claim|proposition|assertion|idea) that\b.*\s(?=is\b)"), "it "),
]
"""Verdicts with a noun after them; and quoted claims, of which only the verdict counts."""


def _read(clause: str) -> tuple[bool | None, bool]:
    """Return the verdict of a clause, if it has one, and whether it fills the clause."""
    for pattern, replacement in _PREDICATES:
        clause = pattern.sub(replacement, clause)
    clause = clause.strip(" \"'“”*_").removesuffix("的")
    for word in (clause.casefold(), _OF_IT.sub("", clause, count=1).casefold()):
        if word in _SHORT:
            return _SHORT[word], True
    said, alone = set[bool](), False
    for truth, pattern in _VERDICTS.items():
        for found in pattern.finditer(clause):
            before = clause[: found.start()]
            if not _SUPPOSED.search(before):
                said.add(truth != bool(len(_NEGATION.findall(before)) % 2))
                alone = not _NEGATION.sub("", _OF_IT.sub("", before, count=1)).strip() and not clause[found.end() :]
    return (said.pop(), alone) if len(said) == 1 else (None, False)


def verdict(text: str, first: str = "") -> bool | None:
    """Return the verdict of the clauses that only give a verdict, also in the first line; else of any clause of the
    text. None if there is no verdict, or both."""
    clauses, opening = ([_read(each) for each in _CLAUSE.split(_ASKED.sub(" ", plain(part)))] for part in (text, first))
    for said in ({truth for truth, alone in opening + clauses if alone}, {truth for truth, _ in clauses} - {None}):
        if said:
            return said.pop() if len(said) == 1 else None
    return None
