"""The root cause comes first, whatever else fails after it; who is waited for too long is named, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from rayrft.core.supervision import StallMonitor, Stopped, quiet_waits, supervise, unless_stopped
from rayrft.errors import ActorDied, DataError, RayrftError, Stalled, StorageError
from rayrft.runtime.handle import Handle, TrackedHandle, Watched, fence, root_cause, until_restarted
from rayrft.runtime.stacks import is_stopped, look_at
from rayrft.runtime.waits import ROOM, Wait, WaitReport, Waits
from tests.errors import about
from tests.scripted import remote


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_death_is_preferred_to_the_errors_that_follow_from_it() -> None:
    told = asyncio.Event()

    async def main() -> None:
        told.set()
        raise RayrftError("connection closed by peer")

    async def dies() -> None:
        await told.wait()
        raise ActorDied("gone", field="trainer")

    with pytest.raises(ActorDied, check=about("trainer")):
        await supervise(main(), {"trainer": dies()})


async def test_the_loss_of_a_node_is_waited_for_where_a_call_could_not_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rayrft.core.supervision._GRACE_S", 0.0)

    async def main() -> None:
        raise ray.exceptions.ActorUnavailableError("the connection is lost", b"0" * 16)

    async def dies() -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        raise ActorDied("its node is lost", field="engine-0")

    with pytest.raises(ActorDied, check=about("engine-0")):
        await supervise(main(), {"engine-0": dies()})


def test_the_root_cause_is_found_under_groups() -> None:
    inner = DataError("no rows")
    assert root_cause(ExceptionGroup("many", [ExceptionGroup("more", [inner])])) is inner
    remote = ray.exceptions.RayTaskError("run", "Traceback …", inner).as_instanceof_cause()
    assert isinstance(remote, DataError) and root_cause(remote) is inner, "not its text, which is a traceback"
    trace = 'Traceback …\n  File "engine.py"\nlib.Refused: one fault\n  too long.\n'
    unsent = root_cause(ray.exceptions.RayTaskError("start", trace, LookupError(threading.Lock())), "engine-0")
    assert (unsent.field, unsent.problem) == ("engine-0", "lib.Refused: one fault too long"), "it cannot be pickled"
    wrapped = root_cause(KeyError("x"), "explorer")
    assert isinstance(wrapped, ActorDied) and wrapped.field == "explorer" and "KeyError" in str(wrapped)


class Damaged:
    """An actor that cannot be made."""

    def __init__(self) -> None:
        raise StorageError("a line is damaged, because its checksum differs", "restore it", field="journal-3")

    async def watch(self) -> None: ...


async def test_what_kept_an_actor_from_starting_is_told_and_not_rays_words_around_it(ray_cluster: Any) -> None:
    actor = ray.remote(Damaged).options(num_cpus=0).remote()
    with pytest.raises(ActorDied) as error:
        await supervise(never(), {"buffer": actor.watch.remote()})
    assert error.value.field == "buffer"
    damage = "a line is damaged, because its checksum differs. Restore it"
    assert error.value.problem.endswith(f"StorageError: journal-3: {damage}")
    assert "creation task" not in str(error.value)


async def test_why_an_actor_died_is_told_wherever_its_death_is_met(ray_cluster: Any) -> None:
    actor = ray.remote(Watched).options(num_cpus=0).remote()
    watch = actor.watch.remote()
    ray.kill(actor)
    with pytest.raises(RayActorError) as died:
        await watch
    error = root_cause(died.value, "engine-0")
    assert isinstance(error, ActorDied) and error.field == "engine-0" and "killed by `ray.kill`" in error.problem


async def test_an_actor_that_ray_restarts_has_died_when_its_process_ended_and_not_when_a_call_noticed(
    ray_cluster: Any,
) -> None:
    remote_class = ray.remote(Watched).options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
    actor = Handle[Watched]("reward-0", remote_class.remote())

    async def noticed() -> float:
        with pytest.raises(ray.exceptions.ActorUnavailableError):
            await actor.with_options(max_task_retries=0).call(Watched.watch)
        return time.monotonic()

    for _ in range(2):
        pid = await actor.call(Watched.pid)
        call, death = asyncio.ensure_future(noticed()), asyncio.ensure_future(until_restarted(actor, pid))
        for _ in range(3):  # its calls, each after an answer
            await actor.call(Watched.pid)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        cause, died = await death
        assert cause.field == "reward-0" and await actor.call(Watched.pid) != pid
        assert killed - 0.002 < died < await call, "Ray counts in milliseconds"
    actor.kill()


@pytest.mark.parametrize("error", [ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError])
def test_a_full_object_store_is_told_in_one_line_with_a_remedy(error: type[Exception]) -> None:
    for raised in (error("plasma\nTip"), ray.exceptions.RayTaskError("put", "Traceback …", error("plasma\nTip"))):
        cause = root_cause(raised, "buffer")
        assert cause.field == "buffer" and "object store is full" in cause.problem and "plasma" not in str(cause)
        assert "\n" not in str(cause) and ("lower buffer" in str(cause) or "free disk" in str(cause))


async def test_work_is_left_alone_when_the_user_stops_the_run() -> None:
    stop, left = asyncio.Event(), asyncio.Event()

    async def works() -> None:
        try:
            stop.set()
            await never()
        finally:
            left.set()

    with pytest.raises(Stopped):
        await unless_stopped(stop, works())
    assert left.is_set()


async def test_what_was_done_when_the_user_stopped_the_run_counts() -> None:
    stop = asyncio.Event()
    stop.set()

    async def works() -> int:
        return 7

    assert await unless_stopped(asyncio.Event(), works()) == 7
    done = asyncio.get_running_loop().create_future()
    done.set_exception(DataError("no rows"))
    with pytest.raises(DataError):
        await unless_stopped(stop, done)


class Part:
    """Answers when it is told to."""

    def __init__(self, waits: Waits | None = None) -> None:
        self.awake = asyncio.Event()
        self.awake.set()
        self.waits = waits

    async def waiting(self) -> WaitReport | None:
        await self.awake.wait()
        return self.waits.report() if self.waits is not None else None

    async def work(self) -> str:
        await self.awake.wait()
        return "done"


class Notes:
    """What was noted; ``come`` waits for so many."""

    def __init__(self) -> None:
        self.told: list[Sequence[dict[str, Any]]] = []
        self.texts: list[str] = []
        self._changed = asyncio.Condition()

    async def __call__(self, text: str, *, waiting: Sequence[dict[str, Any]] = ()) -> None:
        async with self._changed:
            self.told.append(waiting)
            self.texts.append(text)
            self._changed.notify_all()

    async def come(self, count: int) -> list[str]:
        """Who was named by then."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: len(self.told) >= count), 20)
        return [wait["target"] for waits in self.told for wait in waits]


