"""The janitor of a run. The run's actors outlive the process that starts it, and its Master, which Ray restarts: the
janitor ends them once the Master is dead for good. If the starting process dies, the run saves its weights before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

from rayrft.core.placement import JANITOR, NAMESPACE, actor_name, clear_run, find_actor
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, Watched, fetch, until_failed
from rayrft.runtime.ray_api import ray

_CANCEL_S = 5.0


class Janitor(Watched):
    """The actor. Both of its tasks end with the run's actors, and its own process."""

    async def guard(self, run: str, started_by: list[Awaitable[None]], deadline_s: float) -> None:
        """Wait until the process that starts the run has died: ``started_by`` holds a call of that process, which never
        returns. Let the run save its weights and end, within the deadline."""
        with contextlib.suppress(ray.exceptions.OwnerDiedError):
            await started_by[0]
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # such as the error with which the run fails
            await asyncio.wait_for(self._stop(run), deadline_s)
        await self._clear(run)

    async def attend(self, run: str, master: Handle[Watched]) -> None:
        """Wait until the Master is dead and Ray will not restart it."""
        with contextlib.suppress(*ray_api.ACTOR_DEATHS):
            await until_failed(master)
        await self._clear(run)

    async def _stop(self, run: str) -> None:
        """Ask the run to end, and wait for it, if it has a Master."""
        from rayrft.core.master import Master  # imports what few janitors need

        if (master := await asyncio.to_thread(find_actor, actor_name(run, "master"))) is not None:
            await master.call(Master.stop)
            await master.call(Master.run, [])

    async def _clear(self, run: str) -> None:
        await asyncio.to_thread(clear_run, run, spare=actor_name(run, JANITOR))
        ray.actor.exit_actor()


class Guard:
    """The janitor of a run, as the process that starts the run sees it."""

    def __init__(self, run: str, deadline_s: float) -> None:
        """Create the janitor, which Ray restarts with its calls. ``deadline_s`` is the time that the run has to end if
        this process dies."""
        options = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
        repeated = {"max_restarts": -1, "max_task_retries": -1}
        actor = ray.remote(Janitor).options(name=actor_name(run, JANITOR), **options, **repeated).remote()
        self._run, self._janitor = run, Handle[Janitor](JANITOR, actor)
        leash = self._janitor.call(Watched.watch)
        self._calls: list[Any] = [self._janitor.call(Janitor.guard, run, [leash], deadline_s), leash]

    def attend(self, master: Handle[Watched]) -> None:
        """Have the run cleared once its Master is dead for good."""
        self._calls.append(self._janitor.call(Janitor.attend, self._run, master))

    def until_up(self) -> None:
        """Block until the janitor is on guard."""
        fetch(self._janitor.call(Watched.pid), actor_name(self._run, JANITOR))

    def end(self) -> None:
        """Cancel the calls, before the janitor is killed: Ray would print that it repeats them."""
        calls, self._calls = self._calls, []
        for call in calls:
            ray.cancel(call)
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=_CANCEL_S)
