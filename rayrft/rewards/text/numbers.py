"""Read numbers: digits, fractions, percentages, magnitudes and number words, with a currency or a unit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import prod

from rayrft.rewards.text.notation import CURRENCY_CODES, CURRENCY_SIGNS
from rayrft.rewards.text.statements import plain
from rayrft.rewards.text.units import HAN_UNIT, is_unit


@dataclass(frozen=True)
class Number:
    """A rational number; ``text`` is what it was read from."""

    text: str
    value: Fraction
    percent: bool = False
    unit: str = ""


_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?(?:(?:(?P<whole>\d+) ?)?\\frac ?(?:\{{ ?(?P<over>[-+]? ?{_DIGITS}) ?\}}|(?P<over1>\d)) ?"
    rf"(?:\{{ ?(?P<under>{_DIGITS}) ?\}}|(?P<under1>\d))"
    rf"|(?:(?P<units>\d+) )?(?P<numerator>\d+) ?/ ?(?P<denominator>\d+)"
    rf"|(?P<decimal>{_DIGITS})(?: ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?\{{? ?(?P<power>[-+]?\d{{1,3}}) ?\}}?"
    r"|[eE](?P<exponent>[-+]?\d{1,3}))?) ?(?P<percent>[%‰]?)"
)


def read_number(text: str) -> Number | None:
    """Read a normalized text as an integer, decimal, fraction, mixed number or percentage; None if it is another."""
    if not (found := _NUMBER.fullmatch(text)):
        return None
    if decimal := found["decimal"]:
        value = _decimal(decimal) * Fraction(10) ** int(found["power"] or found["exponent"] or 0)
    else:
        over = _decimal(found["over"] or found["over1"] or found["numerator"])
        under = _decimal(found["under"] or found["under1"] or found["denominator"])
        whole = int(found["whole"] or found["units"] or 0)
        if not under or (whole and over < 0):
            return None
        value = whole + over / under
    value /= 10 if found["percent"] == "‰" else 1
    return Number(text, -value if found["sign"] == "-" else value, percent=bool(found["percent"]))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "十": 10, "百": 100, "千": 10**3, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALE = (
    r"(?:(?:dozen|hundred|thousand|(?:m|b|tr)illion)s?(?![A-Za-z])\s*"
    r"|十(?=[万亿])|百(?!分)|千(?![克米瓦卡帕赫焦伏安升牛])|[万亿])"
)
SCALE = re.compile(_SCALE, re.IGNORECASE)
"""A magnitude: "million", but not the 千 of 千克."""
_LEADING_SCALES = re.compile(rf"^\s*(?:{_SCALE})*", re.IGNORECASE)


def _scale(text: str) -> int:
    return prod(_SCALES[scale.strip().lower().removesuffix("s")] for scale in SCALE.findall(text))


_POWER = r"(?: ?\^ ?\{? ?-?\d ?\}?)?"
_WORD = rf"[A-Za-zµμΩ]+\.?{_POWER}"
_MEASURED = re.compile(
    r"(?P<value>.*?[\d)}%A-Za-z])"
    rf"(?P<unit> ?(?:\\text ?\{{[^{{}}]*[A-Za-z][^{{}}]*\}}{_POWER}(?: ?/ ?)?)+"
    rf"|(?<=[\d}}%])(?=.) ?(?:(?i:{_SCALE})+ ?)?(?:{HAN_UNIT}|{_WORD}(?: ?/ ?{_WORD})?"
    rf"|(?<= ){_WORD}(?:(?: ?(?:[/*]|\\cdot) ?| ){_WORD})*)?|(?<=\\pi) (?=[A-Za-z]{{2}}){_WORD})"
)
_CURRENCY = re.compile(
    rf"(?P<sign>-?) ?(?:US)?(?P<unit>[{CURRENCY_SIGNS}]|{CURRENCY_CODES}|Rs\.?) ?(?P<value>[-\d.\\(].*)"
)
_BRACES = re.compile(r"\{([^{}]*)\}")
_DEGREES = re.compile(r"(?P<value>.+?) ?\^ ?(?:\\circ|\{ ?\\circ ?\})(?: ?(?:([CF])(?:elsius|ahrenheit)?|(K)))?")


@lru_cache(maxsize=256)
def split_unit(text: str) -> tuple[str, int, str]:
    """Split a normalized text into a value, the magnitude that multiplies it, and its unit, the currency before it or
    the words or letters after it: "5 million dollars"."""
    currency = _CURRENCY.fullmatch(text)
    value = currency["sign"] + currency["value"] if currency else text
    unit = currency["unit"] if currency else ""
    if not (found := _MEASURED.fullmatch(value)):
        return value, 1, unit
    words = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", found["unit"])
    named = _LEADING_SCALES.sub("", words).strip()
    scale = _scale(words.removesuffix(named))
    ordinal = re.fullmatch(r"1st|2nd|3rd|\dth", found["value"][-1] + named)
    if named and not ordinal and not is_unit(named, words[0] == " " or scale != 1 or "\\text" in found["unit"]):
        return value, 1, unit
    return found["value"].strip(), scale, unit or named


def read_quantity(text: str) -> Number | None:
    """Read a normalized text as a number with its currency or unit, if it has one; None if it is another."""
    if number := read_number(text):
        return number
    degrees = _DEGREES.fullmatch(text)
    if degrees and (number := read_number(degrees["value"])):
        return replace(number, text=text, unit="°" + (degrees[2] or degrees[3] or ""))
    value, scale, unit = split_unit(text)
    number = read_number(_BRACES.sub(r"\1", value) if value[:1] == "{" else value)
    return number and replace(number, text=text, value=number.value * scale, unit=unit)


_ONES = "one two three four five six seven eight nine"
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_COUNTS = {word: number for number, word in enumerate(f"zero {_ONES} {_TEENS}".split())}
_COUNTS |= {word: 10 * number for number, word in enumerate(_TENS.split(), 2)}
_ONE, _TEN = _ONES.replace(" ", "|"), _TENS.replace(" ", "|")
_BELOW_100 = rf"(?:(?:{_TEN})(?:[\s-]+(?:{_ONE}))?|{'|'.join(_COUNTS)})"
_BELOW_1000 = rf"(?:(?:{_ONE}|an?)[\s-]+hundred(?:[\s-]+(?:and\s+)?{_BELOW_100})?|{_BELOW_100})"
_SPELLED = (
    rf"(?:(?:{_BELOW_1000}|an?)[\s-]+thousand(?:,?[\s-]+(?:and\s+)?{_BELOW_1000})?"
    rf"|(?:{_BELOW_1000}|an?)[\s-]+dozen|{_BELOW_1000})"
)
HAN_DIGITS = {"零": 0, "一": 1, "两": 2, "二": 2, "三": 3, "四": 4, "五": 5, "六": 6, "七": 7, "八": 8, "九": 9}
_DIGIT = f"[{''.join(HAN_DIGITS)}]"
_BELOW_10000 = rf"(?:({_DIGIT})千零?)?(?:({_DIGIT})百零?)?(?:({_DIGIT}?)十)?({_DIGIT})?"
_COUNT = re.compile(
    rf"(?<![A-Za-z0-9_.])(?:(?P<digits>[1-9]\d{{0,2}}(?:,\d{{3}})+|\d{{1,99}})(?![0-9]|\.[0-9])(?P<scales>(?:\s*{_SCALE})*)"
    rf"|(?<!half )(?P<words>{_SPELLED})(?![A-Za-z0-9_]|-[a-z]|\s+and\s+a\s+half\b))"
    rf"|(?<!第)(?P<chinese>[{''.join(HAN_DIGITS)}十百千]++)(?=$|[个只条张辆人本朵棵头匹艘架块件位名把颗根座栋枚支瓶杯。,\s])",
    re.IGNORECASE,
)


def read_count(text: str) -> int | None:
    """Return the one count that a text states, in digits or words; None if it states none, or several."""
    counts = set[int | None]()
    for found in _COUNT.finditer(plain(text)):
        if found["digits"]:
            counts.add(int(found["digits"].replace(",", "")) * _scale(found["scales"]))
        else:
            counts.add(_spelled(found["words"]) if found["words"] else _chinese(found["chinese"]))
    return counts.pop() if len(counts) == 1 else None


def _spelled(words: str) -> int:
    """Return a number in English words: "one hundred and five"."""
    total = below = 0
    for word in re.findall("[a-z]+", words.lower()):
        if word in {"a", "an"}:
            below = 1
        elif word in _SCALES:
            below *= _SCALES[word]
            total, below = (total + below, 0) if word == "thousand" else (total, below)
        else:
            below += _COUNTS.get(word, 0)
    return total + below


def _chinese(text: str) -> int | None:
    """Return a number below 10000 in Chinese characters; None for others, such as 二三, two or three."""
    if not (found := re.fullmatch(_BELOW_10000, text)):
        return None
    digits = [HAN_DIGITS["一" if digit == "" else digit] if digit is not None else 0 for digit in found.groups()]
    return sum(digit * 10**power for digit, power in zip(digits, (3, 2, 1, 0), strict=True))
