"""The Explorer with the real Buffer and a scripted engine that answers in any order it likes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.leases import Lease
from rayrft.buffer.schedule import StagePlan, Ticket
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import EnvironmentFailed, EnvironmentTimeout, RayrftError
from rayrft.experience import Task, from_batch, unpack
from rayrft.explorer.explorer import Explorer
from rayrft.explorer.rollout import BusyClock
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows import register_workflow
from tests.errors import about
from tests.explorer.scripted import QuickEngine, Rewards, ScriptedEngine, config, make_explorer, spelling

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Subject:
    """An Explorer that fills a Buffer."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        engine: Any,
        rewards: Any = None,
        *,
        tasks: Sequence[Task] = (),
        sampler: str = "shuffled",
        **overrides: Any,
    ) -> None:
        tasks = tasks or spelling(50)
        self.config, self.engine = config(**overrides), engine
        spec = TaskSetSpec([task.id for task in tasks], [0] * len(tasks), [1.0], sampler=sampler, seed=0)
        self.buffer = Buffer("run", folder, BufferConfig(), 0, spec)
        self.explorer = make_explorer(self.config, model, engine, self.buffer, rewards, tasks)
        self._running: list[asyncio.Task[Any]] = []

    async def begin(self, **plan: Any) -> asyncio.Task[None]:
        """Begin the stage; return the task in which it is explored."""
        stage, staleness = self.config.stages[0], self.config.max_staleness
        over_sampling = self.config.explorer.over_sampling
        await self.buffer.open_stage(
            StagePlan(stage.groups, max_staleness=staleness, over_sampling=over_sampling, **plan)
        )
        return self.spawn(self.explorer.explore(stage, "explorer-0"))

    def spawn(self, running: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Let this run until the test ends."""
        self._running.append(asyncio.create_task(running))
        return self._running[-1]

    async def train(self, step: int, advance: bool = True) -> Lease:
        """Lease and acknowledge a step, whose weights the engine has then."""
        lease = await self.buffer.lease(step, 1, 30)
        await self.buffer.ack(step)
        self.engine.version = step + 1
        if advance:
            await self.buffer.advance(step + 1)
        return lease

    async def fill(self, lease: asyncio.Task[Lease] | None = None) -> None:
        """Answer until the first batch is leased."""
        lease = lease or self.spawn(self.buffer.lease(0, 1, 30))
        while not lease.done():
            answer = asyncio.ensure_future(self.engine.answer_one())
            await asyncio.wait({answer, lease}, return_when=asyncio.FIRST_COMPLETED)
            answer.cancel()
        assert (await lease).usual_rows == 8

    async def ledger(self) -> Any:
        return (await self.buffer.stats()).ledger

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@pytest.fixture
async def make(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Callable[..., Subject]]:
    made: list[Subject] = []

    def make(*args: Any, **overrides: Any) -> Subject:
        made.append(Subject(tmp_path, tiny_model, *args, **overrides))
        return made[-1]

    yield make
    for subject in made:
        await subject.close()


async def rolling(explorer: Explorer) -> int:
    """Return the number of groups whose rollout has not ended."""
    return sum(each.count for each in (await explorer.waiting()).waits if each.target.startswith("workflow"))


Make = Callable[..., Subject]
OVER = {"explorer.over_sampling": 2.0, "explorer.drop_zero_variance": False}


async def test_explorers_share_the_groups_of_a_step(make: Make, tiny_model: Path) -> None:
    engine = ScriptedEngine()
    subject = make(engine, **{"explorer.count": 2})
    stage = subject.config.stages[0]
    other = make_explorer(subject.config, tiny_model, engine, subject.buffer, None)
    await subject.begin()
    subject.spawn(other.explore(stage, "explorer-1"))
    await engine.until(lambda: len(engine.waiting) == stage.groups)
    assert await rolling(subject.explorer) == await rolling(other) == stage.groups / 2


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
async def test_staleness_keeps_its_bound_and_none_is_lost_in_any_order(staleness: int, seed: int, make: Make) -> None:
    engine = ScriptedEngine(seed)
    subject = make(engine, max_staleness=staleness)
    exploring = await subject.begin(steps=12)

    async def answer() -> None:
        while True:
            await engine.answer_one()

    subject.spawn(answer())
    seen: list[int] = []
    for step in range(12):
        lease = await subject.train(step)
        assert len(lease.staleness) == 4 and max(lease.staleness) <= staleness
        seen += lease.staleness
    assert not engine.waiting and not engine.abandoned and not await rolling(subject.explorer), "what no step takes"
    await subject.buffer.close_stage()
    await exploring
    ledger = await subject.ledger()
    assert ledger.closes and ledger.trained == 12 * 8
    assert ledger.dropped.keys() <= {"zero_variance"}, "a group was thrown away for its age"
    assert staleness == 0 or max(seen) >= 1, "the stage never ran ahead"


async def test_groups_beyond_what_a_step_takes_are_abandoned_once_it_is_leased(make: Make) -> None:
    engine = ScriptedEngine()
    subject = make(engine, **OVER)
    await subject.begin()
    await engine.until(lambda: len(engine.waiting) == 8)
    for _ in range(4):
        await engine.answer_one()
    await subject.train(0, advance=False)
    await engine.until(lambda: engine.abandoned == 4)
    assert (await subject.ledger()).dropped_tasks == {"surplus": 4}
    assert not engine.waiting, "none begins for a step that has its batch"
    await subject.buffer.advance(1)
    await engine.until(lambda: len(engine.waiting) == 8)
    assert (await subject.ledger()).sampled == 8


async def test_a_group_that_fails_while_abandoned_fails_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, begun = make(ScriptedEngine()), asyncio.Event()

    async def run(*_: Any) -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise OSError("a connection was cut")

    monkeypatch.setattr(subject.explorer.flow, "run", run)
    exploring = await subject.begin()
    await begun.wait()
    await subject.buffer.close_stage()
    await exploring


@pytest.mark.parametrize(("old_tokens", "staleness"), [("mask", 0), ("train", 1)])
async def test_groups_that_a_step_leaves_are_parked_and_continued(old_tokens: str, staleness: int, make: Make) -> None:
    engine = ScriptedEngine()
    subject = make(engine, max_staleness=staleness, **OVER, **{"explorer.partial": {"old_tokens": old_tokens}})
    await subject.begin(parks=old_tokens)
    for step in range(staleness + 1):  # at the last of these what is running is due
        await engine.answer(4, resumed=False)
        await subject.train(step, advance=step < staleness)
    async with asyncio.timeout(30):
        while (await subject.ledger()).held != (staleness + 1) * 4 * 2:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0)
    await subject.buffer.advance(staleness + 1)
    await engine.answer(4, resumed=True)
    lease = await subject.buffer.lease(staleness + 1, 1, 30)
    blocks = [unpack(await part.ref).take(pa.array(part.rows)) for share in lease.shares for part in share.parts]
    rows = [row for block in blocks for row in from_batch(block)]
    assert len(rows) == 8 and all(tuple(row.token_ids[row.prompt_length :]) == engine.WHOLE for row in rows)
    answers = {tuple(row.action_mask[row.prompt_length :].tolist()) for row in rows}
    versions = {tuple(span.version for span in row.weight_versions) for row in rows}
    if old_tokens == "train":
        assert answers == {(1, 1, 1)} and versions == {(staleness, staleness + 1)}
    else:
        assert answers == {(0, 1, 1)} and versions == {(staleness + 1,)}
    assert (await subject.ledger()).closes


async def test_an_engine_that_holds_its_answers_is_named_with_the_lease_that_waits(make: Make) -> None:
    engine = ScriptedEngine()
    subject = make(engine)
    await subject.begin()
    lease = subject.spawn(subject.buffer.lease(0, 1, 30))
    await engine.until(lambda: bool(engine.waiting))
    [groups] = (await subject.buffer.waiting()).waits
    assert groups.target == "groups" and groups.what.startswith("step 0: 0 ready, 4 running")
    engine_0, workflow = sorted((await subject.explorer.waiting()).waits, key=lambda wait: wait.target)
    assert (engine_0.target, engine_0.what, engine_0.count) == ("engine-0", "exchange", 1)
    assert workflow.target == "workflow 'single_turn'" and workflow.what.startswith("a/grpo/")
    await subject.fill(lease)
    assert (await subject.buffer.waiting()).waits == []


LONG = [Task.create("test", "x" * 100 + str(i), "x") for i in range(48)]


async def test_tasks_that_are_added_are_drawn_and_a_prompt_over_the_limit_is_dropped_and_replaced(make: Make) -> None:
    subject = make(ScriptedEngine(), tasks=spelling(2), sampler="sequential")
    short = Task.create("test", "Spell this word backward: 777", "x")
    assert await subject.buffer.add_tasks([LONG[0], short, LONG[1], *spelling(2)], 0) == 3
    await subject.begin()
    await subject.fill()
    assert (await subject.ledger()).dropped_tasks["prompt_too_long"] >= 2
    assert subject.explorer.flow.tasks.keys() == {task.id for task in [*spelling(2), *LONG[:2], short]}


async def test_prompts_refused_at_once_are_not_in_a_row_with_tasks_that_still_sample(make: Make) -> None:
    mixed = [task for pair in zip(spelling(48), LONG, strict=True) for task in pair]
    subject = make(ScriptedEngine(), tasks=mixed, sampler="sequential", **{"stages.grpo.batch_size": 96})
    exploring = await subject.begin()
    while (await subject.ledger()).dropped_tasks.get("prompt_too_long", 0) < 47:
        assert not exploring.done(), "none that samples has ended, and 47 were refused"
        await asyncio.sleep(0)
    await subject.engine.answer_one()
    assert not exploring.done()


TOO_LONG = r"32 consecutive groups failed.*too long: \d+ tokens, at most 3"


@register_workflow("broken")
class Broken:
    async def run(self, *_: Any) -> Any:
        raise KeyError("nothing here")


@pytest.mark.parametrize(
    ("reward", "overrides", "field", "cause", "reason", "dropped"),
    [
        (1.0, {"explorer.sampling.max_prompt_tokens": 3}, "explorer", TOO_LONG, "prompt_too_long", range(32, 36)),
        (1.0, {"explorer.workflow": "broken"}, "explorer", "'nothing here'", "workflow_error", range(32, 36)),
        (None, {}, "explorer", "the reward is unknown: away", "reward_unknown", range(64, 72)),
        (1.0, {"explorer.max_tries": 40}, "explorer.max_tries", "no row was kept", "zero_variance", range(80, 88)),
    ],
    ids=["prompts are too long", "the workflow raises", "rewards are unknown", "groups teach nothing"],
)
async def test_a_run_whose_groups_all_fail_ends_with_the_cause(
    reward: float | None, overrides: dict[str, Any], field: str, cause: str, reason: str, dropped: range, make: Make
) -> None:
    subject = make(QuickEngine(), Rewards(reward), **overrides)
    exploring = await subject.begin()
    with pytest.raises(RayrftError, match=cause, check=about(field)):
        await asyncio.wait_for(exploring, 60)
    trouble = (await subject.explorer.waiting()).trouble
    assert re.search(cause, f"32 consecutive groups failed: {trouble}") if field == "explorer" else not trouble
    ledger = await subject.ledger()
    [(found, count)] = {**ledger.dropped, **ledger.dropped_tasks}.items()
    assert found == reason and count in dropped and ledger.sampled == sum(ledger.dropped.values())


async def test_groups_that_succeeded_before_are_tried_until_a_service_is_back_or_away_for_long(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Service(Rewards):
        most = running = 0

        async def score(self, *asked: Any) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0)
            self.running -= 1
            return await super().score(*asked)

    monkeypatch.setattr("rayrft.explorer.group_flow._PAUSE_S", 0.0)
    service = Service(1.0)
    subject = make(QuickEngine(), service, **{"explorer.drop_zero_variance": False})
    exploring = await subject.begin()

    async def fail(groups: int) -> None:
        service.greedy, failed = None, (await subject.ledger()).dropped.get("reward_unknown", 0)
        while (await subject.ledger()).dropped.get("reward_unknown", 0) < failed + 2 * groups:
            assert not exploring.done()
            await asyncio.sleep(0)

    await subject.train(0)
    await fail(40)
    assert (await subject.explorer.waiting()).trouble == "the reward is unknown: away"
    service.most = 0
    await fail(10)
    assert service.most == 1, "groups are tried one by one"
    service.greedy = 1.0
    await asyncio.wait_for(subject.train(1), 60)
    assert not exploring.done() and not (await subject.explorer.waiting()).trouble
    monitor = subject.config.monitor.model_copy(update={"stall_s": 0.01})
    await subject.explorer.adjust(subject.config.model_copy(update={"monitor": monitor}))
    service.greedy = None
    with pytest.raises(RayrftError, match="consecutive groups failed; the last: the reward is unknown: away"):
        await asyncio.wait_for(exploring, 60)


async def test_after_groups_have_succeeded_prompts_that_are_too_long_end_a_run_and_broken_workflows_do_not(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrft.explorer.group_flow._PAUSE_S", 0.0)
    settings: dict[str, Any] = {"explorer.drop_zero_variance": False}
    tasks = [*spelling(4), *(Task.create("test", str(i), "x", workflow="broken") for i in range(40)), *LONG]
    subject = make(QuickEngine(), Rewards(1.0), tasks=tasks, sampler="sequential", **settings)
    exploring = await subject.begin()
    await subject.train(0)
    with pytest.raises(RayrftError, match=r"32 consecutive groups failed; the last: .*too long"):
        await asyncio.wait_for(exploring, 60)
    assert (await subject.ledger()).dropped_tasks["workflow_error"] == 40


def test_a_busy_clock_counts_overlapping_work_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = BusyClock()
    with clock:
        now = 1.0
        with clock:
            now = 3.0
        now = 4.0
        assert clock.take() == 4.0
    now = 9.0
    assert clock.take() == 0.0


async def test_added_tasks_that_two_groups_fetch_at_once_are_counted_once(make: Make) -> None:
    subject = make(ScriptedEngine(), tasks=spelling(2))
    for more in (4, 6):
        await subject.buffer.add_tasks(spelling(more), 0)
        new = spelling(more)[-2:]
        assert new == await asyncio.gather(*(subject.explorer.flow.task(Ticket(0, 0, 0, task.id)) for task in new))


@register_workflow("fails_late")
class FailsLate:
    """Of odd tasks the second attempt raises, of every fourth both do; of every eighth, one counts what has no name."""

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory:
        trajectory, number = model.start(task.messages), int(task.question[-3:])
        await trajectory.act()
        if number % 4 == 3:
            raise EnvironmentFailed("no way") if model.repeat else EnvironmentTimeout("no time")
        if number % 2 and model.repeat:
            raise KeyError("nothing here")
        if number % 8 == 5:
            trajectory.count(5)  # type: ignore[arg-type]
        return trajectory


async def test_what_fails_in_a_group_or_cannot_be_stored_is_in_the_ledger_with_its_reason(make: Make) -> None:
    settings = {"explorer.workflow": "fails_late", "explorer.drop_zero_variance": False}
    subject = make(QuickEngine(), sampler="sequential", **settings)
    await subject.begin(steps=3)
    for step in range(3):
        await subject.train(step)
    ledger = await subject.ledger()
    # Of the first 18 tasks 12 give rows: 3 of these one row of two.
    assert (ledger.trained, ledger.dropped) == (12 * 2 - 3, {"workflow_error": 3}) and ledger.sampled == 24
    assert ledger.dropped_tasks == {"timeout": 4, "workflow_error": 2} and ledger.closes
