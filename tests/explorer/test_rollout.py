"""The runner: a repeat costs no other, equal first prompts are one request, deadlines end what runs for too long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from rayrft.config.explorer import RepetitionConfig
from rayrft.config.reward import RewardConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError
from rayrft.experience import Experience, Task, rewards_by_token
from rayrft.explorer.calls import GroupCalls
from rayrft.explorer.deadlines import AttemptDeadline, Expired, GroupDeadline
from rayrft.explorer.engines.exchange import Completion, Request, Session
from rayrft.explorer.scoring import apply_rewards
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows import register_workflow
from rayrft.rewards import RewardResult, StepReward, Transcript
from tests.errors import about
from tests.explorer.scripted import TASK, Engines, Room, config, roll_out, troubled, visit

TROUBLES = "raises, cancels itself, exits, has a deadline of its own, none, never acts, another's, twice"
FORGERIES = "forges tokens, forges log-probs, forges a prompt, forges and is full"


@pytest.mark.parametrize("trouble", f"{TROUBLES}, {FORGERIES}".split(", "))
async def test_a_failed_repeat_costs_itself(trouble: str, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rayrft"):
        rollout = await roll_out(tiny_model, Engines(), n=3, **troubled(trouble))
    assert [row.repeat for row in rollout.rows] == ["0"] and rollout.failed == {"workflow_error": 2}
    first, second = (record.getMessage() for record in caplog.records)
    assert all("'troubled'" in message and TASK.id in message for message in (first, second))
    assert "Traceback" in first and "Traceback" not in second


async def test_a_text_that_cannot_fit_is_not_tokenised(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte takes seconds, in which the Explorer does nothing else."""
    monkeypatch.setattr(ChatTokenizer, "observation", None)
    rollout = await roll_out(tiny_model, Engines(), **troubled("observes a library"))
    assert [row.stop_reason for row in rollout.rows] == ["stop", "length"] and not rollout.failed
    monkeypatch.setattr(ChatTokenizer, "prompt", None)
    book = Task.create("test", "x" * 1_000_000, "x")
    rollout = await roll_out(tiny_model, Engines(), task=book, **troubled("observes a library"))
    assert rollout.rows == [] and rollout.failed == {"prompt_too_long": 2}


