"""Objects in processes of their own: whatever they do, the parent goes on, and nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from rayrft.config.reward import RewardModelsConfig
from rayrft.errors import AnswerTooLarge, CallFailed, CallTimeout, ProcessDied
from rayrft.rewards.scorer import RewardActor
from rayrft.runtime.handle import Watched
from rayrft.runtime.processes import template
from rayrft.runtime.processes.pool import ProcessPool
from rayrft.runtime.processes.run_clock import Usage
from tests.conftest import ROOT
from tests.runtime.in_processes import Troublemaker

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def pool_of(create: Callable[[], Any] = Troublemaker, **options: Any) -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(create, **{"processes": 2, "spares": 0, "start_s": 20.0, **options})
    try:
        yield pool
    finally:
        await pool.close()


async def take(pool: ProcessPool) -> None:
    async with pool.lease():
        pass


@pytest.fixture(scope="module")
async def pool() -> AsyncIterator[ProcessPool]:
    """One of a single process, which tests share: a pool takes longer to start than most of them."""
    async with pool_of(processes=1) as pool:
        yield pool


async def test_processes_see_no_variables_that_may_hold_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "DATABASE_URL", "CUDA_API_KEY"]
    shown = ["PATH", "HF_HOME", "LC_ALL", "TOKENIZERS_PARALLELISM", "https_proxy", "SEARCH_KEY"]
    for name in [*hidden, *shown]:
        monkeypatch.setenv(name, os.environ.get(name, "C"))
    monkeypatch.setenv("RAYRFT_PASS_ENV", "SEARCH_KEY,OTHER")
    async with pool_of() as pool, pool.lease() as process:
        seen = [name for name in [*hidden, *shown] if await process.call("variable", name, deadline_s=20) is not None]
        assert seen == shown
    async with pool_of(inherit=True) as pool, pool.lease() as process:
        assert await process.call("variable", "HF_TOKEN", deadline_s=20) == os.environ["HF_TOKEN"]


class Scorer:
    """An actor whose code runs in a process."""

    async def visible(self) -> str | None:
        async with pool_of() as pool, pool.lease() as process:
            seen: str | None = await process.call("variable", "CUDA_VISIBLE_DEVICES", deadline_s=20)
            return seen


class Here(Watched):
    """An actor that looks when it is made."""

    def __init__(self) -> None:
        self._seen = os.environ.get("CUDA_VISIBLE_DEVICES")

    async def visible(self) -> str | None:
        return self._seen


class Rewards(RewardActor):
    """A reward actor, whose rewards may run in it."""

    def __init__(self) -> None:
        super().__init__(RewardModelsConfig(), [])

    async def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


async def test_an_actor_and_its_processes_see_the_gpus_of_the_actor_and_no_other(ray_cluster: Any) -> None:
    kinds: list[Any] = [Scorer, Here, Rewards]
    actors = [ray.remote(kind).options(num_cpus=0, num_gpus=gpus).remote() for gpus in (0, 0.3) for kind in kinds]
    seen = await asyncio.gather(*(actor.visible.remote() for actor in actors))
    assert seen[:3] == [""] * 3 and {*seen[3:]} <= {"0", "1", "2", "3"}
    for actor in actors:
        ray.kill(actor)


async def gone(pid: int) -> None:
    """Wait for the end of a process that is not a child of this one."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert await asyncio.to_thread(poll.poll, 20_000), f"process {pid} lives on"
    os.close(fd)


