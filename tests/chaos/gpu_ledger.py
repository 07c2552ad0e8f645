"""GPUs of a scripted run, and what engines and ranks hold of their memory at every moment.

An engine is a `RolloutEngine` with a stand-in for vLLM, which does with memory what vLLM does. Sizes are of a plan.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rayrft.buffer.leases import Lease
from rayrft.core.plan import PartMemory
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.exchange import Capacity, Completion, Request, Stream
from rayrft.trainer.result import StepResult
from rayrft.weights.messages import Link, SendReport
from tests.chaos.scripted_run import LOAD_S, Cluster, ScriptedEngine, ScriptedRank
from tests.chaos.simulated import Life, World

_CONTEXT = 0.6
"""GB of a process that uses a GPU."""


@dataclass
class GpuLedger:
    """GB that each process holds of GPUs: a rank of that of its index, an engine of those of ``parallel`` ranks."""

    size: float
    engine: PartMemory
    rank: PartMemory
    buckets: float
    world: World
    parallel: int
    held: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    most: float = 0.0
    events: list[str] = field(default_factory=list)
    """Tags that the first engine wakes up, and transfers."""
    found: list[float] = field(default_factory=list)
    """GB that engines found free when they started."""

    def hold(self, name: str, gb: float) -> None:
        for gpu in self.gpus_of(name):
            processes = self.held[gpu]
            processes[name] = gb
            self.most = max(self.most, sum(processes.values()))
            if sum(processes.values()) > self.size:
                self.world.problems.append(f"out of memory: {processes}")

    def free(self, name: str) -> float:
        """GB that are free for a process on each of its GPUs."""
        held = [sum(gb for other, gb in self.held[gpu].items() if other != name) for gpu in self.gpus_of(name)]
        return self.size - max(held)

    def gpus_of(self, name: str) -> range:
        kind, _, index = name.rpartition("-")
        several = self.parallel if kind == "engine" else 1
        return range(int(index) * several, (int(index) + 1) * several)

    def of_engines(self, link: Link) -> Link:
        """A link in which one worker receives for an engine."""
        return replace(link, receivers=link.receivers // self.parallel)

    def end(self, life: Life) -> None:
        for processes in self.held.values():
            processes.pop(life.name, None)


class Vllm:
    """Stands in for an `AsyncLLM` that sleeps."""

    def __init__(self, ledger: GpuLedger, engine: LedgerEngine, share: float) -> None:
        self._ledger, self._engine, self._version = ledger, engine, "0"
        weights, work, _ = ledger.engine.parts.values()
        self._parts = {"weights": weights + work - _CONTEXT, "kv_cache": share * ledger.size - weights - work}
        self._asleep = set[str]()

    def show(self) -> None:
        held = (gb for name, gb in self._parts.items() if name not in self._asleep)
        self._ledger.hold(self._engine.life.name, _CONTEXT + sum(held))

    def _note(self, *events: str) -> None:
        if self._engine.life.name == "engine-0":
            self._ledger.events += events

    async def sleep(self, level: int) -> None:
        self._asleep = set(self._parts)
        self.show()

    async def wake_up(self, tags: list[str]) -> None:
        self._asleep -= {*tags}
        self._note(*tags)
        self.show()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._engine.scripted.pause()

    async def resume_generation(self) -> None:
        assert not self._asleep, "an engine that sleeps cannot decode"
        await self._engine.scripted.resume()

    async def collective_rpc(self, method: str, args: tuple[int]) -> list[str]:
        assert "weights" not in self._asleep, "weights need memory"
        self._note("transfer")
        self._engine.scripted.running.clear()
        weights = await self._engine.scripted.receive(args[0], self._engine.receives)
        self._engine.scripted.running.clear()
        return list(weights.digests)

    async def update_weight_version(self, version: str) -> None:
        self._version = version

    async def get_weight_version(self) -> str:
        return self._version


class LedgerEngine(RolloutEngine):
    def __init__(self, cluster: Cluster, life: Life) -> None:
        super().__init__()
        self.cluster, self.life, self.receives = cluster, life, 0
        self.scripted = ScriptedEngine(cluster, life)

    async def _create(self, arguments: dict[str, Any]) -> Any:  # type: ignore[override]
        ledger, name, share = self.cluster.gpus, self.life.name, arguments["gpu_memory_utilization"]
        free = ledger.free(name)
        ledger.found.append(free)
        if free < share * ledger.size:
            ledger.world.problems.append(f"{name} finds {free:.1f} GB free, and needs {share * ledger.size:.1f}")
        vllm = Vllm(ledger, self, share)
        vllm.show()
        await self.cluster.takes(LOAD_S)
        if ledger.free(name) != free:  # vLLM measures too little for its cache, or gives up
            self.cluster.failed_starts += 1
            raise AssertionError("Error in memory profiling")
        return vllm

    async def start(self, *arguments: Any, lent: tuple[str, ...] = (), **settings: Any) -> None:
        gpus = range(len(lent)) if self.cluster.gpus.parallel == 1 else self.cluster.gpus.gpus_of(self.life.name)
        assert lent == tuple(map(str, gpus)), "it gets the GPUs of ranks on its node"
        await super().start(*arguments, **settings)

    def _watch_core(self) -> None: ...

    async def receive(self, number: int, version: int) -> Any:
        self.receives = version
        return await super().receive(number, version)

    async def connect(self, link: Link, first: int) -> None:
        await self.scripted.connect(self.cluster.gpus.of_engines(link), first // self.cluster.gpus.parallel)

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        return await self.scripted.generate(request, stream)

    async def capacity(self) -> Capacity:
        return await self.scripted.capacity()

    async def score(self, token_ids: list[int], images: tuple[str, ...] = ()) -> list[float]:
        return await self.scripted.score(token_ids, images)


class LedgerRank(ScriptedRank):
    """torch keeps what a call has used for the next one, until it is released."""

    _kept = 0.0

    async def load(self) -> None:
        with self._using("gathered"):
            await super().load()

    def release(self) -> None:
        if self._setup.run.colocated:
            self._kept = 0.0
            self._show(0.0)

    async def gpus(self) -> tuple[str, list[str]]:
        return f"node-{1 + self._index // self._cluster.gpus.parallel}", [str(self._index)]

    async def connect(self, link: Link) -> str | None:
        return await super().connect(self._cluster.gpus.of_engines(link))

    async def train(self, lease: Lease) -> StepResult | None:
        with self._using("gradients", "gathered", "head", "activations"):
            return await super().train(lease)

    async def send(self, number: int, version: int, bucket_bytes: int) -> SendReport:
        with self._using("gathered", beside=self._cluster.gpus.buckets):
            return await super().send(number, version, bucket_bytes)

    async def score(self, sequences: list[list[int]], images: Any = None) -> list[list[float]]:
        with self._using("gathered", "head"):
            return await super().score(sequences, images)

    @contextlib.contextmanager
    def _using(self, *parts: str, beside: float = 0.0) -> Iterator[None]:
        self._show(sum(self._cluster.gpus.rank.parts[part] for part in parts) + beside)
        yield

    def _show(self, used: float) -> None:
        self._kept = max(self._kept, used)
        parts = self._cluster.gpus.rank.parts
        self._cluster.gpus.hold(self._life.name, _CONTEXT + parts["states"] + parts["models"] + self._kept)


def use_gpus(
    cluster: Cluster, size: float, engine: PartMemory, rank: PartMemory, buckets: float, parallel: int
) -> None:
    """Let the run's engines and ranks hold memory of GPUs."""
    cluster.engine, cluster.rank = LedgerEngine, LedgerRank
    cluster.gpus = GpuLedger(size, engine, rank, buckets, cluster.world, parallel)
    cluster.world.on_end.append(cluster.gpus.end)
