"""It learns: the quickstart through ``ray job submit``, what MIX is for, to call a tool, and by GRPO from rewards that
score code in its sandbox and questions of school."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.experience import from_batch
from rayrft.monitor.records import StepRecord, read_records
from rayrft.monitor.summary import read_summary
from tests.bench.lessons import calculator, choices, programs
from tests.conftest import ROOT
from tests.e2e.conftest import small_config


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        pytest.param(12, ["trainer.ranks=1", "tasks.eval_size=200", "tasks.sources.0.size=10000"], id="small"),
        pytest.param(45, ["tasks.eval_size=500", "monitor.sinks=[wandb]"], id="as shipped", marks=pytest.mark.slow),
    ],
)
def test_the_quickstart_learns_from_its_own_rollouts_through_ray_job_submit(
    ray_cluster: Any, tmp_path: Path, steps: int, settings: list[str]
) -> None:
    """Some of the quickstart's 120 MIX steps: at least 0.5, and 0.4 above the start, where full length asks for
    0.75."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "job", "submit", "--address", f"http://{ray_cluster.dashboard_url}", "--"]
    # Ray itself gives a job the address of any Ray on its machine, where there are several.
    command += ["env", f"RAY_ADDRESS={ray_cluster.address_info['gcs_address']}"]
    command += [sys.executable, str(ROOT / "jobs/quickstart.py"), f"storage={tmp_path}"]
    command += [f"stages.mix.steps={steps}", "stages.mix.evaluate_every=null", *settings]
    env = {**os.environ, "RAY_AUTH_MODE": "token"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr

    summary = read_summary(tmp_path / "quickstart")
    records = [r for r in read_records(tmp_path / "quickstart") if isinstance(r, StepRecord) and r.stage == "mix"]
    after = summary.accuracy["0"].after
    assert f"tasks.eval_size={after.count}" in settings
    start = next(line for line in result.stdout.splitlines() if line.startswith("after warmup")).split()[2]
    assert after.accuracy >= 0.5, result.stdout
    assert after.accuracy - float(start) >= 0.4, result.stdout
    assert all(record.staleness_max == 0 for record in records)
    assert all(record.metrics.logprob_gap < 1e-4 for record in records), "on-policy rows: engine and trainer agree"
    ledger = summary.ledger
    assert ledger.trained == steps * 256
    assert ledger.closes
    for shown in ("after mix", "checkpoint", "plot.png", "rows: sampled"):
        assert shown in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_without_a_warm_up_grpo_stays_at_nothing_and_mix_learns(tmp_path: Path) -> None:
    """GRPO has no right answer to reinforce; MIX shows it some, and both streams take it further."""
    config = small_config(tmp_path, "cold", demonstrations={"gold": {"size": 500}})
    config["model"]["tiny"]["hidden_size"] = 128
    config["tasks"]["eval_size"] = 200
    common = {"group_size": 8, "optimizer": {"lr": 1e-3, "warmup_steps": 5}}
    mix = {"algorithm": {"name": "mix", "mu": 0.3}, "demonstrations": "gold", "expert_share": 1 / 3}
    config["stages"] = [
        {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 6, "batch_size": 64, **common},
        {"name": "mix", "steps": 100, "batch_size": 96, **mix, **common},
    ]
    run = rayrft.start(config, say=lambda _: None)
    run.result()
    greedy = run.evaluations().query("temperature == 0").set_index("stage")["accuracy"]
    assert greedy["grpo"].iloc[-1] == 0.0
    assert greedy.iloc[-1] >= 0.25, run.evaluations()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_grpo_learns_to_multiply_by_a_tool(tmp_path: Path) -> None:
    """Half of the steps of `tests.bench.lessons.calculator`: at least 0.3 above the start, greedy and sampled."""
    calculator.write_task(tmp_path, seed=1)
    run = rayrft.start(calculator.make_config(tmp_path, seed=1, steps=30, controls=False), say=lambda _: None)
    summary = run.result()
    assert summary.status == "finished" and summary.ledger.closes
    found = run.evaluations().query("stage == 'grpo'")
    for temperature, gain in ((0.0, 0.3), (1.0, 0.15)):
        accuracy = found[found["temperature"] == temperature]["accuracy"]
        assert accuracy.iloc[-1] >= accuracy.iloc[0] + gain, run.evaluations()

    steps = [record for record in read_records(run.folder) if isinstance(record, StepRecord) and record.stage == "grpo"]
    assert all(step.metrics.logprob_gap < 1e-4 for step in steps), "engine and trainer read the tools' tokens alike"
    rows = [row for batch in Archive.of_run(run.folder).rows("usual") for row in from_batch(batch)]
    assert all(sum(turn["role"] == "tool" for turn in row.turns) <= row.metrics.get("tool_calls", 0) for row in rows)
    right = [row for row in rows if row.reward == 1.0]
    assert right and all(row.metrics["tool_calls"] >= 1 for row in right), "nobody knows the product without the tool"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("lesson", "steps", "gain"), [(choices, 20, 0.4), (programs, 30, 0.3)])
def test_grpo_learns_what_few_of_its_demonstrations_show(
    lesson: ModuleType, steps: int, gain: float, tmp_path: Path
) -> None:
    """A part of the steps of the lessons `choices` and `programs`: so much above the start, sampled."""
    lesson.write_task(tmp_path, seed=1)
    run = rayrft.start(lesson.make_config(tmp_path, seed=1, steps=steps, controls=False), say=lambda _: None)
    summary = run.result()
    assert summary.status == "finished" and summary.ledger.closes
    found = run.evaluations().query("stage == 'grpo' and temperature == 1.0")["accuracy"]
    assert found.iloc[-1] >= found.iloc[0] + gain, run.evaluations()
