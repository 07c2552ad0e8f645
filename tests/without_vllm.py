"""A plugin: the Master that loads it gives its run engines without vLLM."""

from __future__ import annotations

from rayrft.core import cast
from tests.scripted_engine import ScriptedEngine

cast.RolloutEngine = ScriptedEngine  # type: ignore[misc,assignment]
