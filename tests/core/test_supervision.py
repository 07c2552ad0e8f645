"""The root cause comes first, whatever else fails in its wake."""

from __future__ import annotations

import asyncio

import pytest

from rayrft.core.supervision import root_cause, supervise
from rayrft.errors import ActorDied, DataError, RayrftError


async def never() -> None:
    await asyncio.Event().wait()


async def test_the_result_comes_through() -> None:
    async def main() -> int:
        return 7

    assert await supervise(main(), {"engine": never()}) == 7


async def test_the_death_of_an_actor_ends_a_run_that_would_wait_for_ever() -> None:
    async def dies() -> None:
        raise ActorDied("gone", field="engine-1")

    with pytest.raises(ActorDied, match="engine-1: gone"):
        await supervise(never(), {"engine-0": never(), "engine-1": dies()})


async def test_a_death_is_preferred_to_the_errors_that_follow_from_it() -> None:
    told = asyncio.Event()

    async def main() -> None:
        told.set()
        raise RayrftError("connection closed by peer")

    async def dies() -> None:
        await told.wait()
        raise ActorDied("gone", field="trainer")

    with pytest.raises(ActorDied, match="trainer: gone"):
        await supervise(main(), {"trainer": dies()})


async def test_an_error_without_a_death_is_raised_as_it_is() -> None:
    async def main() -> None:
        raise DataError("no rows", field="tasks.path")

    with pytest.raises(DataError, match=r"tasks\.path: no rows"):
        await supervise(main(), {"engine": never()})


def test_the_root_cause_is_found_under_groups() -> None:
    inner = DataError("no rows")
    assert root_cause(ExceptionGroup("many", [ExceptionGroup("more", [inner])])) is inner
    wrapped = root_cause(KeyError("x"), "explorer")
    assert isinstance(wrapped, ActorDied) and wrapped.field == "explorer" and "KeyError" in str(wrapped)
