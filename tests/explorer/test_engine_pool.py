"""Who is a member."""

from __future__ import annotations

import asyncio

import pytest

from rayrft.errors import WeightSyncError
from rayrft.explorer.engines.pool import EnginePool, Member
from tests.errors import about
from tests.scripted import remote


async def test_the_long_poll_answers_when_the_membership_changes_and_not_before() -> None:
    pool = EnginePool()
    first = await pool.members()
    later = asyncio.create_task(pool.members(first.generation))
    await asyncio.sleep(0)
    await pool.synced(["engine-0"], 7)
    assert not later.done(), "a new version is no change of members"
    await pool.join([Member(remote(None, "engine-0"), 3), Member(remote(None, "engine-1"), 3)])
    second = await later
    assert second.names == ("engine-0", "engine-1") and second.generation == first.generation + 1
    await pool.synced(["engine-1", "engine-9"], 4)
    assert [member.version for member in (await pool.members()).members] == [3, 4]
    await pool.leave("engine-9", "never was one")
    assert (await pool.members()).generation == second.generation
    await pool.leave("engine-0", "scaled down")
    third = await pool.members(second.generation)
    assert third.names == ("engine-1",) and third.generation == second.generation + 1
    with pytest.raises(WeightSyncError, check=about("engine-1")):
        await pool.join([Member(remote(None, "engine-0"), 4), Member(remote(None, "engine-1"), 4)])
    assert (await pool.members()) == third, "none of a refused change is made"