@pytest.mark.parametrize(
    ("trouble", "failed"),
    [
        ("", {}),
        ("close", {}),
        ("create", {"environment_error": 2}),
        ("reset", {"environment_error": 2}),
        ("hang", {"timeout": 2}),
    ],
)
async def test_environments_in_trouble_cost_an_attempt(trouble: str, failed: dict[str, int], tiny_model: Path) -> None:
    rollout = await roll_out(tiny_model, Engines(), n=2, **visit(trouble))
    assert [row.reward for row in rollout.rows] == ([] if failed else [0.5] * 2)
    assert rollout.failed == failed and Room.opened == 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (visit("", name="Cellar"), "explorer.environment.name"),
        (visit("") | {"explorer.environment.options": {"windows": 2}}, "explorer.environment.options"),
    ],
)
async def test_an_environment_that_cannot_be_is_refused(settings: dict[str, Any], field: str, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        await roll_out(tiny_model, Engines(), **settings)


async def test_no_garbage_of_groups_is_left_to_be_collected(tiny_model: Path) -> None:
    """Collecting what thousands of groups leave took a fifth of the Explorer's time."""

    def alive() -> list[Any]:
        kinds = {Model, Trajectory, Experience, GroupCalls}
        return [each for each in gc.get_objects() if type(each) in kinds]

    before = alive()  # what other tests have kept
    gc.disable()
    try:
        workflows = (troubled("raises"), troubled("hangs"), troubled("never acts"), visit(""), visit("hang"))
        for workflow in ({}, *workflows):
            await roll_out(tiny_model, Engines(), **{"explorer.deadline_s": 0.2, **workflow})
        await asyncio.sleep(0)
        left = {id(each) for each in alive()} - {id(each) for each in before}
    finally:
        gc.enable()
    assert not left


async def test_why_a_reward_is_unknown_is_told_with_a_task(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    results = iter([RewardResult(1.0), RewardResult(None, reason="the judge is away")])

    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        return [next(results) for _ in transcripts]

    with caplog.at_level(logging.WARNING, "rayrft"):
        await roll_out(tiny_model, Engines(), score=score)
    [message] = (record.getMessage() for record in caplog.records)
    assert TASK.id in message and "the judge is away" in message


@register_workflow("rewarding")
class Rewarding:
    """Acts twice after an example, and sets the reward of the first attempt."""

    def __init__(self, result: RewardResult) -> None:
        self._result = result

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory:
        example = [{"role": "user", "content": "Spell cat"}, {"role": "assistant", "content": "tac"}]
        trajectory = model.start([*example, *task.messages])
        await trajectory.act()
        trajectory.observe("again")
        await trajectory.act()
        if model.repeat == 0:
            trajectory.reward(self._result)
        return trajectory


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (RewardResult(1.0, {"style": 2.0}, "good", "tac", (0.25, 0.75), 0.5, steps=(StepReward(1, 2, 4.0),)), True),
        (RewardResult(1.0, turns=(0.25, 0.5, 0.75)), False),
        (RewardResult(1.0, steps=(StepReward(0, 3, 1.0),)), False),
    ],
)
async def test_a_reward_that_a_workflow_sets_is_kept_whole(given: RewardResult, kept: bool, tiny_model: Path) -> None:
    seen = list[Transcript]()

    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        seen.extend(transcripts)
        steps = (StepReward(0, 0, 0.5), StepReward(0, 1, 1.0), StepReward(1, 2, -1.0))
        return [RewardResult(0.0, turns=(0.0, 1.0), steps=steps)] * len(transcripts)

    options = {"rewarding": {"result": given}}
    workflow = {"explorer.workflow": "rewarding", "explorer.workflow_options": options}
    rollout = await roll_out(tiny_model, Engines(), score=score, **workflow)
    [transcript] = seen
    assert len(transcript.turns) == 6 and transcript.given == 1 and len(transcript.answers) == 2
    if not kept:
        assert rollout.failed == {"workflow_error": 1} and len(rollout.results) == 1
        return
    assert rollout.results[0] == given
    assert transcript.token_ids == tuple(rollout.rows[0].token_ids[rollout.rows[0].prompt_length :])
    scored = apply_rewards(rollout.rows, rollout.results, RewardConfig(), max_tokens=64)
    assert scored.rewards == [1.5, 0.0] and scored.raw_rewards == [1.0, 0.0]
    turns = [[row.metrics["turn_reward_0"], row.metrics["turn_reward_1"]] for row in scored.rows]
    assert turns == [[0.25, 0.75], [0.0, 1.0]]
    # Each character of an answer is a token; the first two steps both end with the first one.
    first, second = (np.flatnonzero(np.diff(row.action_mask, prepend=0) == 1).tolist() for row in scored.rows)
    assert rewards_by_token(scored.rows[0].metrics) == {first[1] + 1: 4.0}
    assert rewards_by_token(scored.rows[1].metrics) == {second[0]: 1.5, second[1] + 1: -1.0}


async def test_rewards_of_steps_of_another_text_than_the_tokens_say_are_unknown(tiny_model: Path) -> None:
    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        steps = (StepReward(0, 2, 1.0),)
        return [RewardResult(1.0, {"style": 2.0}, steps=steps)] * len(transcripts)

    rollout = await roll_out(tiny_model, Engines(), score=score, **troubled("retells"))
    kept, told = rollout.results
    assert told.value is None and told.error and "do not begin with the first 2 characters" in str(told.reason)
    assert kept.value == 1.0 and list(rewards_by_token(rollout.rows[0].metrics).values()) == [1.0]
    assert rewards_by_token(rollout.rows[1].metrics) == {}


