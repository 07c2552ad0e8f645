"""What vLLM is asked for, by the config. vLLM itself is a recorder here."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rayrft.config.explorer import EngineConfig
from rayrft.errors import ActorDied, ModelError
from rayrft.explorer.engines import engine as module
from rayrft.explorer.engines.engine import RolloutEngine
from tests.errors import about


async def started(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, cores: Sequence[Any] = (), **settings: Any
) -> tuple[RolloutEngine, dict[str, Any]]:
    """An engine whose core runs in processes ``cores``, and what vLLM was asked for."""

    class Engine:
        engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=cores)))

        @classmethod
        def from_engine_args(cls, arguments: Any, usage_context: Any) -> Engine:
            given.update(vars(arguments))
            return cls()

        async def update_weight_version(self, version: str) -> None:
            pass

    given: dict[str, Any] = {}
    for name, members in {
        "vllm.config.weight_transfer": {"WeightTransferConfig": SimpleNamespace},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.v1.engine.async_llm": {"AsyncLLM": Engine},
        "rayrft.explorer.engines.weight_plugin": {"BACKEND": "rayrft", "WorkerExtension": SimpleNamespace},
    }.items():
        stub = ModuleType(name)
        vars(stub).update(members)
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(module, "takes_images", lambda model: False)
    engine = RolloutEngine()
    await engine.start("model", config, max_length=64, dtype="float32", seed=0, **settings)
    return engine, given


# Over several GPUs, vLLM by itself would ask for a bundle of each.
@pytest.mark.parametrize(("gpus", "executor"), [(0, None), (1, None), (2, "mp")])
async def test_an_engine_over_gpus_runs_as_processes_of_its_actor(
    gpus: int, executor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, given = await started(EngineConfig(gpus=gpus, tensor_parallel=max(1, gpus)), monkeypatch)
    assert given["tensor_parallel_size"] == max(1, gpus)
    assert given["distributed_executor_backend"] == executor


async def test_an_engine_whose_gpus_are_lent_sees_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as in any actor to which Ray gives none
    _, given = await started(EngineConfig(gpus=0.4, tensor_parallel=2), monkeypatch, lent=("3", "5"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")


async def test_an_engine_whose_core_is_killed_says_so_whatever_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for core in cores:
        core.start()
    context = SimpleNamespace(get_actor_name=lambda: "run:engine-1", get_actor_id=lambda: None)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    engine, _ = await started(EngineConfig(), monkeypatch, cores)
    watching = asyncio.ensure_future(engine.watch())
    await asyncio.sleep(0)
    assert not watching.done()
    cores[1].kill()
    with pytest.raises(ActorDied) as died:
        await asyncio.wait_for(watching, 30)
    assert died.value.field == "engine-1"
    cores[0].kill()


class PausableCore:
    """vLLM's client, in which pausing takes until it is told to end."""

    def __init__(self) -> None:
        self.paused, self.drained = False, asyncio.Event()

    async def pause_generation(self, **_: Any) -> None:
        await self.drained.wait()
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[str]:
        raise ConnectionError("the sender is gone")


async def test_a_cache_with_images_of_the_old_weights_is_not_kept() -> None:
    engine = RolloutEngine()
    engine._engine, engine._images = PausableCore(), object()
    with pytest.raises(ModelError, check=about("weight_sync.kv_cache")):
        await engine.pause(keep_cache=True)


async def test_an_engine_is_left_paused_by_a_transfer_that_fails_and_not_by_a_resume_that_is_early() -> None:
    engine, core = RolloutEngine(), PausableCore()
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
