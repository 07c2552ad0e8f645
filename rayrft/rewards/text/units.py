"""Which words after a number are a unit, and which a magnitude."""

from __future__ import annotations

import re

HAN_UNIT = r"(?:(?![到至或和与及以多余不且而是则的有])[\u4e00-\u9fff]){1,8}(?:/[\u4e00-\u9fff]{1,4})?"
_SHORT_UNITS = re.compile(
    "[mgshLJNVWKCAtlF]|[mcdk]m|[mk]g|[mcd][lL]|kL|[mn]s|[kMG]?Hz|k?Pa|k[JNVW]|m[AV]|eV|ft|in|yd|mi|lbs?|oz|sq|cu|hrs?|yrs?|mo|wk"
    "|am|pm|kWh|min|sec|day|[mk]ph|rpm|[ck]ms|kgs|pcs|mol|rad|deg|gal|atm|bar|cal|ohm|ton|pts|[KMGT]B"
    "|USD|EUR|GBP|CNY|RMB|AM|PM|MPH|CM|KM|KG|[A-Z]{2,3}s"
)
"""Units that could be products of variables."""
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "百": 100, "千": 10**3, "万": 10**4, "亿": 10**8,
}  # fmt: skip
SCALE = re.compile(
    r"(?:dozen|hundred|thousand|(?:m|b|tr)illion)s?\b\s*|百(?!分)|[万亿]|千(?![克米瓦卡帕赫焦伏安升])", re.IGNORECASE
)


def scaled(unit: str) -> tuple[int, str]:
    """Return what "million dollars" counts, and the unit in it."""
    scale = 1
    while found := SCALE.match(unit):
        scale, unit = scale * SCALES[found[0].strip().lower().rstrip("s")], unit[found.end() :]
    return scale, unit


def is_unit(unit: str, spaced: bool) -> bool:
    """Whether letters after a number are a unit, not variables: ``5 m`` and ``5m/s``, but not ``5m``, ``5ab``."""
    words = re.findall("[A-Za-z]+", unit)
    spoken = any(len(word) > 2 and re.search("[aeiou]|y$", word) for word in words)
    if not words or (spaced and spoken and (len(words[0]) > 2 or words[0] in {"of", "in"})):
        return True
    if not _SHORT_UNITS.fullmatch(words[0]):
        return len(words[0]) > 3
    if len(words[0]) == 1 and len(words) == 1:
        return spaced and bool(re.fullmatch(r"[A-Za-z]|m ?\^ ?\{? ?[23] ?\}?", unit))
    known = all(len(word) > 3 or _SHORT_UNITS.fullmatch(word) for word in words)
    return known and (spaced or len(words[0]) > 1 or "/" in unit)