async def test_a_trajectory_may_be_built_of_calls_of_the_model(tiny_model: Path) -> None:
    rollout = await roll_out(tiny_model, Engines(), **troubled("builds its own"))
    assert rollout.failed == {} and [int(row.action_mask.sum()) for row in rollout.rows] == [3, 6]


async def test_nothing_more_is_sampled_for_an_attempt_that_has_ended(tiny_model: Path) -> None:
    class Slow(Engines):
        """Never answers what a single attempt asks for."""

        aborted = 0

        async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
            if request.n == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.aborted += 1
            return await super().generate(request, sessions)

    engines = Slow()
    rollout = await roll_out(tiny_model, engines, n=3, **troubled("one of two is full"))
    assert [len(row.turns) for row in rollout.rows] == [2, 2, 2] and not rollout.failed
    assert engines.aborted == 2


async def test_what_is_sampled_does_not_depend_on_whether_first_requests_came_together(tiny_model: Path) -> None:
    together, apart = Engines(), Engines()
    first = await roll_out(tiny_model, together, n=3)
    second = await roll_out(tiny_model, apart, n=3, **troubled("late"))
    assert [n for _, n, _ in together.requests] == [3]
    assert all(n == 1 for _, n, _ in apart.requests)
    seeds = [row.logprobs[row.prompt_length] for row in first.rows]
    assert seeds == [row.logprobs[row.prompt_length] for row in second.rows] and len(set(seeds)) == 3


async def test_every_request_says_when_an_answer_repeats_itself(tiny_model: Path) -> None:
    repeats = {"explorer.sampling.repetition": {"max_pattern": 4, "count": 3}}
    engines = Engines()
    await roll_out(tiny_model, engines, **repeats, **troubled(""))
    assert {sampling.repetition for _, _, sampling in engines.requests} == {RepetitionConfig(max_pattern=4, count=3)}
    with pytest.raises(ConfigError, check=about("explorer.sampling.repetition.min_pattern")):
        config(**{"explorer.sampling.repetition": {"min_pattern": 5, "max_pattern": 4}})


async def test_a_task_is_acted_on_by_the_workflow_that_it_names(tiny_model: Path) -> None:
    named = Task.create("test", TASK.question, "x", workflow="troubled")
    options = {"explorer.workflow_options": {"troubled": {"trouble": "raises"}}}
    assert (await roll_out(tiny_model, Engines(), task=named, **options)).failed == {"workflow_error": 1}
    assert (await roll_out(tiny_model, Engines(), **options)).failed == {}


@pytest.mark.parametrize("stop_reason", ["stop", "length"])
async def test_a_trajectory_is_one_sequence_of_what_it_sampled_and_saw(tiny_model: Path, stop_reason: str) -> None:
    engines = Engines(stop_reason)
    rollout = await roll_out(tiny_model, engines, **troubled(""))
    mine = [prompt for prompt, n, _ in engines.requests if n == 1]
    assert len(mine) > 1
    for earlier, later in itertools.pairwise(mine):
        assert later[: len(earlier)] == earlier, "what was sent before is the beginning of what is sent now"
    short, row = rollout.rows
    assert (short.stop_reason, row.stop_reason) == (stop_reason, "length") and not rollout.failed
    assert len(row.token_ids) <= 64, "it ends with what it has when there is no more room"
    answered = sum(turn["role"] == "assistant" for turn in row.turns)
    assert 3 * answered - 3 < row.action_mask.sum() <= 3 * answered and row.turns[-1]["role"] == "assistant"
    assert all(span.version == 7 and row.action_mask[span.start : span.end].all() for span in row.weight_versions)
    if stop_reason == "stop":  # then the template itself would write the very same tokens
        answers = np.flatnonzero(np.diff(row.action_mask.astype(int)) == 1) + 1
        assert len(answers) == answered
        observed = row.token_ids[answers[0] + 3 : answers[1]].tolist()
        hf = ChatTokenizer(tiny_model).hf
        text = hf.decode(observed)
        assert text.count("again") == 1 and hf.eos_token not in text.split("again")[0]


