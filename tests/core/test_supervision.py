"""The root cause comes first, whatever else fails in its wake."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from rayrft.core.supervision import Stopped, supervise, unless_stopped
from rayrft.errors import ActorDied, DataError, RayrftError, StorageError
from rayrft.runtime.handle import Watched, root_cause
from tests.errors import about


async def never() -> None:
    await asyncio.Event().wait()


async def test_the_result_comes_through() -> None:
    async def main() -> int:
        return 7

    assert await supervise(main(), {"engine": never()}) == 7


async def test_the_death_of_an_actor_ends_a_run_that_would_wait_for_ever() -> None:
    async def dies() -> None:
        raise ActorDied("gone", field="engine-1")

    with pytest.raises(ActorDied, check=about("engine-1")):
        await supervise(never(), {"engine-0": never(), "engine-1": dies()})


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


async def test_an_error_without_a_death_is_raised_as_it_is() -> None:
    async def main() -> None:
        raise DataError("no rows", field="tasks.path")

    with pytest.raises(DataError, check=about("tasks.path")):
        await supervise(main(), {"engine": never()})


def test_the_root_cause_is_found_under_groups() -> None:
    inner = DataError("no rows")
    assert root_cause(ExceptionGroup("many", [ExceptionGroup("more", [inner])])) is inner
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
    assert error.value.problem.endswith(
        "StorageError: journal-3: a line is damaged, because its checksum differs. Restore it"
    )
    assert "creation task" not in str(error.value)


async def test_why_an_actor_died_is_told_wherever_its_death_is_met(ray_cluster: Any) -> None:
    actor = ray.remote(Watched).options(num_cpus=0).remote()
    watch = actor.watch.remote()
    ray.kill(actor)
    with pytest.raises(RayActorError) as died:
        await watch
    error = root_cause(died.value, "engine-0")
    assert isinstance(error, ActorDied) and error.field == "engine-0" and "killed by `ray.kill`" in error.problem


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
