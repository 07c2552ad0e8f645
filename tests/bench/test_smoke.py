"""Every bench runs, at its smallest, where what it measures says nothing; its learner is built as a rank builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from rayrft.trainer import packing
from rayrft.trainer.policy import Policy
from tests.bench.gpu import SHAPES
from tests.bench.workload import make_learner
from tests.conftest import ROOT

SMALLEST = {
    "bench_calls": "--answers 8 --rounds 1",
    "bench_changes": "--layers 1 --vocabulary 512 --steps 2 --rows 2 --length 16",
    "bench_endpoint": "--requests 20 --clients 4 --rounds 1 --proxy ray",
    "bench_explorer": "--in-flight 32 --groups 64 --rounds 1",
    "bench_feedback": "--people 2 --seconds 1 --groups 20 --think 0.1",
    "bench_head": "--tokens 64 --hidden 32 --vocabulary 512 --rounds 1",
    "bench_lease": "--sizes 4000 --leases 2",
    "bench_long_run": "--steps 40 80 --rows 2000 4000",
    "bench_long_tail": "--rounds 1 --steps 1 --warm-up 1 --groups 2",
    "bench_loop": "--rounds 1 --steps 1 --engines 1",
    "bench_math": "--answers 20 --rounds 1",
    "bench_optimizer": "--parameters 8 --rounds 2",
    "bench_operators": "--rows 1000 --rounds 1 --near 1000",
    "bench_pause": "--rounds 1 --answers 8 --in-flight 4",
    "bench_pipelines": "--rounds 1 --steps 2",
    "bench_priority": "--rounds 2",
    "bench_put": "--seconds 0.5 --rounds 1 --producers 1",
    "bench_recording": "--groups 20 --rounds 1 --records 5 --seconds 1",
    "bench_rewards": "--rounds 1 --seconds 0.5",
    "bench_sandbox": "--seconds 0.5 --rounds 1",
    "bench_scale": "--gpus 8 --steps 2 --rest 1",
    "bench_sync": "--millions 1 --rounds 1",
    "bench_trainer": "--rounds 1 --hidden 64 --layers 2 --vocabulary 512 --rows 8",
    "bench_trl": "--rounds 1 --steps 4 --batches 4x4x8 --hidden 64 --layers 2 --threads 1 --engines 1 --ranks 1",
    "bench_viewer": "--rows 2000 --steps 20 --rounds 2",
    "bench_turns": "--groups 2 --in-flight 2 --engines 1 --turns 2",
    "gpu": "--device cpu --tiny --steps 1",
    "gpu_check": "--dry",
}


def test_no_bench_is_left_out() -> None:
    benches = {path.stem for path in (ROOT / "tests" / "bench").glob("*.py") if "\ndef main()" in path.read_text()}
    assert benches == SMALLEST.keys()


@pytest.mark.slow
@pytest.mark.parametrize("bench", SMALLEST)
def test_it_runs(bench: str) -> None:
    if bench == "bench_trl" and find_spec("trl") is None:
        pytest.skip("needs the extra 'bench'")
    command = [sys.executable, "-m", f"tests.bench.{bench}", *SMALLEST[bench].split()]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    assert any(map(str.isdigit, result.stdout)), "no measurement was printed"


def test_a_kernel_that_fails_in_a_benchs_precision_is_told_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "uses_kernel", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(packing, "attention_by_kernel", mock.Mock(side_effect=TypeError("no such kernel")))
    policy = Policy(SHAPES["tiny"].model())
    with pytest.raises(RuntimeError, match="no such kernel"):
        make_learner(policy, "grpo", tokens=64, device=torch.device("cpu"), compute=torch.bfloat16)
