"""A model learns to call a tool."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.experience import from_batch
from rayrft.monitor.records import StepRecord, read_records
from tests.bench.lessons.calculator import make_config, write_task


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_grpo_learns_to_multiply_by_a_tool(tmp_path: Path) -> None:
    """Half of the steps of `tests.bench.lessons.calculator`: at least 0.3 above the start, greedy and sampled."""
    write_task(tmp_path, seed=1)
    run = rayrft.start(make_config(tmp_path, seed=1, steps=30, controls=False), say=lambda _: None)
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