async def test_an_actor_that_does_not_answer_is_named_again_when_the_time_has_doubled_and_ends_the_run() -> None:
    stopped, notes = Part(), Notes()
    stopped.awake.clear()
    monitor = StallMonitor(Waits("master"), {"fine": Part().waiting, "engine-0": stopped.waiting}, notes, 0.2, 1.0)
    monitor.stack = AsyncMock(return_value="attend (model.py:7) < run (model.py:2)")
    watching = asyncio.ensure_future(monitor.watch())
    assert await notes.come(3) == ["engine-0"] * 3
    assert all(text.endswith("; engine-0 is at attend (model.py:7) < run (model.py:2)") for text in notes.texts)
    seconds = [waits[0]["quiet_s"] for waits in notes.told]
    assert seconds[0] >= 0.2 and all(later >= 2 * earlier for earlier, later in itertools.pairwise(seconds))
    assert monitor.overdue and "engine-0" in monitor.overdue[0]
    with pytest.raises(Stalled, check=about("engine-0", "heartbeat")):
        await asyncio.wait_for(watching, 60)


async def test_an_actor_without_waits_is_asked_at_every_twelfth_poll() -> None:
    asked, enough = Counter[str](), asyncio.Event()

    def heartbeat(name: str, report: WaitReport | None) -> Any:
        async def answer() -> WaitReport | None:
            asked[name] += 1
            if asked["buffer"] == 25:
                enough.set()
            return report

        return answer

    silent = {f"engine-{index}": heartbeat(f"engine-{index}", None) for index in range(3)}
    beats = {**silent, "buffer": heartbeat("buffer", WaitReport([], 0.0))}
    watching = asyncio.ensure_future(StallMonitor(Waits("master"), beats, Notes(), 0.03, 60.0).watch())
    await asyncio.wait_for(enough.wait(), 20)
    watching.cancel()
    # The first poll asks all: nobody knows then who keeps waits.
    assert all(2 <= asked[name] <= 3 for name in silent)