@pytest.mark.parametrize(
    ("method", "arguments", "error", "says"),
    [
        ("exit", (3,), ProcessDied, "exit code 3"),
        ("exit", (0,), ProcessDied, "exit code 0"),
        ("signal", (signal.SIGSEGV,), ProcessDied, "SIGSEGV"),
        ("signal", (signal.SIGKILL,), ProcessDied, "SIGKILL"),
        ("hang", (), CallTimeout, "0.3 s"),
        ("large", (10 << 20,), AnswerTooLarge, "found 10485"),
        ("close_its_socket", (), ProcessDied, "SIGKILL"),
        ("close_its_socket", (b"\xff" * 8,), AnswerTooLarge, "found 18446744073709551615"),
        ("close_its_socket", (b"\x04" + bytes(7) + b"\x80\x04N.",), CallFailed, "invalid"),
        ("returns_bomb", (), CallFailed, "cannot be unpickled"),
    ],
)
async def test_a_process_that_cannot_be_trusted_any_more_is_replaced_and_what_it_started_dies_with_it(
    method: str, arguments: tuple[Any, ...], error: type[CallFailed], says: str, pool: ProcessPool
) -> None:
    async with pool.lease() as worker:
        pids = [await worker.call(of, deadline_s=20) for of in ("pid", "leak_process", "leak_daemon")]
        with pytest.raises(CallFailed, match=says) as raised:
            await worker.call(method, *arguments, deadline_s=0.3 if method == "hang" else 20)
        assert type(raised.value) is error and method in str(raised.value)
        with pytest.raises(ProcessDied, match="earlier"):
            await worker.call("pid", deadline_s=20)
        for pid in pids:
            await gone(pid)
    async with pool.lease() as worker:
        assert await worker.call("pid", deadline_s=20) not in pids


@pytest.mark.parametrize(("method", "says"), [("raises", "Unpicklable: noway"), ("returns_unpicklable", "pickle")])
async def test_an_error_is_told_and_its_process_goes_on(method: str, says: str, pool: ProcessPool) -> None:
    async with pool.lease() as worker:
        pid = await worker.call("pid", deadline_s=20)
        with pytest.raises(CallFailed, match=says) as raised:
            await worker.call(method, deadline_s=20)
        assert "Traceback" in raised.value.__notes__[0]
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            await worker.call("count", lambda: None, deadline_s=20)
        assert await worker.call("count", deadline_s=20) == 1, "arguments that cannot be sent change nothing"
    async with pool.lease() as worker:
        assert await worker.call("pid", deadline_s=20) == pid
        assert await worker.call("count", deadline_s=20) == 1, "an object of its own"


async def test_what_a_process_prints_or_imports_is_its_own_affair(pool: ProcessPool) -> None:
    async with pool.lease() as worker:
        assert await worker.call("print_garbage", deadline_s=20) == "fine"
        assert await worker.call("count", deadline_s=20) == 1
        assert len(await worker.call("sockets", deadline_s=20)) == 1, "a process has no socket but its own"
        assert await worker.call("modules", deadline_s=20) == []


@pytest.mark.parametrize("leak", ["leak_thread", "leak_process", "leak_daemon"])
async def test_who_leaves_threads_or_processes_behind_is_replaced_with_them(leak: str, pool: ProcessPool) -> None:
    async with pool.lease() as worker:
        pid, leaked = await worker.call("pid", deadline_s=20), await worker.call(leak, deadline_s=20)
    async with pool.lease() as worker:
        assert await worker.call("pid", deadline_s=20) != pid
    for each in filter(None, [pid, leaked]):
        await gone(each)


async def test_who_leaves_a_thread_behind_that_asks_cannot_be_called_again(pool: ProcessPool, tmp_path: Path) -> None:
    os.mkfifo(told := tmp_path / "told")

    async def asked(name: str) -> None:
        await asyncio.to_thread(told.write_text, name)
        await asyncio.Event().wait()

    async with pool.lease() as worker:
        await worker.call("leave_asking", str(told), deadline_s=20, serve=asked)
        # The next call's message would be read by the thread, for the reply that it waits for.
        with pytest.raises(ProcessDied, match="earlier"):
            await worker.call("pid", deadline_s=20)


async def test_a_thread_that_asks_and_one_that_waits_for_a_call_read_what_is_theirs() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as ending:
        ending.callback(ours.shutdown, socket.SHUT_RDWR)  # else threads that read would be waited for
        process, parent, arrivals = template.Parent(theirs), template.Parent(ours), select.poll()
        arrivals.register(ours, select.POLLIN)
        for number in range(1, 21):
            asking = threads.submit(process.ask, "question")
            assert parent.receive().number == number
            waiting = threads.submit(process.call)
            arrivals.poll(20)  # time for both to read, if both did
            parent.send(template.Reply(number, pickle.dumps("answer")))
            parent.send(("method", ("argument",)))
            assert asking.result(20) == "answer" and waiting.result(20) == ("method", ("argument",))


