"""The units and currencies that answers use: which words are a unit, and how values are converted."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rayrft.rewards.text.notation import CURRENCIES, CURRENCY_CODES

HAN_UNIT = r"(?:(?![到至或和与及以多余不且而是则的有])[\u4e00-\u9fff]){1,8}(?:/[\u4e00-\u9fff]{1,4})?"
_SHORT = re.compile(
    r"[kMGTdcmnpuμµ]?(?:m|g|s|N|J|W|V|A|Pa|Hz|L|l|mol|eV|Wh|bit|B|F|C|H|cal|K|T|Wb|ohm|bar)|[htΩ]|ha|min|hrs?|sec|day"
    r"|yrs?|mo|wk|am|pm|rad|deg|[mk]ph|rpm|ft|in|yd|mi|lbs?|oz|gal|atm|dB|pH|ton|pcs|pts|sq|cu|of|[ck]ms|kgs"
    rf"|{CURRENCY_CODES}|AM|PM|MPH|[CK][Mm]|K[Gg]|kM|[A-Z]{{2,3}}s"
)
"""Units of few letters, which could be products of variables."""
_NO_WORDS = (
    "or and to not is are was wrong correct e at least most minus plus divided over more less fewer than above below"
    " under between hundreds thousands millions half halves third thirds fourths fifths tenths hundredths thousandths"
    " pi root sqrt sin cos tan log ln"
)
_NO_UNIT = re.compile(
    r"^\s*[-+*/^_:|~]|(?<![A-Za-z^*\-{])\d|[+×√π±|!<>=?]|\\(?!cdot)[A-Za-z]"
    r"|^\s*(?:squared|cubed|[多来余几])|[多半]$|以[上下内外]|分之|次方|[或至到和与的不错减乘除]|加(?!仑)|成(?![员人])"
    rf"|\b(?:{_NO_WORDS.replace(' ', '|')}|times(?=\s+\S))\b"
    r"|(?:平方|立方)(?![千厘分毫]?米|公里)",
    re.IGNORECASE,
)
"""Part of an expression, a range or a hedge after a number, but not of a unit."""


def is_unit(unit: str, spaced: bool) -> bool:
    """Whether letters after a number are a unit, not variables: ``5 m`` and ``5m/s``, but not ``5m``, ``5ab``."""
    words = re.findall("[A-Za-zµμΩ]+", unit.replace("\\cdot", "*"))
    if _NO_UNIT.search(unit):
        return False
    spoken = any(len(word) > 2 and re.search("[aeiou]|y$", word) for word in words)
    if not words or (spaced and spoken and (len(words[0]) > 2 or words[0] in {"of", "in"})):
        return True
    if not _SHORT.fullmatch(words[0]):
        return len(words[0]) > 3
    if len(words[0]) == 1 and len(words) == 1:
        return spaced and bool(re.fullmatch(r"\w|m ?\^ ?\{? ?[23] ?\}?", unit))
    known = all(len(word) > 3 or _SHORT.fullmatch(word) for word in words)
    return known and (spaced or len(words[0]) > 1 or "/" in unit)


_SYMBOLS = {
    "千米": "km", "公里": "km", "厘米": "cm", "毫米": "mm", "分米": "dm", "微米": "um", "纳米": "nm", "米": "m",
    "千克": "kg", "公斤": "kg", "毫克": "mg", "克": "g", "吨": "t", "毫升": "ml", "升": "l", "公顷": "ha",
    "小时": "h", "分钟": "min", "秒": "s", "天": "day", "时": "h", "年": "year",
    "星期": "week", "周": "week", "个月": "month", "焦耳": "J", "牛顿": "N", "瓦特": "W", "伏特": "V",
    "安培": "A", "帕斯卡": "Pa", "欧姆": "ohm", "赫兹": "Hz", "库仑": "C", "摩尔": "mol", "千": "k", "毫": "m",
    "牛": "N", "焦": "J", "瓦": "W", "伏": "V", "安": "A", "帕": "Pa", "欧": "ohm", "Ω": "ohm",
    "摄氏度": "degC", "°": "degree", "度": "degree", "每": "/", "个人": "person", "人": "person",
    "美元": "dollar", "元": "yuan", "角": "jiao", "¢": "cent", **{sign: each[0] for sign, each in CURRENCIES.items()},
}  # fmt: skip
"""Longer names first: they are replaced in this order."""
_SPOKEN = [
    (re.compile(r"(?:°|\bdegrees?)\s*C(?:elsius)?\b", re.IGNORECASE), "degC"),
    (re.compile(r"(?:°|\bdegrees?)\s*F(?:ahrenheit)?\b", re.IGNORECASE), "degF"),
    (re.compile(r"\bsq(?:uare|\.)?\s+([A-Za-z]+)|([A-Za-z]+)\s+squared\b"), r"\1\2**2"),
    (re.compile(r"\bcu(?:bic|\.)?\s+([A-Za-z]+)|([A-Za-z]+)\s+cubed\b"), r"\1\2**3"),
    (re.compile(r"平方(千米|公里|厘米|分米|毫米|米)"), r"\1**2"),
    (re.compile(r"立方(千米|公里|厘米|分米|毫米|米)"), r"\1**3"),
    (re.compile(r"\s+per\s+"), "/"),
    (re.compile(r"\\cdot|[·⋅]"), "*"),
]
_FACTOR = r"[A-Za-zµμ_]++(?:\*\*-?\d)?+"
_UNIT = re.compile(rf"{_FACTOR}(?:(?:\s*+[*/]\s*+|\s++(?:per\s++)?)\(?{_FACTOR}\)?)*+")
"""Nothing that pint would have to calculate."""


@lru_cache(maxsize=256)
def parse_unit(text: str) -> Any:
    """Return the unit that the text begins with, as pint has it; None if it begins with none."""
    from rayrft.rewards.text.unit_registry import REGISTRY

    for pattern, replacement in _SPOKEN:
        text = pattern.sub(replacement, text)
    for name, symbol in _SYMBOLS.items():
        text = text.replace(name, symbol)
    text = re.sub(r"(?<=[A-Za-zµμ])(?: ?\^ ?)?\{?([-−]?\d)\}?", r"**\1", text)
    [first, *_] = re.split(r"\s+(?![/*(]|per\b)", text)
    for candidate in [*[text] * ("/" in text or "*" in text), first, *[first.casefold()] * (len(first) > 3)]:
        if len(candidate) <= 40 and _UNIT.fullmatch(candidate):
            try:
                return REGISTRY.parse_units(candidate)
            except Exception:  # of pint or tokenize: the text is not a unit
                continue
    return None


@lru_cache(maxsize=256)
def conversion(given: str, wanted: str, *, unknown_fits: bool) -> tuple[Fraction, Fraction] | None:
    """Return the factor and the offset that convert a value to the wanted unit; None if their dimensions differ.

    A unit that is left out is the wanted one; so is one that is not known if ``unknown_fits``.
    """
    given, wanted = given.strip(". "), wanted.strip(". ")
    if not given or not wanted or given.casefold().rstrip("s") == wanted.casefold().rstrip("s"):
        return Fraction(1), Fraction(0)
    if "£" in (given, wanted):  # otherwise "pound" is a mass
        given, wanted = (re.sub(r"^pounds?$", "£", unit) for unit in (given, wanted))
    unit, target = parse_unit(given), parse_unit(wanted)
    if unit is None or target is None:
        return (Fraction(1), Fraction(0)) if unknown_fits else None
    if unit == target:
        return Fraction(1), Fraction(0)
    from pint import PintError

    try:
        offset = float(unit._REGISTRY.Quantity(0, unit).m_as(target))
        factor = float(unit._REGISTRY.Quantity(1, unit).m_as(target)) - offset
    except PintError:  # of another dimension, or without such a ratio, as decibels
        return None
    # A power of ten below one is exact only as the inverse of its inverse.
    exact = Fraction(max(factor, 1 / factor)).limit_denominator(10**9)
    return exact if factor >= 1 else 1 / exact, Fraction(offset).limit_denominator(10**9)
