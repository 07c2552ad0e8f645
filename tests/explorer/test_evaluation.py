"""Measures of a model (pass@k and majority@k by enumeration, intervals), and the attempts that are measured."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.benchmark.worker import open_attempts, read_attempts, to_line
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied
from rayrft.explorer.engines.exchange import Completion, Request, Session
from rayrft.explorer.evaluation import Attempt, majority_at, measure, over_tasks, pass_at, wilson_interval
from rayrft.explorer.evaluator import Evaluator
from rayrft.explorer.rollout import Runner
from tests.errors import about
from tests.explorer.scripted import Engines, config, full_marks, spelling, troubled


def test_pass_at_k_of_many_attempts_by_hand() -> None:
    assert pass_at(1000, 1, 1000) == 1.0
    assert pass_at(10_000, 1, 100) == pytest.approx(0.01, abs=1e-12), "the binomials would overflow a float"


VOTES = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=8)


@given(VOTES, st.integers(1, 8))
def test_majority_at_k_is_the_mean_over_all_subsets(votes: list[tuple[str | None, bool]], k: int) -> None:
    if k > len(votes):
        with pytest.raises(ValueError, match="number of attempts"):
            majority_at(votes, k)
        return
    shares = {answer: fmean(right for other, right in votes if other == answer) for answer, _ in votes}

    def outcome(subset: tuple[int, ...]) -> float:
        counts = Counter(votes[index][0] for index in subset if votes[index][0] is not None)
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        return fmean(shares[answer] for answer in winners) if winners else 0.0

    subsets = itertools.combinations(range(len(votes)), k)
    assert majority_at(votes, k) == pytest.approx(fmean(map(outcome, subsets)), abs=1e-9)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(n: int, right: int, k: int) -> None:
    right, k = min(right, n), min(k, n)
    subsets = list(itertools.combinations([index < right for index in range(n)], k))
    assert pass_at(n, right, k) == pytest.approx(fmean(map(any, subsets)), abs=1e-9)


def test_many_answers_of_many_kinds_take_no_enumeration() -> None:
    votes: list[tuple[str | None, bool]] = [(str(number), number == 0) for number in range(64)] + [("0", True)] * 8
    # "0" wins but for subsets without it, and for those with one of it, where each of 32 answers has one vote.
    without, once = math.comb(63, 32), 9 * math.comb(63, 31)
    expected = 1 - (without + once * 31 / 32) / math.comb(72, 32)
    assert majority_at(votes, 32) == pytest.approx(expected, abs=1e-12)


def attempts(task: str, *rewards: float | None, **rest: object) -> list[Attempt]:
    return [Attempt(task, repeat, reward, str(reward), **rest) for repeat, reward in enumerate(rewards)]  # type: ignore[arg-type]


def test_unknown_rewards_are_counted_and_are_not_wrong() -> None:
    timeout = [Attempt("b", 2, None, problem="timeout"), Attempt("c", 0, None), Attempt("c", 1, None)]
    found = measure([*attempts("a", 1.0, 0.0, 0.5), *attempts("b", 1.0, 1.0), *timeout], [1, 2, 3])
    assert (found.tasks, found.samples, found.right, found.count) == (3, 3, 3, 5)
    assert found.unknown == {"timeout": 1, "no reason given": 2}
    assert found.accuracy.value == pytest.approx((1 / 3 + 1) / 2) and found.accuracy.tasks == 2
    assert found.mean_reward == pytest.approx(3.5 / 5)
    assert found.passed[2].value == pytest.approx((2 / 3 + 1) / 2)
    assert (found.passed[3].value, found.passed[3].tasks) == (1.0, 1), "of task b only two rewards are known"
    assert found.majority[1].value == found.accuracy.value == found.passed[1].value


@pytest.mark.parametrize("reward", [0.7 + 0.2 + 0.1, 1 - 2**-24, 1.0, 1.5])
def test_full_marks_up_to_rounding_are_right(reward: float) -> None:
    found = measure([*attempts("a", reward, reward), *attempts("b", 0.99999, 0.99999)], [2])
    assert (found.right, found.accuracy.value, found.passed[2].value, found.majority[2].value) == (2, 0.5, 0.5, 0.5)


def test_nothing_known_is_no_number() -> None:
    found = measure([Attempt("a", 0, None)], [1])
    assert math.isnan(found.accuracy.value) and math.isnan(found.mean_reward) and found.accuracy.tasks == 0
    assert (found.accuracy.low, found.accuracy.high) == (0.0, 1.0)


def test_lengths_and_cuts_are_of_attempts_that_gave_an_answer() -> None:
    cut = Attempt("a", 1, 0.0, tokens=20, cut=True, versions=(4,))
    found = measure([Attempt("a", 0, 1.0, tokens=10, versions=(3, 4)), cut, Attempt("a", 2, None, problem="timeout")])
    assert (found.mean_tokens, found.cut_share, found.versions) == (15.0, 0.5, (3, 4))


def test_the_interval_is_over_tasks_and_not_over_attempts() -> None:
    """Tasks that are always right or always wrong tell as little with 100 attempts as with one."""
    few, many = ([a for t in range(20) for a in attempts(str(t), *[float(t % 2)] * n)] for n in (1, 100))
    low, high = wilson_interval(10, 20)
    for found in (measure(few).accuracy, measure(many).accuracy):
        assert (found.value, found.low, found.high, found.tasks) == (0.5, low, high, 20)


def test_the_bootstrap_covers_as_the_normal_interval_does_and_follows_its_seed() -> None:
    values = [0.25, 0.75] * 200  # a deviation of 0.25, so a standard error of 0.0125
    found = over_tasks(values, seed=1)
    assert found == over_tasks(values, seed=1) != over_tasks(values, seed=2)
    assert found.value == 0.5 and found.high - found.low == pytest.approx(2 * 1.96 * 0.0125, rel=0.1)


@pytest.mark.parametrize("values", [[0.5], [0.25] * 8, [0.1 * 3, 0.3, 0.3]])
def test_equal_shares_have_the_interval_of_as_many_right_tasks(values: list[float]) -> None:
    found = over_tasks(values)
    assert (found.low, found.high) == pytest.approx(wilson_interval(sum(values), len(values)))
    assert found.low < values[0] < found.high


def test_wilson_interval_by_hand() -> None:
    # 5 of 10, z = 2: centre 0.5, half = 2 / 1.4 * sqrt(0.025 + 0.01) = 0.26726
    assert wilson_interval(5, 10, z=2.0) == pytest.approx((0.5 - 0.267261, 0.5 + 0.267261), abs=1e-6)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 500)[0] == 0.0 and wilson_interval(500, 500)[1] == 1.0


def evaluator(tiny_model: Path, engines: Any, max_tokens: int | None = None, **overrides: Any) -> Evaluator:
    settings = config(**overrides)
    runner = Runner(settings, ChatTokenizer(tiny_model), engines, full_marks)
    return Evaluator(settings, runner.beside(engines, max_tokens))


async def test_what_was_done_is_not_attempted_again_and_answers_are_as_long_as_asked_for(tiny_model: Path) -> None:
    engines, tasks = Engines(), spelling(3)
    subject = evaluator(tiny_model, engines, max_tokens=2)
    done = {tasks[0].id: 3, tasks[1].id: 5}
    groups = {group[0].task_id: group async for group in subject.each(tasks, 5, 1.0, done)}
    repeats = {task: [attempt.repeat for attempt in group] for task, group in groups.items()}
    assert repeats == {tasks[0].id: [3, 4], tasks[2].id: [0, 1, 2, 3, 4]}
    assert all(sampling.max_tokens == 2 for *_, sampling in engines.requests)
    assert all(a.tokens == 2 and a.right and a.answer == "x" and a.versions == (7,) for g in groups.values() for a in g)
    seeds = {sampling.seed + repeat for _, n, sampling in engines.requests for repeat in range(n)}
    assert len(seeds) == 7, "each attempt has a seed of its own"


async def test_a_failed_attempt_is_unknown_by_its_reason_and_takes_none_of_the_others(tiny_model: Path) -> None:
    subject = evaluator(tiny_model, Engines(), **troubled("raises"))
    [group] = [group async for group in subject.each(spelling(1), 3, 1.0)]
    assert [(attempt.repeat, attempt.reward) for attempt in group] == [(0, 1.0), (1, None), (2, None)]
    found = measure(group, [1])
    assert found.unknown == {"workflow_error": 2} and f"on task {group[0].task_id}" in str(found.error)


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