async def test_the_deadline_is_suspended_while_the_object_waits_for_answers_and_starts_again(pool: ProcessPool) -> None:
    async def serve(name: str) -> str:
        await asyncio.sleep(1.2 if name == "late" else 0)
        return name

    async with pool.lease() as worker:
        assert await worker.call("ask_twice", deadline_s=1.0, serve=serve) == ["soon", "late"]


async def test_the_priority_of_a_process_is_lowered_with_that_of_its_threads_and_all_that_it_has_started() -> None:
    async with pool_of() as pool, pool.lease() as worker, pool.lease() as other:
        await worker.call("leak_thread", deadline_s=20)
        children = [await worker.call(leak, deadline_s=20) for leak in ("leak_process", "leak_daemon")]
        worker.lower_priority()
        threads = [int(thread) for pid in (worker.pid, *children) for thread in os.listdir(f"/proc/{pid}/task")]
        assert len(threads) >= 4 and {os.getpriority(os.PRIO_PROCESS, each) for each in threads} == {19}
        assert os.getpriority(os.PRIO_PROCESS, await worker.call("leak_process", deadline_s=20)) == 19
        assert os.getpriority(os.PRIO_PROCESS, other.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert _session_has_low_priority(worker.pid) and _session_has_low_priority(children[1])
        worker.kill()
        await gone(worker.pid)
        worker.lower_priority()  # too late, and nobody minds


def _session_has_low_priority(pid: int) -> bool:
    """Return whether the process's session has low priority, if the kernel shares out time by session."""
    autogroup = Path(f"/proc/{pid}/autogroup")
    return not autogroup.exists() or autogroup.read_text().split()[-1:] in ([], ["19"])


async def test_a_wait_for_a_core_makes_no_call_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that always waits for a core is given its time; one that could run and does nothing is not."""
    monkeypatch.setattr("rayrft.runtime.processes.worker._LOOK_S", 0.05)
    waits, measure = [True], Usage.of
    monkeypatch.setattr(
        Usage, "of", lambda *_, **__: Usage(waited_s=time.monotonic()) if waits[0] else measure(os.getpid())
    )
    async with pool_of() as pool, pool.lease() as worker, pool.lease() as other:
        assert await worker.call("nap", 0.5, deadline_s=0.1) == "rested"
        late = asyncio.ensure_future(worker.call("hang", deadline_s=0.1))
        await asyncio.sleep(0)
        waits[0] = False
        with pytest.raises(CallTimeout, match=r"not done within 0\.1 s"):
            await late
        assert await other.call("count", deadline_s=20) == 1


async def test_a_cancelled_call_costs_its_process_and_no_other(pool: ProcessPool) -> None:
    async with pool.lease() as worker:
        pid = await worker.call("pid", deadline_s=20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await worker.call("hang", deadline_s=20)
        await gone(pid)
    async with pool.lease() as worker:
        assert await worker.call("count", deadline_s=20) == 1


@pytest.mark.parametrize(
    ("trouble", "says"), [("die", "exit code 5"), ("raise", "no room"), ("hang", "0.3 s"), ("", "division by zero")]
)
async def test_an_object_that_cannot_be_created_or_imported_fails_every_lease_that_waits(
    trouble: str, says: str, tmp_path: Path
) -> None:
    (plugin := tmp_path / "plugin.py").write_text("" if trouble else "1 / 0")
    limits = {"start_s": 0.3 if trouble == "hang" else 20.0, "plugins": [plugin]}
    async with pool_of(partial(Troublemaker, trouble), spares=2, **limits) as pool:
        outcomes = await asyncio.gather(*(take(pool) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(outcome, CallFailed) and says in str(outcome) for outcome in outcomes)


async def test_classes_of_plugins_are_known_in_the_processes(tmp_path: Path) -> None:
    from rayrft.registry import load_plugins

    plugin = tmp_path / "classes_of_own.py"
    plugin.write_text("class Own:\n    def name(self):\n        return __name__\n")
    load_plugins([plugin])
    [module] = [module for name, module in sys.modules.items() if name.startswith("rayrft_plugin_classes_of_own")]
    async with pool_of(module.Own, plugins=[plugin]) as pool, pool.lease() as worker:
        assert await worker.call("name", deadline_s=20) == module.__name__


async def test_many_calls_on_few_processes_all_end() -> None:
    most, running = 0, 0
    async with pool_of(processes=4) as pool:

        async def attempt(number: int) -> str:
            nonlocal most, running
            async with pool.lease() as worker:
                running += 1
                most = max(most, running)
                try:
                    assert await worker.call("count", deadline_s=20) == 1
                    if number % 7 == 0:
                        await worker.call("exit", 1, deadline_s=20)
                except ProcessDied as error:
                    return str(error)
                finally:
                    running -= 1
                return "fine"

        outcomes = await asyncio.gather(*map(attempt, range(200)))
    died = {number: outcome for number, outcome in enumerate(outcomes) if outcome != "fine"}
    assert died == dict.fromkeys(range(0, 200, 7), "exit: its process ended (found 'exit code 1').") and most <= 4


async def test_who_stops_waiting_for_a_process_takes_none(pool: ProcessPool) -> None:
    async with pool.lease():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), pool.lease():
                pass
    async with pool.lease() as worker:
        assert await worker.call("count", deadline_s=20) == 1


class Announced:
    """Writes its pid into a pipe when it is created."""

    def __init__(self, fifo: Path) -> None:
        with open(fifo, "a") as file:
            file.write(f"{os.getpid()}\n")

    def pid(self) -> int:
        return os.getpid()


async def test_a_spare_is_there_before_it_is_asked_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "created")
    async with pool_of(partial(Announced, tmp_path / "created"), processes=2, spares=1) as pool:
        with os.fdopen(os.open(tmp_path / "created", os.O_RDWR)) as created:

            async def next_one() -> int:
                return int(await asyncio.wait_for(asyncio.to_thread(created.readline), 20))

            async with pool.lease() as first:
                both = {await next_one(), await next_one()}
                pid = await first.call("pid", deadline_s=20)
                async with pool.lease() as second:
                    assert {pid, await second.call("pid", deadline_s=20)} == both


async def test_the_end_of_the_template_ends_its_processes_and_another_takes_its_place(pool: ProcessPool) -> None:
    async with pool.lease() as worker:
        pid = await worker.call("pid", deadline_s=20)
        os.kill(await worker.call("parent", deadline_s=20), signal.SIGKILL)
        await gone(pid)
        with pytest.raises(ProcessDied):
            await worker.call("pid", deadline_s=20)
    async with pool.lease() as worker:
        assert await worker.call("count", deadline_s=20) == 1


PARENT = """
import asyncio, sys
from rayrft.runtime.processes.pool import ProcessPool
from tests.runtime.in_processes import Troublemaker

async def main():
    pool = ProcessPool(Troublemaker, processes=2)
    async with pool.lease() as worker:
        leaked = await worker.call("leak_daemon", deadline_s=20)
        print(await worker.call("pid", deadline_s=20), leaked, flush=True)
        await worker.call("hang", deadline_s=1000)

asyncio.run(main())
"""


async def test_nothing_outlives_a_parent_that_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    parent.kill()
    await parent.wait()
    for pid in pids:
        await gone(pid)


async def test_a_closed_pool_has_no_processes_and_gives_none() -> None:
    pool = ProcessPool(Troublemaker, processes=1)
    async with pool.lease() as worker:
        pid = await worker.call("pid", deadline_s=20)
        waiting = asyncio.ensure_future(take(pool))
        await asyncio.sleep(0)
        await pool.close()
        await gone(pid)
        for call in (worker.call("pid", deadline_s=20), waiting, take(pool)):
            with pytest.raises(ProcessDied):
                await call
