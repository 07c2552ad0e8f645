"""A plugin: the Master that loads it gives its run engines without vLLM. In the process of the tests, which loads it,
too, it does nothing: its later runs would have such engines."""

from __future__ import annotations

import ray

from rayrft.core import engine_groups
from tests.scripted_engine import ScriptedEngine

if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
    engine_groups.RolloutEngine = ScriptedEngine  # type: ignore[misc,assignment]
