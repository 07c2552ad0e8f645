"""A plugin, like `tests/without_vllm.py`: the run's engines are real, and wait where the test holds them."""

from __future__ import annotations

import ray

from rayrft.core import engine_groups
from tests.chaos.held_engines import HeldEngine

if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
    engine_groups.RolloutEngine = HeldEngine  # type: ignore[attr-defined]
