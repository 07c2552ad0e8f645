"""The janitor of a run. The actors outlive their Master, because Ray restarts it: the janitor ends them once the Master
is dead for good, as when the process that started the run has died."""

from __future__ import annotations

import asyncio
import contextlib

from rayrft.core.placement import JANITOR, NAMESPACE, actor_name, clear_run
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, Watched, until_failed
from rayrft.runtime.ray_api import ray


class Janitor(Watched):
    """The actor."""

    async def guard(self, run: str, master: Handle[Watched]) -> None:
        """Wait until the Master is dead and Ray will not restart it; then kill the run's actors, and exit."""
        with contextlib.suppress(*ray_api.ACTOR_DEATHS):
            await until_failed(master)
        await asyncio.to_thread(clear_run, run, spare=actor_name(run, JANITOR))
        ray.actor.exit_actor()


def hire_janitor(run: str, master: Handle[Watched]) -> None:
    """Create the janitor of a run, which this process has started: Ray restarts it, and repeats the call below."""
    options = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    repeated = {"max_restarts": -1, "max_task_retries": -1}
    actor = ray.remote(Janitor).options(name=actor_name(run, JANITOR), **options, **repeated).remote()
    Handle[Janitor](JANITOR, actor).call(Janitor.guard, run, master)
