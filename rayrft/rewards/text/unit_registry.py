"""The registry of units, made when this module is imported, which takes a fraction of a second."""

from __future__ import annotations

from typing import Any

import pint

REGISTRY: Any = pint.UnitRegistry(autoconvert_offset_to_baseunit=True)
for unit in ("dollar = [dollar]", "cent = dollar / 100", "yuan = [yuan]", "jiao = yuan / 10"):
    REGISTRY.define(unit)
REGISTRY.define("person = [person] = _ = people")