async def test_an_actor_whose_write_waits_for_room_is_noted_at_once_and_not_killed() -> None:
    notes, killed, asked = Notes(), list[str](), asyncio.Semaphore(0)

    async def buffer() -> WaitReport:
        asked.release()
        return WaitReport([Wait("buffer", ROOM, "/runs/journal: 1.0 MB free", 1, 0.1)], 50.0)

    async def explorer() -> WaitReport:
        return WaitReport([Wait("explorer", "buffer", "put", 3, 50.0)], 50.0)

    monitor = StallMonitor(Waits("master"), {"buffer": buffer, "explorer": explorer}, notes, 0.2, 0.4)
    monitor.kill = lambda name: bool(killed.append(name))
    watching = asyncio.ensure_future(monitor.watch())
    assert await notes.come(1) == [ROOM, "buffer"]
    assert "buffer waits for room to write (/runs/journal: 1.0 MB free)" in notes.texts[0]
    for _ in range(3):
        await asyncio.wait_for(asked.acquire(), 20)
    assert not killed and not watching.done() and "1.0 MB free" in monitor.overdue[0]
    watching.cancel()


async def test_trouble_of_an_actor_is_noted_once_whenever_it_begins() -> None:
    notes, troubles, over = Notes(), iter(["status 1", "status 1", "", "status 2", "status 2"]), asyncio.Event()

    async def explorer() -> WaitReport:
        trouble = next(troubles, None)
        if trouble is None:
            over.set()
        return WaitReport([], 0.0, trouble=trouble or "")

    watching = asyncio.ensure_future(StallMonitor(Waits("master"), {"explorer": explorer}, notes, 0.03, 60.0).watch())
    await asyncio.wait_for(over.wait(), 20)
    watching.cancel()
    assert notes.texts == ["explorer: no group succeeds: status 1", "explorer: no group succeeds: status 2"]


async def test_an_actor_that_a_signal_has_stopped_is_killed_long_before_a_silent_one(ray_cluster: Any) -> None:
    actors = {name: Handle(name, ray.remote(Watched).options(num_cpus=0).remote()) for name in ("stopped", "hangs")}
    pids, killed = {name: await each.call(Watched.pid) for name, each in actors.items()}, asyncio.Queue[str]()
    beats = {"stopped": lambda: actors["stopped"].call(Watched.pid), "hangs": never}
    monitor = StallMonitor(Waits("master"), beats, AsyncMock(), 3.0, 3600.0, 3600.0)
    monitor.stopped = lambda name: look_at(actors[name], is_stopped)

    def kill(name: str) -> bool:
        killed.put_nowait(name)
        actors[name].kill()
        return True

    monitor.kill = kill
    watching = asyncio.ensure_future(monitor.watch())
    os.kill(pids["stopped"], signal.SIGSTOP)
    with monitor.waits.on("stopped", "an answer"):  # else it is asked at every twelfth poll
        assert await asyncio.wait_for(killed.get(), 60) == "stopped"
    await actors["hangs"].call(Watched.pid)
    await fence(actors["stopped"])
    assert killed.empty() and not watching.done()
    watching.cancel()
    actors["hangs"].kill()


async def test_a_heartbeat_that_fails_is_left_to_those_who_watch_the_actor() -> None:
    asked = asyncio.Semaphore(0)

    async def heartbeat() -> None:
        asked.release()
        raise RayTaskError("waiting", "its traceback", RuntimeError("vLLM's core has ended"))

    watching = asyncio.ensure_future(
        StallMonitor(Waits("master"), {"engine-0": heartbeat}, Notes(), 0.03, 60.0).watch()
    )
    for _ in range(2):
        await asyncio.wait_for(asked.acquire(), 20)
    assert not watching.done()
    watching.cancel()


async def test_an_actor_that_loads_is_starting_and_one_that_has_been_up_makes_no_progress() -> None:
    loading, notes, waits = Part(), Notes(), Waits("master")
    loading.awake.clear()
    monitor = StallMonitor(waits, {"engine-0": loading.waiting}, notes, 0.2, 60.0)
    monitor.starting = True
    watching = asyncio.ensure_future(monitor.watch())
    assert await notes.come(1) == ["engine-0"]
    assert re.match(r"still starting after \d+ s: engine-0 \(heartbeat\)", notes.texts[0])
    monitor.starting = False
    with waits.on("trainer", "train"):
        await notes.come(2)
    assert notes.texts[1].startswith("no progress: master waits for ")
    watching.cancel()


