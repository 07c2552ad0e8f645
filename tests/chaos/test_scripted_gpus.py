"""A whole run in simulated time whose engines and ranks share GPUs: they never hold more memory than there is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayrft.config import load_config
from rayrft.core.plan import engine_share, plan_memory
from rayrft.core.preflight import PreparedRun
from tests.chaos.gpu_ledger import GpuLedger, use_gpus
from tests.chaos.kills import STEPS, Outcome, describe, simulate
from tests.core.given import config_of
from tests.trainer.families import SHAPES

SIZE = 80.0
SHARED = {"explorer.engine.gpus": 0.45, "trainer.gpus": 0.5, "weight_sync.backend": "ipc"}


def run(
    prepared: PreparedRun, folder: Path, *, sleep: bool, name: str, ranks: int, kills: int, seed: int, parallel: int
) -> Outcome:
    """A run with the memory of a large model."""
    SHAPES[name].save_pretrained(folder / "model")
    changes: dict[str, Any] = {**SHARED, "explorer.engine.sleep": sleep, "evaluation.engines": 0}
    changes |= {"trainer.ranks": ranks, "explorer.engine.count": ranks // parallel}
    changes["explorer.engine.tensor_parallel"] = parallel
    large = config_of(str(folder / "model"), ranks, gradient_checkpointing=name == "qwen3 8B")
    config = load_config(large, changes)
    engines, rank = plan_memory(config, SIZE)
    assert engines.fits and rank.fits, (str(engines), str(rank))
    share = engine_share(config, SIZE)
    assert share is not None
    gpus = partial(
        use_gpus, size=SIZE, engine=engines, rank=rank, buckets=2 * config.bucket_bytes / 1e9, parallel=parallel
    )
    given = replace(prepared, engine_share=share)
    return simulate(seed, kills, given, folder, machines=gpus, **changes)


MORE = [
    pytest.param(True, name, ranks, 20, seed, parallel, marks=pytest.mark.slow)
    for seed in range(36, 96, 6)
    for name, ranks, parallel in (("qwen3 0.6B", 2, 1), ("qwen3 8B", 4, 1), ("qwen3 8B", 4, 2))
]


@pytest.mark.parametrize(
    ("sleep", "name", "ranks", "kills", "seed", "parallel"),
    [
        (False, "qwen3 0.6B", 2, 0, 30, 1),
        (True, "qwen3 8B", 4, 0, 30, 1),
        (True, "qwen3 8B", 4, 20, 30, 2),
        (True, "qwen3 8B", 4, 20, 72, 1),
        (True, "qwen3 0.6B", 2, 20, 30, 1),
        *MORE,
    ],
)
def test_an_engine_and_a_rank_never_need_more_than_their_gpu_has(
    sleep: bool, name: str, ranks: int, kills: int, seed: int, parallel: int, prepared: PreparedRun, tmp_path: Path
) -> None:
    outcome = run(prepared, tmp_path, sleep=sleep, name=name, ranks=ranks, kills=kills, seed=seed, parallel=parallel)
    assert not outcome.problems, describe(outcome)
    ledger: GpuLedger = outcome.cluster.gpus
    assert ledger.most > 0.85 * SIZE, "what the rank leaves is used"
    if sleep and not kills:
        events = " ".join(ledger.events)
        assert events.count("weights transfer kv_cache") == STEPS - 1, "admission, and a step that samples"
        assert max(ledger.found) < SIZE - ledger.rank.parts["states"], "ranks come first"
