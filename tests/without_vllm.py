"""A plugin: the Master that loads it gives its run engines without vLLM."""

from __future__ import annotations

from rayrft.core import actors
from tests.scripted_engine import ScriptedEngine

actors.RolloutEngine = ScriptedEngine  # type: ignore[misc,assignment]
