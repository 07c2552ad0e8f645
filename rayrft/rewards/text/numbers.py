"""Numbers with the units after them, in English and Chinese."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from rayrft.rewards.text.statements import nfkc, plain
from rayrft.rewards.text.units import SCALES


@dataclass(frozen=True)
class Quantity:
    """A number and the text of its unit; empty if it has none."""

    value: Fraction
    unit: str = ""


_LONGEST = 200
"""Characters of a number and its unit: no power or product of such numbers is too large for a float."""

_SHARES = {"%": Fraction(1, 100), "percent": Fraction(1, 100), "per cent": Fraction(1, 100), "‰": Fraction(1, 1000)}
_SCALES = SCALES | {"十": 10}
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_SCALE = r"十(?=[万亿])|[百万亿]|千(?![米克瓦伏安牛焦帕卡])|(?:hundred|thousand|million|billion|trillion|dozen)\b"
_QUANTITY = re.compile(
    rf"(?P<sign>[-+−]?)\s*(?:(?P<whole>\d+)\s+(?=\d+\s*/\s*\d))?(?P<number>{_DIGITS})(?:\s*/\s*(?P<divisor>\d+(?:\.\d+)?))?"
    r"(?:\s*(?:[x×*·]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{?(?P<power>[-+−]?\d{1,2})\}?|[eE](?P<exponent>[-+−]?\d{1,2}))?"
    rf"(?:\s*\\?(?P<share>%|‰|per ?cent\b)|(?P<scales>(?:\s*(?:{_SCALE}))*))(?P<unit>\s*[^\d\s=,;。].*)?"
)
_REWRITTEN = [
    (re.compile(r"(\d*)\s*\\[dtc]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))"), r"\1 \2\3/\4\5"),
    (re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])"), "°"),
    (re.compile(r"\\Omega(?![A-Za-z])"), "Ω"),
    (re.compile(r"\\mu(?![A-Za-z])\s*"), "μ"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)又(?=\d)"), " "),
    (re.compile(r"(?<=\d)\s*\(([^()]*)\)$"), r" \1"),
    (re.compile("–"), "-"),
]
_NAMED = re.compile(r"^\s*\\?[A-Za-zα-ωΔ]\w{0,5}\s*[=≈]\s*")
_ABOUT = re.compile(
    r"^\s*(?:about|approximately|around|roughly|约为?|大约|\\approx|≈)\s*|(?:左右|上下)$", re.IGNORECASE
)
_MONEY = {"\\$": "dollars", "¥": "元", "€": "euros", "£": "pounds"}
_CURRENCY = re.compile(r"(?:US)?(\\\$|[¥€£])\s*")

_SYMBOL = re.compile(
    r"[kMGTdcmnpuμµ]?(?:m|g|s|N|J|W|V|A|Pa|Hz|L|l|mol|eV|Wh|bit|B|F|C|H|cal|K|T|Wb|ohm|bar)"
    r"|min|h|hr|hrs|sec|t|ha|rad|rpm|mph|kph|ft|in|lbs?|oz|mi|yd|gal|atm|dB|day|yrs?|of|kM|K[Mm]|K[Gg]|USD|RMB|pH"
)
"""Units of few letters; others are names of variables."""
_NO_WORDS = (
    "or and to not is are was wrong correct e at least most minus plus divided over more less fewer than above below"
    " under between hundreds thousands millions half halves third thirds fourths fifths tenths hundredths thousandths"
    " pi root sqrt sin cos tan log ln"
)
_NO_UNIT = re.compile(
    r"^\s*[-+*/^_:|~]|(?<![A-Za-z^*\-{])\d|[+×√π±|!<>=?]|\\[A-Za-z]"
    r"|^\s*(?:squared|cubed|[多来余几])|[多半]$|以[上下内外]|分之|次方|[或至到和与的不错减乘除]|加(?!仑)|成(?![员人])"
    rf"|\b(?:{_NO_WORDS.replace(' ', '|')}|times(?=\s+\S))\b"
    r"|(?:平方|立方)(?![千厘分毫]?米|公里)",
    re.IGNORECASE,
)
"""What follows a number in an expression, a range or a hedge, and in no unit."""


def read_quantity(text: str) -> Quantity | None:
    """Parse a number and the unit after it, perhaps with a name before it; None if the text is no such thing."""
    text = nfkc(text)
    if len(re.findall(r"(?<!\\)\$", text)) % 2:  # the sign of money, and none of mathematics
        text = re.sub(r"(?<!\\)\$(?=\s*[\d.])", r"\\$", text, count=1)
    currency = _CURRENCY.search(text)
    text = plain(_CURRENCY.sub("", text)).rstrip(".。, ")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _ABOUT.sub("", _NAMED.sub("", text)).strip()
    if len(text) > _LONGEST or (found := _QUANTITY.fullmatch(text)) is None:
        return None
    divisor, unit = Fraction(found["divisor"] or 1), (found["unit"] or "").replace("\\cdot", "*")
    if not divisor or not _is_unit(unit):
        return None
    value = Fraction(found["number"].replace(",", "")) / divisor + int(found["whole"] or 0)
    if power := found["power"] or found["exponent"]:
        value *= Fraction(10) ** int(power.replace("−", "-"))
    value *= _SHARES.get(found["share"] or "", Fraction(1))
    value *= math.prod(_SCALES[scale] for scale in re.findall(_SCALE, found["scales"] or ""))
    unit = unit.strip(" *_\"'") or (_MONEY[currency[1]] if currency else "")
    return Quantity(-value if found["sign"] in {"-", "−"} else value, unit)


def _is_unit(text: str) -> bool:
    """Whether what follows a number can be a unit, or what is counted: "5 m" and "5 apples", but not "5x"."""
    if _NO_UNIT.search(text):
        return False
    word = re.match(r"\s*([A-Za-zµμ]+)", text)
    return not word or bool(_SYMBOL.fullmatch(word[1])) or len(word[1]) >= (3 if text[0] == " " else 4)
