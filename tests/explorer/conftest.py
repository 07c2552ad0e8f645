"""One vLLM engine for all tests of its contract; the test process plays the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayrft.weights.buckets import empty_bucket, fill_bucket, plan_buckets
from rayrft.weights.channel import WeightChannel, open_store
from rayrft.weights.messages import Adapter, Link, Parcel, TensorMeta

BUCKET = 16 << 10


@dataclass
class EngineUnderTest:
    """An engine actor, the model it was started from, and the trainer's end of its link."""

    actor: Any
    folder: Path
    channel: WeightChannel
    transfers: int = 0

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

    def update(
        self, tensors: dict[str, Tensor], version: int, adapter: Adapter | None = None, keep_cache: bool = False
    ) -> tuple[str, Any, int]:
        """A whole round as the weight sync makes it; gives the digest sent, what the engine holds, and the bytes."""
        import ray

        parcel = Parcel(
            [TensorMeta.of(name, tensor, torch.float32) for name, tensor in tensors.items()], BUCKET, adapter
        )
        ray.get(self.actor.pause.remote(keep_cache))
        self.transfers += 1
        receiving = self.actor.receive.remote(self.transfers, version)
        sent = self.channel.send(self.transfers, parcel, _buckets(parcel, tensors))
        return sent, ray.get(receiving), parcel.nbytes


@torch.no_grad()
def _buckets(parcel: Parcel, tensors: dict[str, Tensor]) -> Iterator[Tensor]:
    for bucket in plan_buckets(parcel.metas, parcel.bucket_bytes):
        buffer = empty_bucket(bucket, "cpu")
        fill_bucket(buffer, bucket, [tensors[meta.name] for meta in bucket])
        yield buffer


@pytest.fixture(scope="session")
def engine(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """One with a dense layer, a layer of experts, whose size the engine pads, and a tied head."""
    import ray

    from rayrft.config.model import TinyModelConfig
    from rayrft.trainer.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("engine")
    shape = TinyModelConfig(layers=2, hidden_size=64, heads=2, intermediate_size=48, experts=4)
    prompts = [f"Spell this word backward: {word}" for word in ("cat", "horse", "bird")]
    make_tiny_model(shape, prompts, [], folder, max_length=64, seed=0)
    from rayrft.config.explorer import EngineConfig
    from rayrft.explorer.engines.engine import RolloutEngine

    # As on a machine without a C++ compiler.
    bare = {"CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    actor = (
        ray.remote(RolloutEngine).options(num_cpus=0.5, max_concurrency=1000, runtime_env={"env_vars": bare}).remote()
    )
    ray.get(actor.start.remote(str(folder), EngineConfig(), max_length=64, dtype="float32", seed=0, structured=True))
    host = "127.0.0.1"
    store = open_store(60, host)
    link = Link("gloo", host, store.port, number=1, senders=1, receivers=1, timeout_s=60, secret="s")
    connecting = actor.connect.remote(link, 0)
    channel = WeightChannel(link, sends=True, index=0, device=torch.device("cpu"), store=store)
    ray.get(connecting)
    yield EngineUnderTest(actor, folder, channel)
    ray.kill(actor)
