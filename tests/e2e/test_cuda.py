"""The GPU paths, end to end: the same small run with engines and ranks on CUDA devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rayrft
from rayrft.monitor.records import StepRecord, read_records
from tests.e2e.conftest import small_config

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs(count: int) -> Any:
    return pytest.mark.skipif(count > GPUS, reason=f"needs {count} CUDA devices, {GPUS} present")


SHARED = {"explorer.engine.gpus": 0.4, "trainer.gpus": 0.5, "explorer.engine.gpu_memory_utilization": 0.5}
APART = {"explorer.engine.gpus": 1, "trainer.gpus": 1}


@pytest.mark.cuda
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(SHARED, id="ipc", marks=needs(1)),
        pytest.param({**SHARED, "explorer.engine.sleep": True}, id="ipc-sleep", marks=needs(1)),
        pytest.param({**SHARED, "trainer.cpu_offload": True}, id="ipc-offload", marks=needs(1)),
        pytest.param({**SHARED, "trainer.ranks": 2, "explorer.engine.count": 2}, id="ipc-2x2", marks=needs(2)),
        pytest.param(APART, id="nccl", marks=needs(2)),
        pytest.param({**APART, "trainer.ranks": 2, "explorer.engine.count": 2}, id="nccl-2x2", marks=needs(4)),
        pytest.param(
            {**APART, "explorer.engine.gpus": 2, "explorer.engine.tensor_parallel": 2}, id="nccl-tp2", marks=needs(3)
        ),
    ],
)
def test_weights_reach_engines_on_gpus_and_they_compute_with_them(overrides: dict[str, Any], tmp_path: Path) -> None:
    settings = {
        "model.tiny": {"layers": 2, "hidden_size": 256, "heads": 4},
        "model.dtype": "bfloat16",
        "weight_sync.probe_every": 1,
    }
    run = rayrft.start(small_config(tmp_path, "cuda"), say=lambda _: None, **settings, **overrides)
    summary = run.result()
    steps = [r for r in read_records(run.folder) if isinstance(r, StepRecord) and r.usual_rows]
    assert summary.status == "finished"
    assert all(step.probe_gap is not None for step in steps), "and none was out of bounds"
