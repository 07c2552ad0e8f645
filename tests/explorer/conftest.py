"""One vLLM engine for all tests of its contract; the test process plays the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayrft.weights.buckets import Digest, empty_bucket, fill_bucket, plan_buckets
from rayrft.weights.group import WeightGroup, open_store
from rayrft.weights.messages import Adapter, GroupPlan, Parcel, TensorMeta

BUCKET = 16 << 10


@dataclass
class EngineUnderTest:
    """An engine actor, the model it was started from, and the trainer's end of its weight group."""

    actor: Any
    folder: Path
    group: WeightGroup

    def model(self, seed: int | None = None) -> nn.Module:
        """The model on disk; with a seed, its weights replaced by random ones."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return model

    def parcel(self, tensors: dict[str, Tensor], adapter: Adapter | None = None) -> Parcel:
        return Parcel([TensorMeta.of(name, tensor, torch.float32) for name, tensor in tensors.items()], adapter)

    def send(self, tensors: dict[str, Tensor]) -> str:
        """Broadcast tensors; gives their digest."""
        digest = Digest()
        for bucket in plan_buckets(self.parcel(tensors).metas, BUCKET):
            buffer = empty_bucket(bucket, "cpu")
            with torch.no_grad():
                fill_bucket(buffer, bucket, [tensors[meta.name] for meta in bucket])
            digest.update(buffer)
            self.group.broadcast(buffer)
        return digest.value


@pytest.fixture(scope="session")
def engine(ray_cluster: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    import ray

    from rayrft.config.explorer import EngineConfig
    from rayrft.explorer.engine import RolloutEngine

    # As on a machine without a C++ compiler.
    bare = {"CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    actor = (
        ray.remote(RolloutEngine).options(num_cpus=0.5, max_concurrency=1000, runtime_env={"env_vars": bare}).remote()
    )
    ray.get(actor.start.remote(str(tiny_model), EngineConfig(), max_length=64, dtype="float32", seed=0))
    host = "127.0.0.1"
    store = open_store(host)
    plan = GroupPlan("gloo", host, store.port, world_size=2, generation=1, timeout_s=60)
    joining = actor.join.remote(plan, 1)
    group = WeightGroup(plan, 0, torch.device("cpu"))
    ray.get(joining)
    yield EngineUnderTest(actor, tiny_model, group)
    ray.kill(actor)
