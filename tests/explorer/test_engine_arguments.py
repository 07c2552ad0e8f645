"""What vLLM is asked for, by the config. vLLM itself is a recorder here."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rayrft.config.explorer import EngineConfig
from rayrft.explorer import engine as module
from rayrft.explorer.engine import RolloutEngine


async def asked_for(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    class Engine:
        @classmethod
        def from_engine_args(cls, arguments: Any) -> Engine:
            given.update(vars(arguments))
            return cls()

        async def update_weight_version(self, version: str) -> None:
            pass

    given: dict[str, Any] = {}
    for name, members in {
        "vllm.config.weight_transfer": {"WeightTransferConfig": SimpleNamespace},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.v1.engine.async_llm": {"AsyncLLM": Engine},
        "rayrft.explorer.weight_plugin": {"BACKEND": "rayrft", "WorkerExtension": SimpleNamespace},
    }.items():
        stub = ModuleType(name)
        vars(stub).update(members)
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(module, "takes_images", lambda model: False)
    await RolloutEngine().start("model", config, max_length=64, dtype="float32", seed=0)
    return given


@pytest.mark.parametrize(
    ("config", "executor"),
    [
        (EngineConfig(), None),
        (EngineConfig(gpus=1), None),
        (EngineConfig(gpus=2, tensor_parallel=2), "mp"),  # by itself it would ask for a bundle per GPU
    ],
    ids=["cpu", "gpu", "tensor-parallel"],
)
async def test_an_engine_over_gpus_runs_as_processes_of_its_actor(
    config: EngineConfig, executor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = await asked_for(config, monkeypatch)
    assert given["tensor_parallel_size"] == config.tensor_parallel
    assert given["distributed_executor_backend"] == executor
