"""What an actor that does not progress is doing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import psutil
import pytest
import ray

from rayrft.runtime.handle import Handle, Watched, fence
from rayrft.runtime.stacks import dump, is_stopped, look_at


class Stuck(Watched):
    async def hang(self) -> None:
        self.wait_for_a_neighbour()

    async def begin(self, *, own_session: bool) -> int:
        """Start a child process; return its id."""
        return (await asyncio.create_subprocess_exec("sleep", "600", start_new_session=own_session)).pid

    def wait_for_a_neighbour(self) -> None:
        threading.Event().wait()


@pytest.mark.usefixtures("ray_cluster")
async def test_a_stack_shows_where_an_actor_hangs_also_one_that_was_stopped_and_nothing_of_one_without_a_process() -> (
    None
):
    actor: Handle[Stuck] = Handle("stuck", ray.remote(Stuck).options(num_cpus=0).remote())
    pid = await actor.call(Watched.pid)
    assert await look_at(actor, dump) == "", "it waits for work"
    actor.call(Stuck.hang)
    while not (stack := await look_at(actor, dump)):
        pass
    os.kill(pid, signal.SIGSTOP)
    assert await look_at(actor, dump) == stack
    calls = stack.split(" < ")
    assert [call.partition(" (")[0] for call in calls[-2:]] == ["Stuck.wait_for_a_neighbour", "Stuck.hang"]
    assert all("threading.py" in call for call in calls[:-2]), "how Ray called it is of no interest"
    await fence(actor)  # Ray ends a process that was stopped some seconds later
    assert await look_at(actor, dump) is None
    waits: Handle[Stuck] = Handle("waits", ray.remote(Stuck).options(num_cpus=1000).remote())
    assert await look_at(waits, dump) is None, "it has no process yet"
    waits.kill()


@pytest.mark.usefixtures("ray_cluster")
async def test_an_actor_is_stopped_with_its_process_or_a_child_of_its_session_but_not_with_a_program_it_runs() -> None:
    actor: Handle[Stuck] = Handle("stuck", ray.remote(Stuck).options(num_cpus=0).remote())
    program, core = [await actor.call(Stuck.begin, own_session=own) for own in (True, False)]
    try:
        for pid, stopped in [(program, False), (core, True), (await actor.call(Watched.pid), True)]:
            for number, found in [(signal.SIGSTOP, stopped), (signal.SIGCONT, False)]:
                os.kill(pid, number)
                while (psutil.Process(pid).status() == psutil.STATUS_STOPPED) != (number == signal.SIGSTOP):
                    pass
                assert await look_at(actor, is_stopped) == found
    finally:
        for pid in (program, core):
            os.kill(pid, signal.SIGKILL)
    await fence(actor)
    assert await look_at(actor, is_stopped) is None
