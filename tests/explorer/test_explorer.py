"""The Explorer with the real Buffer and a scripted engine that answers in any order it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.schedule import Ticket
from rayrft.config import RunConfig
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import ActorDied, EnvironmentFailed, EnvironmentTimeout, RayrftError
from rayrft.experience import Task, from_batch, unpack
from rayrft.explorer.engines.exchange import INTERRUPTED, Answering, Completion, Request
from rayrft.explorer.explorer import Explorer
from rayrft.explorer.rollout import BusyClock
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows import register_workflow, workflows
from rayrft.rewards import RewardResult, Transcript
from tests.errors import about
from tests.explorer.scripted import (
    PromptEngine,
    ScriptedEngine,
    ScriptedRewards,
    config,
    make_buffer,
    make_explorer,
    plan,
    spelling,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


async def fill_one_batch(
    explorer: Explorer, settings: RunConfig, buffer: Buffer, engine: ScriptedEngine, cleanup: list[asyncio.Task[Any]]
) -> None:
    """Let the Explorer fill the first batch of the config's stage, and lease it."""
    await buffer.open_stage(plan(settings))
    cleanup.append(asyncio.create_task(explorer.explore(settings.stages[0])))
    lease = asyncio.create_task(buffer.lease(0, 1, 30))
    cleanup.append(lease)
    while not lease.done():
        await asyncio.wait({lease, asyncio.create_task(engine.answer_one())}, return_when=asyncio.FIRST_COMPLETED)
    assert (await lease).usual_rows == 8


@pytest.fixture
async def cleanup() -> AsyncIterator[list[asyncio.Task[Any]]]:
    tasks: list[asyncio.Task[Any]] = []
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
async def test_staleness_keeps_its_bound_and_nothing_is_lost_in_the_worst_order(
    staleness: int, seed: int, tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    settings, engine, buffer = config(max_staleness=staleness), ScriptedEngine(seed), make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, engine, buffer, ScriptedRewards(seed))
    await buffer.open_stage(replace(plan(settings), steps=12))
    exploring = asyncio.create_task(explorer.explore(settings.stages[0]))
    cleanup.append(exploring)

    async def answer() -> None:
        while True:
            await engine.answer_one()

    cleanup.append(asyncio.create_task(answer()))
    seen: list[int] = []
    for step in range(12):
        lease = await buffer.lease(step, 2, 30)
        assert len(lease.staleness) == 4 and max(lease.staleness) <= staleness
        seen += lease.staleness
        await buffer.ack(step)
        engine.version = step + 1
        await buffer.advance(step + 1)
    assert not engine.waiting and explorer.flow.rolling == 0, "what no step takes is decoded"
    await buffer.close_stage()
    await exploring
    stats = await buffer.stats()
    assert stats.ledger.closes
    assert stats.ledger.trained == 12 * 8
    assert stats.ledger.dropped.keys() <= {"zero_variance"}, "a group was thrown away for its age"
    assert staleness == 0 or max(seen) >= 1, "the stage never ran ahead"


async def test_groups_beyond_what_a_step_takes_are_abandoned_once_it_is_leased(
    tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    settings = config(**{"explorer.over_sampling": 2.0, "explorer.drop_zero_variance": False})
    engine, buffer = ScriptedEngine(0), make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, engine, buffer, ScriptedRewards(1))
    await buffer.open_stage(plan(settings))
    cleanup.append(asyncio.create_task(explorer.explore(settings.stages[0])))
    while len(engine.waiting) < 8:
        engine.arrived.clear()
        await engine.arrived.wait()
    for _ in range(4):
        await engine.answer_one()
    await buffer.lease(0, 1, 30)
    while engine.abandoned < 4:
        engine.gave_up.clear()
        await engine.gave_up.wait()
    await buffer.ack(0)
    assert (await buffer.stats()).ledger.dropped_tasks == {"surplus": 4}
    assert len(engine.waiting) == 4, "none begins for a step that has its batch"
    await buffer.advance(1)
    while len(engine.waiting) < 12:
        engine.arrived.clear()
        await engine.arrived.wait()
    assert (await buffer.stats()).ledger.sampled == 8


