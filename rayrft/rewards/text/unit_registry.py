"""The registry of units, made when this module is imported, which takes a fraction of a second."""

from __future__ import annotations

from typing import Any

import pint

from rayrft.rewards.text.notation import CURRENCIES

REGISTRY: Any = pint.UnitRegistry(autoconvert_offset_to_baseunit=True)
for unit, *codes in CURRENCIES.values():
    REGISTRY.define(" = ".join([unit, f"[{unit}]", "_", *codes, *map(str.lower, codes)]))
for unit in ("cent = dollar / 100", "jiao = yuan / 10", "person = [person] = _ = people"):
    REGISTRY.define(unit)
