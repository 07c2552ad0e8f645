"""An engine whose core, which is a stand-in here, is killed, paused, or fails while it receives weights."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rayrft.errors import ActorDied, ModelError
from rayrft.explorer.engines.engine import RolloutEngine
from tests.errors import about


class StandIn:
    """vLLM's client over the processes of a core; pausing takes until it is told to end."""

    def __init__(self, cores: Sequence[Any] = ()) -> None:
        self.paused, self.drained = False, asyncio.Event()
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=cores)))

    async def pause_generation(self, **_: Any) -> None:
        await self.drained.wait()
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[str]:
        raise ConnectionError("the sender is gone")


async def test_an_engine_whose_core_is_killed_says_so_whatever_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for core in cores:
        core.start()
    context = SimpleNamespace(get_actor_name=lambda: "run:engine-1", get_actor_id=lambda: None)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    engine = RolloutEngine()
    engine._engine = StandIn(cores)
    engine._watch_core()
    watching = asyncio.ensure_future(engine.watch())
    await asyncio.sleep(0)
    assert not watching.done()
    cores[1].kill()
    with pytest.raises(ActorDied, check=about("engine-1")):
        await asyncio.wait_for(watching, 30)
    cores[0].kill()


async def test_a_cache_with_images_of_the_old_weights_is_not_kept() -> None:
    engine = RolloutEngine()
    engine._engine, engine._images = StandIn(), object()
    with pytest.raises(ModelError, check=about("weight_sync.kv_cache")):
        await engine.pause(keep_cache=True)


async def test_an_engine_is_left_paused_by_a_transfer_that_fails_and_not_by_a_resume_that_is_early() -> None:
    engine, core = RolloutEngine(), StandIn()
    engine._engine = core
    pausing, resuming = asyncio.ensure_future(engine.pause()), asyncio.ensure_future(engine.resume())
    await asyncio.sleep(0)  # both have begun
    core.drained.set()
    await asyncio.gather(pausing, resuming)
    assert not core.paused
    await engine.pause()
    assert core.paused
    with pytest.raises(ConnectionError):
        await engine.receive(1, 7)
    assert core.paused, "it may have weights of two versions"
