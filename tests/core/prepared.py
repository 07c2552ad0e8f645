"""Inputs of a run without tasks."""

from __future__ import annotations

from typing import Any

from rayrft.buffer.events import ModelTerms
from rayrft.core.preflight import PreparedRun

NOTHING: dict[str, Any] = {"tasks": [], "task_set": None, "held_out": [], "demonstrations": {}, "probe": []}
TERMS: Any = {"terms": ModelTerms(9, 9, "digest"), "tokenizer": print}
PREPARED = PreparedRun(run_id="id", model="model", **TERMS, **NOTHING)
