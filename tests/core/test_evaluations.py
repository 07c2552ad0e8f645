"""When a policy is evaluated and on which engines, with scripted ones: what is skipped, lost and judged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import ray

from rayrft.config.stage import EvaluationConfig
from rayrft.core.checkpoints import Checkpoints, Progress, Saver
from rayrft.core.evaluations import Evaluations
from rayrft.core.train_loop import TrainLoop
from rayrft.errors import WeightSyncError
from rayrft.explorer.engines.pool import EnginePool
from rayrft.explorer.evaluation import Attempt, Evaluation, measure
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import EvaluationRecord, NoteRecord
from rayrft.runtime.handle import Handle
from rayrft.weights.messages import SyncReport
from tests.core.given import restarts, run_folder, write
from tests.errors import about
from tests.scripted import remote


class ScriptedExplorer:
    """Evaluates when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, int, bool]] = []
        self.answers: asyncio.Queue[Evaluation | Exception] = asyncio.Queue()

    async def evaluate(self, temperature: float, samples: int, beside: bool) -> Evaluation:
        self.asked.append((temperature, samples, beside))
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


class ScriptedSync:
    def __init__(self) -> None:
        self.loaded: list[tuple[list[str], int]] = []

    died: Exception | None = None

    async def load(self, engines: list[Handle[Any]], version: int) -> SyncReport:
        if self.died:
            raise self.died
        self.loaded.append(([engine.name for engine in engines], version))
        return SyncReport(version, 0.1, 1, "abc", 0.0)


def answer(version: int, right: bool = True) -> Evaluation:
    return measure([Attempt("a", 0, float(right), tokens=3, versions=(version,))], [1])


class Subject:
    """Evaluations of one temperature, with ``engines`` of their own."""

    def __init__(self, folder: Path, engines: int) -> None:
        evaluation = {"engines": engines, "temperatures": [0.0]}
        config = run_folder(folder, "run", evaluation=evaluation, checkpoint={"keep_last": 1})
        self.checkpoints = Checkpoints(config.folder, config.checkpoint)
        self.progress, self.recorder = Progress("run"), Recorder(config)
        self.explorer, self.sync, members = ScriptedExplorer(), ScriptedSync(), EnginePool()
        self.members, self.pool = members.members, remote(members)
        self.published = 0
        self.alive, self.emptied = [remote(None, f"evaluation-{index}") for index in range(engines)], asyncio.Event()
        nobody = remote(None)
        group: Any = self if engines else None
        self.saver = Saver(config, nobody, nobody, self.progress)
        self.stage = config.stages[0]
        self.loop = create_autospec(TrainLoop, config=config, explorers=[remote(self.explorer)], evaluation=group)
        self.loop.recorder, self.loop.progress, self.loop.restarts = self.recorder, self.progress, restarts()
        self.loop.weight_sync, self.loop.publish = self.sync, self._publish
        self.subject = Evaluations(self.loop, self.saver)

    async def at(self, step: int, other: EvaluationConfig | None = None) -> None:
        """What the train loop does at a step of the stage."""
        self.progress.step = self.progress.stage_step = step
        self.progress.accuracy = None
        await self.subject.begin(self.stage, other)

    @property
    def evaluated(self) -> list[tuple[int, int, int]]:
        """Step, version and the number skipped before, by record."""
        found = [record for record in self.recorder.file.read() if isinstance(record, EvaluationRecord)]
        return [(record.step, record.version, record.skipped) for record in found]

    @property
    def notes(self) -> str:
        return "; ".join(record.text for record in self.recorder.file.read() if isinstance(record, NoteRecord))

    async def _publish(self) -> None:
        self.published += 1


Make = Callable[[int], Subject]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(RayMetrics, "write", lambda *_: None)
    return lambda engines: Subject(tmp_path, engines)


async def test_attempts_without_a_reward_are_noted_with_their_reasons_and_an_error(make: Make) -> None:
    subject = make(0)
    failed = Attempt("a", 1, None, problem="workflow_error", error="status 3: no such model")
    attempts = [failed, Attempt("b", 0, None, problem="timeout"), Attempt("c", 0, 1.0, tokens=3, versions=(4,))]
    subject.explorer.answers.put_nowait(measure(attempts, [1]))
    await subject.at(4)
    assert all(each in subject.notes for each in ("1 workflow_error, 1 timeout", "status 3: no such model"))


async def test_without_engines_of_its_own_it_is_over_when_it_returns(make: Make) -> None:
    made = make(0)
    made.explorer.answers.put_nowait(answer(4))
    await made.at(4)
    assert made.evaluated == [(4, 4, 0)] and made.explorer.asked == [(0.0, 1, False)]
    assert made.published == 1, "the stage samples nothing, so the engines have older weights"
    assert made.progress.accuracy == 1.0


