"""The config a GPU user runs on real word problems, with a small model and two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayrft
from tests.conftest import ROOT
from tests.e2e.configs import gsm8k_on_cpu


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_two_steps_of_the_gsm8k_job_on_cpu(gsm8k: Path, tmp_path: Path) -> None:
    settings = {"storage": str(tmp_path), **gsm8k_on_cpu(gsm8k)}
    run = rayrft.start(ROOT / "jobs/gsm8k_grpo.yaml", say=lambda _: None, **settings)
    summary = run.result()
    assert summary.status == "finished" and summary.ledger.trained == 32
    assert summary.ledger.dropped_tasks.get("prompt_too_long", 0) >= 1, (
        "many word problems are longer than 200 characters"
    )
    assert summary.accuracy["0"].after.count > 0
    assert "reward_unknown" not in summary.ledger.dropped, "every ground truth is a number"
