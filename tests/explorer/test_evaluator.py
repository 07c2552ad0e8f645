"""Attempts that are measured: how many, what a failed one is, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rayrft.benchmark.worker import open_attempts, read_attempts, to_line
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied
from rayrft.explorer.engines.exchange import Completion, Request, Session
from rayrft.explorer.evaluation import Attempt, measure
from rayrft.explorer.evaluator import Evaluator
from rayrft.explorer.rollout import Runner
from tests.errors import about
from tests.explorer.attempts import Engines, troubled
from tests.explorer.scripted import config, full_marks, spelling


def evaluator(tiny_model: Path, engines: Any, max_tokens: int | None = None, **overrides: Any) -> Evaluator:
    settings = config(**overrides)
    return Evaluator(
        settings, Runner(settings, ChatTokenizer(tiny_model), engines, full_marks).beside(engines, max_tokens)
    )


async def test_what_was_done_is_not_attempted_again_and_answers_are_as_long_as_asked_for(tiny_model: Path) -> None:
    engines, tasks = Engines(), spelling(3)
    subject = evaluator(tiny_model, engines, max_tokens=2)
    done = {tasks[0].id: 3, tasks[1].id: 5}
    groups = {group[0].task_id: group async for group in subject.each(tasks, 5, 1.0, done)}
    assert {task: [attempt.repeat for attempt in group] for task, group in groups.items()} == {
        tasks[0].id: [3, 4],
        tasks[2].id: [0, 1, 2, 3, 4],
    }
    assert all(sampling.max_tokens == 2 for *_, sampling in engines.requests)
    assert all(a.tokens == 2 and a.right and a.answer == "x" and a.versions == (7,) for g in groups.values() for a in g)
    seeds = {sampling.seed + repeat for _, n, sampling in engines.requests for repeat in range(n)}
    assert len(seeds) == 7, "another answer for every attempt"


async def test_a_failed_attempt_is_unknown_by_its_reason_and_takes_none_of_the_others(tiny_model: Path) -> None:
    subject = evaluator(tiny_model, Engines(), **troubled("raises"))
    [group] = [group async for group in subject.each(spelling(1), 3, 1.0)]
    assert [(attempt.repeat, attempt.reward) for attempt in group] == [(0, 1.0), (1, None), (2, None)]
    assert measure(group, [1]).unknown == {"workflow_error": 2}


async def test_no_more_attempts_are_made_at_once_than_engines_decode(tiny_model: Path) -> None:
    class Counting(Engines):
        now = most = 0

        async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
            self.now += request.n
            self.most = max(self.most, self.now)
            for _ in range(5):
                await asyncio.sleep(0)
            self.now -= request.n
            return await super().generate(request, sessions)

    engines = Counting()
    limits = {"explorer.engine.count": 2, "explorer.engine.max_running": 4}
    groups = [group async for group in evaluator(tiny_model, engines, **limits).each(spelling(20), 2, 1.0)]
    assert len(groups) == 20 and engines.most == 8


async def test_a_dead_engine_ends_all_attempts(tiny_model: Path) -> None:
    class Dying(Engines):
        left, cancelled = 3, 0

        async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
            self.left -= 1
            if not self.left:
                raise ActorDied("gone", field="engine-0")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return []

    engines = Dying()
    with pytest.raises(ActorDied, check=about("engine-0")):
        _ = [group async for group in evaluator(tiny_model, engines).each(spelling(3), 1, 1.0)]
    assert engines.cancelled == 2


def test_attempts_are_read_as_they_were_written_but_for_one_that_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "of" / "a.jsonl"
    assert read_attempts(path) == []
    first = [Attempt("a", 0, 0.5, "x", "is x", 3, True, None, (1, 2)), Attempt("a", 1, None, problem="timeout")]
    open_attempts(path)[0].append(*map(to_line, first))
    with path.open("a") as torn:
        torn.write('{"task_id": "b", "rep')
    assert read_attempts(path) == first
    file, found = open_attempts(path)
    file.append(to_line(Attempt("b", 0, 1.0)))
    assert found == first and read_attempts(path) == [*first, Attempt("b", 0, 1.0)]