@pytest.mark.parametrize("engines", [0, 1])
async def test_an_evaluation_by_another_config_does_not_judge_the_checkpoint(make: Make, engines: int) -> None:
    made = make(engines)
    for right in (True, False):
        made.explorer.answers.put_nowait(answer(4, right))
    await made.at(4, EvaluationConfig(temperatures=(0.5, 0.7), samples=3))
    await made.subject.end()
    assert made.explorer.asked == [(0.5, 3, bool(engines)), (0.7, 3, bool(engines))]
    assert len(made.evaluated) == 2 and made.progress.accuracy is None and not made.checkpoints.evaluating


async def test_the_record_comes_later_and_is_of_the_step_whose_weights_were_loaded(make: Make) -> None:
    made = make(2)
    await made.at(4)
    assert made.sync.loaded == [(["evaluation-0", "evaluation-1"], 4)] and not made.published
    members = (await made.members()).members
    assert [(member.name, member.version) for member in members] == [("evaluation-0", 4), ("evaluation-1", 4)]
    write(made.checkpoints, Progress("run", step=4))
    await made.at(6)
    await made.at(8)
    assert made.evaluated == [] and len(made.sync.loaded) == 1
    made.explorer.answers.put_nowait(answer(4))
    await made.subject.end()
    await made.saver.done()
    assert made.evaluated == [(4, 4, 2)] and made.progress.accuracy is None
    assert [(each.step, each.accuracy) for each in made.checkpoints.all()] == [(4, 1.0)]
    await made.at(10)
    made.explorer.answers.put_nowait(answer(10, right=False))
    await made.subject.end()
    assert made.evaluated[1:] == [(10, 10, 0)] and made.progress.accuracy == 0.0
    assert {member.version for member in (await made.members()).members} == {10}
    assert "no evaluation: that of step 4 has not ended" in made.notes
    await made.subject.cancel()


async def test_an_evaluation_without_engines_that_are_alive_is_lost_and_the_others_make_the_next(make: Make) -> None:
    made = make(2)
    await made.at(2)
    lost = made.alive.pop(0)
    await made.pool.call(EnginePool.leave, lost, "it died")
    assert not made.emptied.is_set(), "the other engine answers its requests, too"
    made.emptied.set()
    await made.subject.end()
    made.subject.check()
    assert made.evaluated == [] and "the evaluation of step 2 is lost: evaluation: all" in made.notes
    made.explorer.answers.put_nowait(answer(4))
    await made.at(4)
    await made.subject.end()
    assert made.sync.loaded[-1] == (["evaluation-1"], 4) and made.evaluated == [(4, 4, 1)]
    made.alive.append(remote(None, lost.name))  # its successor
    made.sync.died = ray.exceptions.ActorDiedError()
    await made.at(6)
    assert "the evaluation of step 6 is lost" in made.notes, "an engine died while it was sent weights"
    made.sync.died = None
    made.explorer.answers.put_nowait(answer(8))
    await made.at(8)
    await made.subject.end()
    assert made.evaluated[1:] == [(8, 8, 1)]
    assert {*(await made.members()).names} == {"evaluation-0", "evaluation-1"}
    await made.subject.cancel()


async def test_the_evaluation_of_a_repeated_step_is_not_made_again(make: Make) -> None:
    made = make(0)
    made.recorder.repeated = {("evaluation", made.stage.name, 2)}
    await asyncio.wait_for(made.at(2), 20)
    assert not made.explorer.asked
    made.explorer.answers.put_nowait(answer(4))
    await made.at(4)
    assert made.evaluated == [(4, 4, 0)]


@pytest.mark.parametrize("engines", [0, 1])
async def test_answers_under_other_weights_than_stated_are_no_evaluation(make: Make, engines: int) -> None:
    made = make(engines)
    made.explorer.answers.put_nowait(answer(3))
    with pytest.raises(WeightSyncError, check=about("evaluation")):
        await made.at(2)
        await made.subject.end()
    assert made.evaluated == []
    await made.subject.cancel()


async def test_a_resumed_run_keeps_what_was_told_late_of_steps_before_its_checkpoint(make: Make) -> None:
    made = make(0)
    for step in (0, 2, 4, 6):
        made.explorer.answers.put_nowait(answer(step))
        await made.at(step)
    resumed = Recorder(made.loop.config, kept=1, step=4)
    assert [record.step for record in resumed.file.read()] == [0, 2, 4]
