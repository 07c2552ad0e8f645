"""The config a GPU user runs on real word problems, with a small model and two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayrft
from tests.conftest import ROOT


def on_cpu(dataset: Path) -> dict[str, Any]:
    """What lets the job run for two steps on CPUs."""
    return {
        "model": {"tiny": {"layers": 1, "hidden_size": 64, "heads": 2}, "max_length": 1024},
        "tasks.sources.gsm8k.dataset": str(dataset),
        "tasks.eval_size": 20,
        "explorer.sampling": {"max_tokens": 16, "max_prompt_tokens": 200},
        "explorer.engine": {"count": 1, "kv_cache_mib": 128},
        "explorer.drop_zero_variance": False,
        "trainer": {"ranks": 1},
        "weight_sync": {"tolerance": 1e-4},
        "reward": {"name": "math", "truncated": "score"},
        "stages.grpo.steps": 2,
        "stages.grpo.batch_size": 16,
    }


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_two_steps_of_the_gsm8k_job_on_cpu(gsm8k: Path, tmp_path: Path) -> None:
    settings = {"storage": str(tmp_path), **on_cpu(gsm8k)}
    run = rayrft.start(ROOT / "jobs/gsm8k_grpo.yaml", say=lambda _: None, **settings)
    summary = run.result()
    assert summary.status == "finished" and summary.ledger.trained == 32
    assert summary.ledger.dropped_tasks.get("prompt_too_long", 0) >= 1, (
        "many word problems are longer than 200 characters"
    )
    assert summary.accuracy["0"].after.count > 0
    assert "reward_unknown" not in summary.ledger.dropped, "every ground truth is a number"