async def test_a_group_that_fails_while_it_is_abandoned_fails_nobody(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, buffer, begun = config(), make_buffer(tmp_path), asyncio.Event()
    explorer = make_explorer(settings, tiny_model, ScriptedEngine(0), buffer, ScriptedRewards())

    async def run(*_: Any) -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise OSError("a connection was cut")

    monkeypatch.setattr(explorer.flow, "run", run)
    await buffer.open_stage(plan(settings))
    exploring = asyncio.create_task(explorer.explore(settings.stages[0]))
    await begun.wait()
    await buffer.close_stage()
    await exploring


class InterruptedEngine(Answering):
    """Answers ``WHOLE`` when it is told to, or ends with its first token when it is interrupted."""

    WHOLE = (7, 5, 1)

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.running: dict[int, tuple[Request, asyncio.Future[str]]] = {}
        self.changed = asyncio.Condition()

    async def generate(self, request: Request) -> list[Completion]:
        how = asyncio.get_running_loop().create_future()
        self.running[id(request)] = request, how
        async with self.changed:
            self.changed.notify_all()
        reason = await how
        del self.running[id(request)]
        ids = self.WHOLE[1:] if self.goes_on(request) else self.WHOLE
        ids = ids[:1] if reason == INTERRUPTED else ids
        return [Completion(ids, (-0.5,) * len(ids), ((0, len(ids), self.version),), reason)] * request.n

    async def interrupt(self, request: Request) -> None:
        self.running[id(request)][1].set_result(INTERRUPTED)

    def goes_on(self, request: Request) -> bool:
        return request.prompt[-1] == self.WHOLE[0]

    async def answer(self, count: int, resumed: bool) -> None:
        """Answer so many requests, of groups that were parked or of new ones, once they are there."""

        def found() -> list[asyncio.Future[str]]:
            return [how for request, how in self.running.values() if self.goes_on(request) == resumed]

        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: len(found()) >= count)
        for how in found()[:count]:
            how.set_result("stop")


@pytest.mark.parametrize(("old_tokens", "staleness"), [("mask", 0), ("train", 1)])
async def test_groups_that_a_step_leaves_over_are_parked_and_go_on_first_under_the_next_weights(
    old_tokens: Any, staleness: int, tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    over = {"explorer.over_sampling": 2.0, "explorer.drop_zero_variance": False}
    settings = config(max_staleness=staleness, **over, **{"explorer.partial": {"old_tokens": old_tokens}})
    engine, buffer = InterruptedEngine(), make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, engine, buffer, ScriptedRewards(1))
    await buffer.open_stage(replace(plan(settings), parks=old_tokens))
    cleanup.append(asyncio.create_task(explorer.explore(settings.stages[0])))
    for step in range(staleness + 1):  # at the last of these what is running is due
        await engine.answer(4, resumed=False)
        await buffer.lease(step, 1, 30)
        await buffer.ack(step)
        engine.version = step + 1
        if step < staleness:
            await buffer.advance(step + 1)
    async with asyncio.timeout(30):
        while (await buffer.stats()).ledger.held != (staleness + 1) * 4 * 2:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0)
    await buffer.advance(staleness + 1)
    await engine.answer(4, resumed=True)
    lease = await buffer.lease(staleness + 1, 1, 30)
    blocks = [unpack(await part.ref).take(pa.array(part.rows)) for share in lease.shares for part in share.parts]
    rows = [row for block in blocks for row in from_batch(block)]
    assert len(rows) == 8 and all(row.token_ids[row.prompt_length :].tolist() == [7, 5, 1] for row in rows)
    answers = {tuple(row.action_mask[row.prompt_length :].tolist()) for row in rows}
    versions = {tuple(span.version for span in row.weight_versions) for row in rows}
    if old_tokens == "train":
        assert answers == {(1, 1, 1)} and versions == {(staleness, staleness + 1)}
    else:
        assert answers == {(0, 1, 1)} and versions == {(staleness + 1,)}
    assert (await buffer.stats()).ledger.closes


async def test_an_engine_that_holds_its_answers_is_named_with_the_lease_that_waits(
    tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    settings, engine, buffer = config(), ScriptedEngine(0), make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, engine, buffer, ScriptedRewards(1))
    await buffer.open_stage(plan(settings))
    cleanup.append(asyncio.create_task(explorer.explore(settings.stages[0])))
    lease = asyncio.create_task(buffer.lease(0, 1, 30))
    await engine.arrived.wait()
    [groups] = (await buffer.waiting()).waits
    assert groups.target == "groups" and groups.what.startswith("step 0: 0 ready, 4 running")
    engine_0, workflow = sorted((await explorer.waiting()).waits, key=lambda wait: wait.target)
    assert (engine_0.target, engine_0.what, engine_0.count) == ("engine-0", "exchange", 1)
    assert workflow.target == f"workflow {settings.explorer.workflow!r}" and workflow.what.startswith("a/grpo/")
    while not lease.done():
        answer = asyncio.ensure_future(engine.answer_one())
        await asyncio.wait({answer, lease}, return_when=asyncio.FIRST_COMPLETED)
        answer.cancel()
    assert (await buffer.waiting()).waits == []


