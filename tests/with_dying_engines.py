"""A plugin, like `tests/without_vllm.py`: the run's engines die within requests."""

from __future__ import annotations

import ray

from rayrft.core.parts import engines
from tests.dying_engines import DyingEngine

if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
    engines.RolloutEngine = DyingEngine  # type: ignore[misc,assignment]
