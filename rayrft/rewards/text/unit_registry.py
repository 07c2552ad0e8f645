"""The registry of units, made when this module is imported, which takes a fraction of a second."""

from __future__ import annotations

from typing import Any

import pint

REGISTRY: Any = pint.UnitRegistry(autoconvert_offset_to_baseunit=True)
for unit in (
    *("dollar = [dollar] = _ = USD = usd", "cent = dollar / 100", "euro = [euro] = _ = EUR = eur"),
    *("sterling = [sterling] = _ = GBP = gbp", "yuan = [yuan] = _ = CNY = cny = RMB = rmb", "jiao = yuan / 10"),
    "person = [person] = _ = people",
):
    REGISTRY.define(unit)
