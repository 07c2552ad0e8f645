"""Whole small runs with other settings of the Buffer and the tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayrft
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reading import read_state
from rayrft.config import load_config
from rayrft.monitor.records import NoteRecord, StepRecord, read_records
from tests.e2e.conftest import small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_run_trains_on_groups_twice_from_two_shards_and_draws_tasks_by_pass_rate(tmp_path: Path) -> None:
    overrides = {
        "buffer.shards": 2,
        "buffer.sampler.name": "priority",
        "buffer.sampler.score": "td_error",
        "buffer.sampler.tau": 2,
        "buffer.sampler.max_uses": 2,
        "buffer.sampler.replay_ratio": 2,
        "tasks.sampler": "near_half",
        "max_staleness": 2,
        "stages.mix.steps": 6,
        "stages.mix.algorithm.advantage": "gae",
        "stages.mix.algorithm.value_loss": "squared",
        "trainer.ranks": 2,
    }
    run = rayrft.start(small_config(tmp_path, "replay", evaluation={"enabled": False}), say=lambda _: None, **overrides)
    run.watch(lambda _: None)
    counters = run.result()["counters"]
    steps = [r for r in read_records(run.folder) if isinstance(r, StepRecord) and r.stage == "mix"]
    assert [step.usual_rows for step in steps] == [16] * 6
    assert max(step.staleness_max or 0 for step in steps) <= 2
    assert counters["sampled"] < 6 * 16, "rows were used twice"
    assert counters["sampled"] == counters["trained"] + sum(counters["dropped"].values()) + counters["held"]
    buffer = load_config(run.folder / "config.yaml").buffer
    groups = read_state(Storage(str(run.folder / "buffer")), buffer.sampler, 0).state.groups
    errors = groups.score[groups.uses > 0]
    assert len(errors) >= 12 and (errors != 1.0).any(), "the critic's errors came back to the groups"
    segments = [list((run.folder / "buffer" / f"shard-{number}").glob("segment-*")) for number in (0, 1)]
    assert all(segments), "both shards hold rows"


def test_a_stage_ends_with_its_tasks(tmp_path: Path) -> None:
    overrides = {"tasks.epochs": 1, "tasks.sources.0.size": 115, "tasks.eval_size": 40, "demonstrations.gold.size": 60}
    run = rayrft.start(
        small_config(tmp_path, "short", evaluation={"enabled": False}),
        say=lambda _: None,
        **{**overrides, "stages.mix.steps": 100},
    )
    run.watch(lambda _: None)
    summary = run.result()
    notes = [record.text for record in read_records(run.folder) if isinstance(record, NoteRecord)]
    mix = summary["stages"][-1]
    assert summary["status"] == "finished" and 0 < mix["steps"] < 100
    assert any("stage ends after" in note and "no more can come" in note for note in notes), notes
    assert summary["counters"]["trained"] == mix["steps"] * 16
