"""What makes a run sick is told, the cause before its effects; a healthy run is left alone."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rayrft.algorithms import Algorithm
from rayrft.experience import Task
from rayrft.explorer.unstored import UnstoredAnswers
from rayrft.viewer import advisories
from rayrft.viewer.advisories import Evidence, advise
from tests.conftest import ROOT
from tests.viewer.client import Client
from tests.viewer.recorded import ROWS, RecordedRun
from tests.viewer.sick import ALL_FAIL, DROPPED, HEALTHY, KEYS, NAMES, SICK, flat, planted, sick_run


@pytest.mark.parametrize("cause", SICK)
def test_the_cause_of_a_sick_run_is_told_first_with_its_rows_and_which_key_to_change(cause: str) -> None:
    run = planted(**SICK[cause])
    found = advise(run)
    assert [each.name for each in found][:1] == [cause]
    if found[0].kind == "run":
        assert {each.kind for each in found} == {"run"}, "nothing is blamed but what is broken"
    if found[0].kind == "data":
        assert {each.kind for each in found} == {"data"}, "no setting is blamed while the data explain it"
    lost = {"Rewards are unknown", "Attempts fail", "Answers come too late"}  # before the Buffer, in what is planted
    for each in found:
        assert run.ask("count(*)", each.where)[0] > 0 and each.logged == (each.name not in lost)
        assert each.found and re.search(KEYS, each.remedy) and not each.remedy.endswith("."), each


@pytest.mark.parametrize("cause", ALL_FAIL)
async def test_the_cause_for_which_all_answers_fail_is_told_before_their_equal_rewards(
    cause: str, tmp_path: Path
) -> None:
    fields, failing = ALL_FAIL[cause]
    steps = {"reward": 0.0, "lost: zero_variance": 120, **fields}
    found = advise(planted(lambda done: steps, lambda done, number: DROPPED | failing))
    assert [each.name for each in found] == [cause, "Nothing tells answers apart"]
    run = RecordedRun(tmp_path, planted=(lambda done: steps, lambda done, number: {}), planned=20)
    writer, task = UnstoredAnswers(run.folder, "explorer-0"), Task.create("test", "How many?", "4")
    values = {NAMES.get(name, name): value for name, value in failing.items()} | {"reward": 0.0}
    for _ in range(20):
        run.train()
        rows = [row.with_fields(**values) for row in run.group()]
        await writer.add_dropped(task, rows, Counter(zero_variance=ROWS))
    run.close()
    client = Client(tmp_path)
    await client.rows()
    first, last = (await client.ask("advice", run="words"))["advisories"]
    assert (first["name"], last["name"]) == (cause, "Nothing tells answers apart") and "easier tasks" in last["remedy"]
    assert (await client.rows(where=first["where"], task_id=task.id))["count"] > 0


def test_rows_that_were_dropped_before_the_buffer_are_said_not_to_be_in_the_log() -> None:
    def steps(done: float) -> dict[str, Any]:
        return {"lost: zero_variance": 900, "sampled_rows": 916}

    run = planted(steps, flat)
    [first, *_] = advise(run)
    assert first.name == "Nothing tells answers apart" and not first.logged
    assert "group_deviation" not in first.where
    # Unless their answers are in the run folder.
    run.rows.execute("update answers set group_deviation = 0")
    [first, *_] = advise(run)
    assert first.logged and "group_deviation" in first.where


@pytest.mark.parametrize("run", HEALTHY)
def test_a_healthy_run_is_left_alone(run: str) -> None:
    assert advise(planted(**HEALTHY[run])) == []


@pytest.mark.parametrize("cause", sorted(SICK.keys() - {"Tasks are memorised", "Answers drift in length"}))
async def test_the_page_tells_the_cause_of_a_sick_run_with_rows_of_its_log(cause: str, tmp_path: Path) -> None:
    sick_run(tmp_path, cause)
    client = Client(tmp_path)
    await client.rows()
    first, *_ = (await client.ask("advice", run="words"))["advisories"]
    assert first["name"] == cause
    assert (await client.rows(where=first["where"]))["count"] > 0
    run = await client.ask("run", run="words")
    assert not first["curve"] or first["curve"] in run["columns"]


def test_every_cause_is_planted() -> None:
    assert [name for name, *_ in advisories.CHECKS] == [*SICK]


def test_nothing_is_said_of_a_few_steps() -> None:
    run = planted(**SICK["Updates are skipped"])
    few = {name: values[:9] for name, values in run.columns.items()}
    assert advise(Evidence(few, run.evaluations, run.marks, run.rows)) == []


def test_every_key_that_is_named_exists() -> None:
    reference = (ROOT / "rayrft" / "config" / "REFERENCE.md").read_text()
    named = {*re.findall(KEYS, Path(advisories.__file__).read_text())}
    assert len(named) > 15
    last = {key: key.rpartition(".")[2] for key in named}
    of_algorithms = {f"algorithm.{field.name}" for field in dataclasses.fields(Algorithm)}
    assert [key for key in named - of_algorithms if f"`{last[key]}`" not in reference] == []
