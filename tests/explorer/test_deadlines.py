"""Deadlines end what has run for so long, cost nobody else, and stand still while requests wait for an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop

from rayrft.explorer.deadlines import Expired, GroupDeadline
from rayrft.explorer.engines.exchange import Completion, Request, Session
from tests.explorer.attempts import Engines, roll_out, troubled


async def test_an_attempt_does_not_begin_when_its_groups_deadline_is_over() -> None:
    group, began = GroupDeadline(0.01), list[int]()
    for number in range(2):
        with pytest.raises(Expired), group.attempt(100.0, Session()):
            began.append(number)
            await asyncio.Event().wait()
    current = asyncio.current_task()
    assert began == [0] and group.expired and current and not current.cancelling()


async def test_a_repeat_that_hangs_ends_at_its_deadline(tiny_model: Path) -> None:
    rollout = await roll_out(tiny_model, Engines(), **troubled("hangs"), **{"explorer.deadline_s": 0.2})
    assert len(rollout.rows) == 1 and rollout.failed == {"timeout": 1}


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
async def test_waiting_for_an_engine_does_not_count_for_a_deadline(
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
        with contextlib.suppress(Expired), GroupDeadline(None).attempt(10.0, session):
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
            with group.attempt(0.05 + 0.0007 * number, Session()):
                await asyncio.Event().wait()

        async with asyncio.timeout(20):
            ended = await asyncio.gather(*map(attempt, range(8)), return_exceptions=True)
        assert all(isinstance(error, Expired) for error in ended)

    uvloop.run(hang())


async def test_at_a_groups_deadline_what_has_finished_is_kept(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time(monkeypatch)
    settings = {**troubled("hangs"), "explorer.deadline_s": 100.0, "explorer.group_deadline_s": 10.0}
    running = asyncio.create_task(roll_out(tiny_model, Engines(), n=3, **settings))
    await time.passes(9.9)
    assert not running.done()
    await time.passes(0.2)
    rollout = await running
    assert [row.repeat for row in rollout.rows] == ["0"] and rollout.failed == {"timeout": 2}
    assert all("explorer.group_deadline_s" in record.getMessage() for record in caplog.records)
