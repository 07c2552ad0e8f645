"""The janitor of a run. The run's actors outlive the process that starts it, and its Master, which Ray restarts: the
janitor ends them once the Master is dead for good. If the starting process dies, the run saves its weights before."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from typing import Any

from rayrft.core.placement import JANITOR, actor_name, clear_run
from rayrft.errors import ActorUnreachable
from rayrft.runtime import ray_api
from rayrft.runtime.handle import NAMESPACE, Handle, Watched, cancel_calls, fetch, find_actor, until_failed
from rayrft.runtime.ray_api import ray

_CALLED_S = 60.0
"""Time in which the process that starts the run makes its calls, and repeats them to a restarted janitor."""


class Janitor(Watched):
    """The actor. It ends with the run's other actors."""

    def __init__(self, run: str, deadline_s: float, called_s: float = _CALLED_S) -> None:
        """``deadline_s`` is the time that the run has to end once the process that started it has died. The process
        counts as dead, too, if it makes no call of `guard` for ``called_s``, as when it died together with the
        janitor's node."""
        self._run, self._deadline_s = run, deadline_s
        self._guarded = threading.Event()
        threading.Thread(target=self._unless_guarded, args=(called_s,), daemon=True).start()

    async def guard(self, started_by: list[Awaitable[None]]) -> None:
        """Wait until the process that starts the run has died: ``started_by`` holds a call of that process, which never
        returns. Let the run save its weights and end."""
        self._guarded.set()
        with contextlib.suppress(ray.exceptions.OwnerDiedError):
            await started_by[0]
        await asyncio.to_thread(self._end)

    async def attend(self, master: Handle[Watched]) -> None:
        """Wait until the Master is dead and Ray will not restart it."""
        with contextlib.suppress(*ray_api.ACTOR_DEATHS):
            await until_failed(master)
        await asyncio.to_thread(self._clear)

    def _unless_guarded(self, called_s: float) -> None:
        if not self._guarded.wait(called_s):
            self._end()

    def _end(self) -> None:
        """Ask the run to end, wait for it, if it has a Master, and clear it."""
        from rayrft.core.master import Master  # imports what few janitors need

        if (master := find_actor(name := actor_name(self._run, "master"))) is not None:
            # The run may fail, and the Master may be restarted, which has lost what it would run.
            with contextlib.suppress(ray.exceptions.RayError, ActorUnreachable):
                fetch(master.call(Master.stop), name, self._deadline_s)
                fetch(master.call(Master.run, []), name, self._deadline_s)
        self._clear()

    def _clear(self) -> None:
        own = actor_name(self._run, JANITOR)
        clear_run(self._run, spare=own)
        if (janitor := find_actor(own)) is not None:
            janitor.kill()


class Guard:
    """The janitor of a run, as the process that starts the run sees it."""

    def __init__(self, run: str, deadline_s: float) -> None:
        """Create the janitor, which Ray restarts with its calls. ``deadline_s`` is the time that the run has to end if
        this process dies."""
        options = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "name": actor_name(run, JANITOR)}
        repeated = {"max_restarts": -1, "max_task_retries": -1}
        actor = ray.remote(Janitor).options(**options, **repeated).remote(run, deadline_s)
        self._run, self._janitor = run, Handle[Janitor](JANITOR, actor)
        leash = self._janitor.call(Watched.watch)
        self._calls: list[Any] = [self._janitor.call(Janitor.guard, [leash]), leash]

    def attend(self, master: Handle[Watched]) -> None:
        """Have the run cleared once its Master is dead for good."""
        self._calls.append(self._janitor.call(Janitor.attend, master))

    def until_up(self) -> None:
        """Block until the janitor is on guard."""
        fetch(self._janitor.call(Watched.pid), actor_name(self._run, JANITOR))

    def end(self) -> None:
        """Cancel the calls, before the janitor is killed."""
        calls, self._calls = self._calls, []
        cancel_calls(calls)
