"""An engine with vLLM in an actor, and the other end of its link for weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor, nn

from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.exchange import Completion, Request, Sampling
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.runtime.waits import WaitReport, Waits
from rayrft.weights.channel import WeightChannel, open_store
from rayrft.weights.messages import Adapter, Link, Parcel, TensorMeta
from tests.scripted import handle, remote

PROMPT = [5, 40, 41, 42, 43, 3]


@dataclass
class EngineUnderTest:
    """An engine actor, the model it was started from, and the trainer's end of its link."""

    actor: Any
    folder: Path
    channel: WeightChannel
    transfers: int = 0
    reports: list[WaitReport] = field(default_factory=list)
    """Its answers to heartbeats while it started."""

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
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        adapter: Adapter | None = None,
        keep_cache: bool = False,
    ) -> int:
        """A round as of the weight sync, after which the engine must hold what was sent; gives the bytes of that."""
        tensors = dict(weights)
        metas = [TensorMeta.of(name, tensor, torch.float32) for name, tensor in tensors.items()]
        parcel = Parcel(metas, 16 << 10, adapter)
        ray.get(self.actor.pause.remote(keep_cache))
        self.transfers += 1
        receiving = self.actor.receive.remote(self.transfers, version)
        sent = self.channel.send(self.transfers, parcel, (tensor.detach() for tensor in tensors.values()))
        held = ray.get(receiving)
        assert (held.version, held.digests) == (version, (sent,))
        return parcel.nbytes

    def generate(self, n: int = 4, prompt: list[int] = PROMPT, **options: Any) -> list[Completion]:
        return ray.get(self.actor.generate.remote(Request(prompt, n, sampling(**options))))

    async def client(self) -> EngineClient:
        pool = EnginePool()
        await pool.join([Member(handle(self.actor, "engine-0"), 0)])
        return EngineClient(remote(pool, "engine_pool"), Waits("test"))


def linked(actor: Any, number: int, transport: str = "gloo", **options: Any) -> WeightChannel:
    """The trainer's end of a new link."""
    host = "127.0.0.1"
    store = open_store(60, host)
    ends = {"senders": 1, "receivers": 1, "timeout_s": 60, "secret": "s"}
    link = Link(transport, host, store.port, number=number, options=options, **ends)
    connecting = actor.connect.remote(link, 0)
    channel = WeightChannel(link, sends=True, index=0, device=torch.device("cpu"), store=store)
    ray.get(connecting)
    return channel


def sampling(temperature: float = 1.0, max_tokens: int = 12, stop: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature, max_tokens, stop)
