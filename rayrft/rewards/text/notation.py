"""One spelling of numbers and formulas that are written in several ways."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from rayrft.rewards.text.statements import nfkc

CURRENCIES = {
    "$": ("dollar", "USD"), "€": ("euro", "EUR"), "£": ("sterling", "GBP"), "¥": ("yuan", "CNY", "RMB"),
}  # fmt: skip
"""By sign: the unit, and its codes."""
CURRENCY_SIGNS = "".join(CURRENCIES)
CURRENCY_CODES = "|".join(code for _, *codes in CURRENCIES.values() for code in codes)
"""Alternatives of a regular expression."""
_SYMBOLS = {
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "√": "\\sqrt ", "π": "\\pi ", "∞": "\\infty ",
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∓": "\\mp ", "−": "-", "°": "^\\circ ", "\u222a": "\\cup ",
    "∈": "\\in ", "≈": "\\approx ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ",
    "，": ",", "、": ",", "；": ";", "、 ": ",", "∅": "\\emptyset ",
}  # fmt: skip
_MINUS = re.compile(r"(?:\b(?:minus|negative)\s+|负\s*|(?<![\d)}\]%])(?<![\d)}\]%]\s)–)(?=[-\d.\\$(])", re.IGNORECASE)
"""A minus sign in words, or an en dash that is one: between numbers it may be "to"."""
_HAN_AND = re.compile(r"\s*,?\s*(?:或者?|以及|和|与|及)\s*(?=[-\d.\\$({\[A-Za-z])")
_BOLD = r"\\(?:math(?:bf|it|sf|rm)|boldsymbol|bm|pmb|underline|text(?:bf|it)?|bf|rm)"
_REWRITTEN = [
    (re.compile(r"(?<!\\)\\[,;:! >]|\\(?:left|right|[bB]igg?|displaystyle|limits|q?quad)(?![A-Za-z])|~"), " "),
    (re.compile(r"\\(?:text|mathrm)\s*\{\s*(?:and|or|,)\s*\}|(?:\s*,)?\s*(?<!\\)\b(?:and|or)\b"), ","),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(rf"{_BOLD}\s*(?=\{{[^{{}}A-Za-z\\]*(?:\d|\\[A-Za-z]+)(?:[^{{}}A-Za-z]|\\[A-Za-z]+)*[{{}}])"), " "),
    (re.compile(r"\\(?:text(?:bf|it|rm|normal|sf)?|mbox|mathbf|mathit|mathsf|rm|bf|operatorname)\s*(?=\{)"), r"\\text"),
    (re.compile(r"\\(?:bf|rm|it|sf)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\mathrm\s*(?=\{)"), r"\\text"),
    (re.compile(r"\\text\s*\{\s*([a-zA-Z])\s*\}"), r" \1 "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"(?:\\mathbb ?(?:\{ ?R ?\}|R)|\u211d|\\(?:R|reals)(?![A-Za-z]))(?! ?[\^_])"), r"(-\\infty ,\\infty )"),
    (re.compile(r"\\leqslant(?![A-Za-z])|\\leq(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\geqslant(?![A-Za-z])|\\geq(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\degrees?(?![A-Za-z])|\\text\s*\{\s*degrees?\s*\}|(?<=\d)\s*degrees?\b"), r"^\\circ "),
    (re.compile(r"\\text\s*\{\s*(?:percent|%|\\%)\s*\}|\\%|(?<=[\d} ])\s*(?:per ?cent\b|%)"), "%"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\[lr]?vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"(?<![A-Za-z\\])(sqrt|pi|(?:arc)?(?:sin|cos|tan)|sec|csc|cot|ln|log|exp|infty)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"(?<![A-Za-z\\])(?:infinity|oo|inf)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\*\*(?=\s*[\d({-])"), "^"),
    (re.compile(r"\*\*|`"), " "),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (re.compile(r"(?<=\d)又(?=\d)"), " "),
    (re.compile(r"(?<=\d),\s+(?=\d{3}(?:\D|$))"), ", "),
]  # fmt: skip


def stripped(text: str) -> str:
    """Return a text with single spaces, without spaces and punctuation at both ends."""
    return re.sub(r"\s+", " ", text).lstrip(" \t\n:;,*").rstrip(" \t\n.:;,*")


@lru_cache(maxsize=256)
def normalized(text: str) -> str:
    """Return the text with one spelling for what has several, without what only formats it."""
    text = nfkc(text)
    text = _REPEATING.sub(_repeating, text)
    for word, sign in _BETWEEN_INEQUALITIES:
        parts = word.split(text)
        if len(parts) > 1 and all(map(INEQUALITY.search, parts)) and len(set(map(letters, parts))) == 1:
            text = sign.join(parts)
    text = signs(text)
    # A space command after a comma between digits is that of a thousand's separator: 5,\!525.
    text = re.sub(r"(?<=\d),\s*\\!\s*(?=\d{3})", ",", text).replace("\\$", "$")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    return stripped(text)


_REPEATING = re.compile(r"(\d+)\.(\d*) ?(?:\\(?:overline|bar) ?\{(\d+)\}|\\dot ?\{?(\d)\}?(?:(\d*)\\dot ?\{?(\d)\}?)?)")


def _repeating(found: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    whole, once, *again = (group or "" for group in found.groups())
    period = "".join(again)
    value = Fraction(int(whole + once + period) - int(whole + once), (10 ** len(period) - 1) * 10 ** len(once))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


INEQUALITY = re.compile(r"[<>≤≥]|\\[lg](?:eq?(?:slant)?|t)(?![A-Za-z])")
_BETWEEN_INEQUALITIES = [
    (re.compile(r"\\(?:text|mathrm)\s*\{\s*or\s*\}|\bor\b|或者?|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])"), r" \cup "),
    (re.compile(r"\\(?:text|mathrm)\s*\{\s*and\s*\}|\band\b|且|\\land(?![A-Za-z])|\\wedge(?![A-Za-z])"), r" \cap "),
]


def letters(text: str) -> frozenset[str]:
    """Return the variables of one letter in a text."""
    return frozenset(re.findall(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", text))


_POWER = re.compile(r"(?<=[\d)}]) ?(?:\\text ?\{ ?(squared|cubed) ?\}|(squared|cubed)\b(?! *[A-Za-z]))")


def signs(text: str) -> str:
    """Return the text with commands and signs of ASCII for those beyond it, and for words of minus and of powers."""
    if "squared" in text or "cubed" in text:
        text = _POWER.sub(lambda power: {"squared": "^2", "cubed": "^3"}[power[1] or power[2]], text)
    if text.isascii():
        return _MINUS.sub("-", text) if "inus" in text or "egative" in text else text
    text = _MINUS.sub("-", text)
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    return _HAN_AND.sub(",", text)
