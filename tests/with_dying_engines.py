"""A plugin, like `tests/without_vllm.py`: the run's engines die within requests."""

from __future__ import annotations

import ray

from rayrft.core import engine_groups
from tests.dying_engines import DyingEngine

if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
    engine_groups.RolloutEngine = DyingEngine  # type: ignore[misc,assignment]