async def test_tasks_that_are_added_are_drawn_and_a_prompt_over_the_limit_is_dropped_and_replaced(
    tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    settings, engine, buffer = config(), ScriptedEngine(0), make_buffer(tmp_path, words=2, sampler="sequential")
    explorer = make_explorer(settings, tiny_model, engine, buffer, ScriptedRewards(1), words=2)
    long = [Task.create("test", "x" * 100 + str(i), "x") for i in range(2)]
    short = Task.create("test", "Spell this word backward: 777", "x")
    assert await buffer.add_tasks([long[0], short, long[1], *spelling(2)], 0) == 3
    await fill_one_batch(explorer, settings, buffer, engine, cleanup)
    assert (await buffer.stats()).ledger.dropped_tasks["prompt_too_long"] >= 2
    assert explorer.flow.tasks.keys() == {task.id for task in [*spelling(2), *long, short]}


async def test_a_run_whose_prompts_are_all_too_long_ends_with_that_cause(
    tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    settings = config(**{"explorer.sampling.max_prompt_tokens": 3})
    buffer = make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, PromptEngine(), buffer, ScriptedRewards())
    await buffer.open_stage(plan(settings))
    with pytest.raises(RayrftError, match=r"32 consecutive groups failed.*too long: \d+ tokens, at most 3"):
        await asyncio.wait_for(explorer.explore(settings.stages[0]), 60)


async def test_prompts_that_are_refused_at_once_are_not_in_a_row_with_tasks_that_are_still_sampling(
    tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    settings, engine = config(**{"stages.grpo.batch_size": 96}), ScriptedEngine(0)
    long = [Task.create("test", "x" * 100 + str(i), "x") for i in range(48)]
    mixed = [task for pair in zip(spelling(48), long, strict=True) for task in pair]
    tasks = TaskSetSpec([task.id for task in mixed], [0] * 96, [1.0], sampler="sequential", seed=0)
    buffer = Buffer("run", tmp_path, BufferConfig(), 0, tasks)
    explorer = make_explorer(settings, tiny_model, engine, buffer, ScriptedRewards(1))
    explorer.flow.tasks = {task.id: task for task in mixed}
    await buffer.open_stage(plan(settings))
    exploring = asyncio.create_task(explorer.explore(settings.stages[0]))
    cleanup.append(exploring)
    while (await buffer.stats()).ledger.dropped_tasks.get("prompt_too_long", 0) < 47:
        assert not exploring.done(), "none that samples has ended, and 47 were refused"
        await asyncio.sleep(0)
    await engine.answer_one()
    assert not exploring.done()


async def test_a_dead_engine_ends_exploring_with_its_name(tmp_path: Path, tiny_model: Path) -> None:
    class DeadEngine(Answering):
        async def generate(self, request: Request) -> list[Completion]:
            raise ActorDied("the core ended", field="engine")

    settings, buffer = config(), make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, DeadEngine(), buffer, ScriptedRewards())
    await buffer.open_stage(plan(settings))
    with pytest.raises(ActorDied, check=about("engine-0")):
        await explorer.explore(settings.stages[0])


async def test_rewards_that_are_never_known_stop_the_run_with_their_reason(tmp_path: Path, tiny_model: Path) -> None:
    settings, buffer = config(), make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, PromptEngine(), buffer, ScriptedRewards(unknown=True))
    await buffer.open_stage(plan(settings))
    with pytest.raises(RayrftError, match="the judge is away", check=about("explorer")):
        await explorer.explore(settings.stages[0])
    stats = await buffer.stats()
    assert stats.ledger.dropped == {"reward_unknown": stats.ledger.sampled}


async def test_a_run_whose_groups_teach_nothing_ends_after_so_many_tries(tmp_path: Path, tiny_model: Path) -> None:
    class Flat(ScriptedRewards):
        async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
            return [RewardResult(1.0)] * len(transcripts)

    settings, buffer = config(**{"explorer.max_tries": 40}), make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, PromptEngine(), buffer, Flat())
    await buffer.open_stage(plan(settings))
    with pytest.raises(RayrftError, check=about("explorer.max_tries", 40)):
        await asyncio.wait_for(explorer.explore(settings.stages[0]), 60)
    stats = await buffer.stats()
    assert stats.ledger.dropped == {"zero_variance": stats.ledger.sampled} and 80 <= stats.ledger.sampled < 88