async def test_a_start_is_told_with_its_time_and_what_is_done_and_not_ended_while_the_memory_grows(
    clock: list[float],
) -> None:
    notes, waits, quiet, killed = Notes(), Waits("master"), [0.0], list[str]()

    async def loading() -> WaitReport:
        return WaitReport([], quiet[0], "loads the model since 12:00:00, 3.2 GB in memory")

    monitor = StallMonitor(waits, {"engine-0": loading}, notes, 0.02, 0.02)
    monitor.kill = lambda name: killed.append(name) is None
    monitor.starting = True
    with waits.on("engine-0", "start"):
        for clock[0] in (0.01, 0.03, 90.0):  # both bounds are shorter
            await monitor.poll()
            assert not notes.texts and not killed
        quiet[0] = 60.0
        await monitor.poll()
    (text,) = notes.texts
    assert text.startswith("still starting after 90 s: ")
    assert text.endswith("engine-0 (start: loads the model since 12:00:00, 3.2 GB in memory)")
    assert killed == ["engine-0"]


async def test_who_waits_is_named_behind_whom_it_waits_for() -> None:
    engine, notes = Part(), Notes()
    engine.awake.clear()
    inner, master = Waits("explorer"), Waits("master")
    explorer = Part(inner)
    rollout = TrackedHandle(remote(engine, "engine-0"), inner).call(Part.work)
    evaluation = TrackedHandle(remote(engine, "explorer"), master).call(Part.work)
    monitor = StallMonitor(master, {"explorer": explorer.waiting}, notes, 0.2, 60.0)
    watching = asyncio.ensure_future(monitor.watch())
    await notes.come(1)
    told = [(wait["waiter"], wait["target"], wait["what"]) for wait in notes.told[0]]
    assert told[0] == ("explorer", "engine-0", "work")
    engine.awake.set()
    assert (await rollout, await evaluation) == ("done", "done")
    assert not inner.report().waits and not master.report().waits
    watching.cancel()


def test_who_waits_for_a_part_to_which_something_comes_sees_it_move() -> None:
    own = WaitReport([Wait("master", "explorer", "evaluate", 1, 300.0)], 0.0)
    answers = Wait("explorer", "engine-0", "generate", 8, 2.0)
    [engine, explorer] = quiet_waits([own], {"explorer": WaitReport([answers], 2.0)})
    assert (engine, explorer.quiet_s) == (answers, 2.0)
    [alone] = quiet_waits([own], {})
    assert alone.quiet_s == 300.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("rayrft.runtime.waits.time.monotonic", lambda: now[0])
    return now


def test_what_comes_of_a_target_moves_it_and_no_other(clock: list[float]) -> None:
    waits = Waits("explorer")
    with contextlib.ExitStack() as others:
        with waits.on("a", "1"):
            others.enter_context(waits.on("a", "2"))
            others.enter_context(waits.on("b", lambda: "one of two"))
            clock[0] = 10.0
        clock[0] = 15.0
        expected = [Wait("explorer", "a", "2", 1, 5.0), Wait("explorer", "b", "one of two", 1, 15.0)]
        assert waits.report() == WaitReport(expected, 5.0)
        waits.progressed("b")
        assert [wait.quiet_s for wait in waits.report().waits] == [5.0, 0.0]


def test_own_work_is_moved_by_whatever_comes(clock: list[float]) -> None:
    waits = Waits("explorer")
    with waits.on("workflow 'chat'", "group 1", internal=True):
        clock[0] = 30.0
        with waits.on("engine-0", "generate"):
            assert [wait.target for wait in waits.report().waits] == ["engine-0", "workflow 'chat'"]
            clock[0] = 40.0
        clock[0] = 42.0
        assert waits.report() == WaitReport([Wait("explorer", "workflow 'chat'", "group 1", 1, 2.0)], 2.0)
    assert waits.report().waits == []


async def test_calls_that_may_rest_are_no_waits() -> None:
    asleep, waits = Part(), Waits("explorer")
    asleep.awake.clear()
    call = TrackedHandle(remote(asleep, "buffer"), waits, endless=[Part.work]).call(Part.work)
    assert waits.report().waits == []
    asyncio.ensure_future(call).cancel()