def test_trajectories_are_public() -> None:
    import rayrft

    assert rayrft.Trajectory is Trajectory and rayrft.Model is Model


# Deadlines


async def test_an_attempt_does_not_begin_when_its_groups_deadline_is_over() -> None:
    group, began = GroupDeadline(0.01), list[int]()
    for number in range(2):
        with pytest.raises(Expired), AttemptDeadline(group, 100.0, Session()):
            began.append(number)
            await asyncio.Event().wait()
    current = asyncio.current_task()
    assert began == [0] and group.expired and current and not current.cancelling()


class Queue(Engines):
    """Lets requests wait for an engine, and then for their answers, until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.finish = asyncio.Event(), asyncio.Event()

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
        with contextlib.ExitStack() as waiting:
            for session in sessions:
                waiting.enter_context(session.queued())
            await self.begin.wait()
        await self.finish.wait()
        return await super().generate(request, sessions)


class Time:
    """The time of the event loop, as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self._now)

    async def passes(self, seconds: float) -> None:
        """Let what is ready run, then the time pass, then what is due run."""
        for step in (seconds, 0.0):
            for _ in range(30):
                await asyncio.sleep(0)
            self._now += step


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("of_group", [False, True])
async def test_waiting_costs_no_deadline(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, answered: bool, of_group: bool
) -> None:
    engines, time = Queue(), Time(monkeypatch)
    limits = {"explorer.deadline_s": 1000.0, "explorer.group_deadline_s": 10.0} if of_group else {}
    running = asyncio.create_task(roll_out(tiny_model, engines, n=3, **{"explorer.deadline_s": 10.0, **limits}))
    await time.passes(500)
    assert not running.done()
    engines.begin.set()
    await time.passes(9)
    if answered:
        engines.finish.set()
    await time.passes(2)
    rollout = await running
    assert (len(rollout.rows), rollout.failed) == ((3, {}) if answered else (0, {"timeout": 3}))


async def test_after_a_wait_an_attempt_has_the_time_that_it_had_left(monkeypatch: pytest.MonkeyPatch) -> None:
    time, session, ended = Time(monkeypatch), Session(), asyncio.Event()

    async def attempt() -> None:
        with contextlib.suppress(Expired), AttemptDeadline(GroupDeadline(None), 10.0, session):
            await asyncio.Event().wait()
        ended.set()

    running = asyncio.create_task(attempt())
    await time.passes(6)
    with session.queued():
        await time.passes(500)
    await time.passes(3)
    assert not ended.is_set()
    await time.passes(2)
    assert ended.is_set(), "6 s before the wait and 4 s after it"
    await running


def test_deadlines_hold_on_the_event_loop_of_ray_actors() -> None:
    """Where a timer that is due at once is no timer."""

    async def hang() -> None:
        group = GroupDeadline(None)

        async def attempt(number: int) -> None:
            with AttemptDeadline(group, 0.05 + 0.0007 * number, Session()):
                await asyncio.Event().wait()

        async with asyncio.timeout(20):
            ended = await asyncio.gather(*map(attempt, range(8)), return_exceptions=True)
        assert all(isinstance(error, Expired) for error in ended)

    uvloop.run(hang())


@pytest.mark.parametrize("limit", ["explorer.deadline_s", "explorer.group_deadline_s"])
async def test_at_a_deadline_what_has_finished_is_kept_and_what_hangs_is_told(
    limit: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time(monkeypatch)
    settings = {**troubled("hangs"), "explorer.deadline_s": 100.0, limit: 10.0}
    running = asyncio.create_task(roll_out(tiny_model, Engines(), n=3, **settings))
    await time.passes(9.9)
    assert not running.done()
    await time.passes(0.2)
    rollout = await running
    assert [row.repeat for row in rollout.rows] == ["0"] and rollout.failed == {"timeout": 2}
    assert all(limit in record.getMessage() for record in caplog.records)