async def test_a_workflow_that_raises_is_counted_and_stops_the_run_if_it_always_does(
    tmp_path: Path, tiny_model: Path
) -> None:
    if "broken" not in list(workflows):

        @register_workflow("broken")
        class Broken:
            async def run(self, *_: Any) -> Any:
                raise KeyError("nothing here")

    settings, buffer = config(**{"explorer.workflow": "broken"}), make_buffer(tmp_path)
    explorer = make_explorer(settings, tiny_model, ScriptedEngine(0), buffer, ScriptedRewards())
    await buffer.open_stage(plan(settings))
    with pytest.raises(RayrftError, match="KeyError: 'nothing here'", check=about("explorer")):
        await explorer.explore(settings.stages[0])
    assert (await buffer.stats()).ledger.dropped_tasks["workflow_error"] >= 32


def test_a_busy_clock_counts_overlapping_work_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = BusyClock()
    clock.__enter__()
    now = 1.0
    clock.__enter__()
    now = 3.0
    clock.__exit__()
    now = 4.0
    assert clock.take() == 4.0
    clock.__exit__()
    now = 9.0
    assert clock.take() == 0.0


async def test_added_tasks_that_two_groups_fetch_at_once_are_counted_once(tmp_path: Path, tiny_model: Path) -> None:
    buffer = make_buffer(tmp_path, words=2)
    explorer = make_explorer(config(), tiny_model, ScriptedEngine(0), buffer, ScriptedRewards(), words=2)
    for more in (4, 6):
        await buffer.add_tasks(spelling(more), 0)
        new = spelling(more)[-2:]
        assert new == await asyncio.gather(*(explorer.flow.task(Ticket(0, 0, 0, task.id)) for task in new))


@register_workflow("odd_metrics")
class OddMetrics:
    """Counts what has no name, in every other group."""

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory:
        trajectory = model.start(task.messages)
        await trajectory.act()
        if int(task.question[-1]) % 2:
            trajectory.count(5)  # type: ignore[arg-type]
        return trajectory


async def test_a_group_whose_rows_cannot_be_stored_is_a_failure_of_its_workflow(
    tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    settings, buffer = config(**{"explorer.workflow": "odd_metrics"}), make_buffer(tmp_path, sampler="sequential")
    engine = ScriptedEngine(0)
    explorer = make_explorer(settings, tiny_model, engine, buffer, ScriptedRewards(1))
    await fill_one_batch(explorer, settings, buffer, engine, cleanup)
    assert (await buffer.stats()).ledger.dropped_tasks["workflow_error"] >= 2


@register_workflow("fails_late")
class FailsLate:
    """Of a task with an odd number the second attempt raises, of every fourth both do, for two reasons."""

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory:
        trajectory, number = model.start(task.messages), int(task.question[-3:])
        await trajectory.act()
        if number % 4 == 3:
            raise EnvironmentFailed("no way") if model.repeat else EnvironmentTimeout("no time")
        if number % 2 and model.repeat:
            raise KeyError("nothing here")
        return trajectory


async def test_what_fails_in_a_group_is_in_the_ledger_with_its_reason(
    tmp_path: Path, tiny_model: Path, cleanup: list[asyncio.Task[Any]]
) -> None:
    settings = config(**{"explorer.workflow": "fails_late", "explorer.drop_zero_variance": False})
    engine, buffer = PromptEngine(), make_buffer(tmp_path, sampler="sequential")
    explorer = make_explorer(settings, tiny_model, engine, buffer, ScriptedRewards(1))
    await buffer.open_stage(replace(plan(settings), steps=3))
    cleanup.append(asyncio.create_task(explorer.explore(settings.stages[0])))
    for step in range(3):
        await buffer.lease(step, 1, 30)
        await buffer.ack(step)
        engine.version = step + 1
        await buffer.advance(step + 1)
    ledger = (await buffer.stats()).ledger
    # Of the first 15 tasks 12 give rows: 4 of these one row of two.
    assert (ledger.trained, ledger.dropped) == (12 * 2 - 4, {"workflow_error": 4}) and ledger.sampled == 24
    assert ledger.dropped_tasks == {"timeout": 3} and ledger.closes
