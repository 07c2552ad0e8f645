"""A run with real engines and ranks, of which each kind is killed or stopped at its worst moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

import rayrft
from rayrft.core.run import Run
from rayrft.monitor.records import RestartRecord, StepRecord
from rayrft.monitor.summary import Summary
from tests.chaos.held_engines import held
from tests.chaos.processes import (
    at_work,
    check_steps,
    find,
    more_steps,
    new_restarts,
    own_raylet,
    recorded,
    send,
    until,
    until_ended,
    works,
)
from tests.conftest import ROOT
from tests.core.leftovers import alive, free, groups, until_free
from tests.e2e.conftest import small_config

pytestmark = pytest.mark.slow

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PARTIAL = "checkpoints/.step-*.partial"
"""Checkpoints that are being written."""
Disturbance = tuple[str, signal.Signals, str, str]
DISTURBANCES: tuple[Disturbance, ...] = (
    ("rank", KILL, "checkpoint", "trainer"),
    ("trainer", KILL, "receive engine-0", "trainer"),
    ("rank", KILL, "receive engine-1", "trainer"),
    ("explorer-0", KILL, "generate engine-1", "explorer"),
    ("engine_pool", KILL, "receive engine-0", "engine_pool"),
    ("buffer", KILL, "checkpoint", "buffer"),
    ("master", KILL, "receive engine-1", "master"),
    ("master", KILL, "checkpoint", "master"),
    ("evaluation-0", KILL, "pause", "evaluation"),
    ("buffer", KILL, "pause", "buffer"),
    ("rank", KILL, "pause", "trainer"),
    ("engine-1", KILL, "receive engine-1", "engines"),
    ("core of engine-0", KILL, "generate engine-0", "engines"),
    ("core of engine-1", STOP, "generate engine-1", "engines"),
    ("engine-0", STOP, "receive engine-0", "engines"),
    ("core of engine-1", KILL, "receive engine-1", "engines"),
)
"""What gets which signal, at which moment, and the kind that its restart counts for."""


def make_config(storage: Path, steps: int) -> dict[str, Any]:
    config = small_config(storage, "disturbed", plugins=[str(ROOT / "tests" / "chaos" / "with_held_engines.py")])
    config["explorer"]["engine"]["count"] = config["trainer"]["ranks"] = 2
    config["evaluation"] = {"engines": 1, "samples": 1}
    config["checkpoint"] = {"every": 3}
    config["restarts"] = {"backoff_s": 0, "silent_s": 30}
    config["weight_sync"] = {"deadline_s": 30}
    config["monitor"] = {"patience_s": 6}
    config["stages"][1] |= {"steps": steps, "evaluate_every": 20}
    return config


@dataclass
class Disturbed:
    """The run that was disturbed, once it has ended."""

    run: Run
    summary: Summary
    seen: set[psutil.Process] = field(default_factory=set)
    """All processes of its actors, and theirs."""


def disturb(run: Run, disturbance: Disturbance) -> None:
    """Send the signal at the moment, and return when the run has recovered."""
    target, by, moment, kind = disturbance
    before = len(recorded(run, RestartRecord))
    pid = until(run, lambda: find(run, target))
    if moment == "pause":
        run.pause()
        pid = until(run, lambda: find(run, target))
        assert send(pid, by)
    elif moment == "checkpoint":
        stale = {*run.folder.glob(PARTIAL)}  # of ranks that have died
        until(run, lambda: {*run.folder.glob(PARTIAL)} - stale, pause_s=0.001)
        assert send(pid, by)
    else:
        with held(run.folder, *moment.split()) as has_come:
            until(run, has_come, pause_s=0.01)
            assert send(pid, by)
    restarts = new_restarts(run, before)
    if moment == "pause":
        run.unpause()
    assert [each.part for each in restarts] == [kind], (disturbance, restarts)


@pytest.fixture(scope="module")
def disturbed(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    held_groups, living, room, others = groups(), alive(), free(), at_work(own_raylet())
    run = rayrft.start(make_config(tmp_path_factory.mktemp("disturbed"), 10_000), say=lambda _: None)
    seen = set[psutil.Process]()
    try:
        more_steps(run, 5)
        raylet = own_raylet()
        for disturbance in DISTURBANCES:
            seen |= at_work(raylet)
            disturb(run, disturbance)
            more_steps(run, 4)
        seen |= at_work(raylet)
        run.skip_stage()
        summary = run.result()
    finally:
        run.kill()
    until_free(living, room)
    assert groups() <= held_groups
    yield Disturbed(run, summary, seen - others)


def test_every_kill_is_a_restart_of_its_kind_and_the_run_finishes(disturbed: Disturbed) -> None:
    assert disturbed.summary.status == "finished"
    restarts = recorded(disturbed.run, RestartRecord)
    assert [each.part for each in restarts] == [kind for *_, kind in DISTURBANCES]
    assert all(each.seconds > 0 and each.cause for each in restarts)
    for kind, counted in sorted(disturbed.summary.restarts.items()):
        seconds = [each.seconds for each in restarts if each.part == kind]
        assert counted.count == len(seconds)
        print(f"{kind}: {len(seconds)} restarts, median {median(seconds):.1f} s, worst {max(seconds):.1f} s")


def test_the_run_takes_steps_while_an_engine_that_died_is_being_replaced(disturbed: Disturbed) -> None:
    steps = [step.time for step in recorded(disturbed.run, StepRecord)]
    replaced = [each for each in recorded(disturbed.run, RestartRecord) if each.part == "engines"]
    assert all(any(each.time - each.seconds < step < each.time for step in steps) for each in replaced), replaced


def test_each_step_is_taken_once_on_fresh_rows(disturbed: Disturbed) -> None:
    check_steps(disturbed.run, disturbed.summary)


def test_no_process_of_the_run_is_left(disturbed: Disturbed) -> None:
    assert len(disturbed.seen) > len(DISTURBANCES)
    until_ended(lambda: set(filter(works, disturbed.seen)))
