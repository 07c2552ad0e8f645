"""The WeightSync actor: publishes every new weight version to all engines, and verifies it.

A round: pause (requests are kept) -> broadcast in buckets -> verify version and digest -> always resume. Digests prove
that the bytes arrived; the log-probs of a probe batch prove that the engine computes with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from rayrft.config.trainer import ProbeBounds, WeightSyncConfig
from rayrft.errors import WeightSyncError
from rayrft.explorer.engine import EngineWeights, RolloutEngine
from rayrft.handle import Handle, TrackedHandle
from rayrft.trainer.commands import Command, Describe, Export, Join, Locate, Publish, Release, Score, command_name
from rayrft.trainer.trainer import Trainer
from rayrft.waits import WaitReport, Waits
from rayrft.weights.messages import GroupPlan, Parcel

R = TypeVar("R")


@dataclass(frozen=True)
class SyncReport:
    """Report of one round. ``probe_gap`` is the largest log-prob difference, or None if no probe was due."""

    version: int
    seconds: float
    nbytes: int
    digest: str
    probe_gap: float | None


class WeightSync:
    """The actor. Call ``connect`` before the first ``publish`` and whenever an engine or rank was replaced."""

    def __init__(
        self,
        config: WeightSyncConfig,
        backend: Literal["gloo", "nccl", "ipc"],
        bounds: ProbeBounds,
        trainer: Handle[Trainer],
        engines: list[Handle[RolloutEngine]],
        workers_per_engine: int,
        probe: list[list[int]],
        images: list[tuple[str, ...]] | None = None,
    ) -> None:
        """``probe`` are token sequences to score, ``images`` per sequence; engines may differ within ``bounds``."""
        self._config = config
        self._backend = backend
        self._bounds = bounds
        self._waits = Waits("weight_sync")
        self._trainer = TrackedHandle(trainer, self._waits, labels={Trainer.command: command_name})
        self._engines = [TrackedHandle(engine, self._waits) for engine in engines]
        self._workers = workers_per_engine
        self._probe = probe
        self._images = images or [()] * len(probe)
        self._generation = 0
        self._rounds = 0
        self._parcel = Parcel([])

    async def connect(self) -> None:
        """Form the process group of trainer and engines, under a new generation number."""
        self._parcel = (await self._command(Describe()))[0]
        self._generation += 1
        plan = None
        if self._backend != "ipc":
            host, port = (await self._command(Locate()))[0]
            size = 1 + self._workers * len(self._engines)
            plan = GroupPlan(self._backend, host, port, size, self._generation, self._config.deadline_s)
        joins: list[Awaitable[Any]] = [
            engine.call(RolloutEngine.join, plan, 1 + index * self._workers)
            for index, engine in enumerate(self._engines)
        ]
        if plan is not None:
            joins.append(self._trainer.call(Trainer.command, Join(plan)))
        async with self._deadline("engines and trainer to join the weight group"):
            await asyncio.gather(*joins)

    async def publish(self, version: int) -> SyncReport:
        """Send the trainer's current weights to every engine, labelled ``version``.

        Raises WeightSyncError if an engine then holds other weights, computes other log-probs, or exceeds the deadline.
        """
        started = time.perf_counter()
        async with self._deadline(f"weights of version {version} to reach {len(self._engines)} engines"):
            if self._parcel.adapter is not None:  # its base weights may differ from the previous stage's
                self._parcel = (await self._command(Describe()))[0]
            try:
                await self._call_all(RolloutEngine.pause)
                sent, held = await self._transfer(version)
                self._verify(version, sent, held)
            finally:
                # A dead engine must neither keep the others paused nor hide the error being raised.
                await asyncio.gather(
                    *(engine.call(RolloutEngine.resume) for engine in self._engines), return_exceptions=True
                )
        seconds = time.perf_counter() - started
        due = self._rounds % self._config.probe_every == 0
        self._rounds += 1
        gap = await self._compare(version) if due else None
        return SyncReport(version, seconds, self._parcel.nbytes, sent, gap)

    async def sleep(self) -> None:
        """Make the engines free their GPU memory for the trainer."""
        await self._call_all(RolloutEngine.sleep)

    async def wake_up(self) -> None:
        """Make the engines allocate their GPU memory again."""
        await self._call_all(RolloutEngine.wake_up)

    async def waiting(self) -> WaitReport:
        """Report which engines, or the trainer, have not answered, and for how long."""
        return self._waits.report()

    async def watch(self) -> None:
        """Never return: a caller that awaits it learns at once when this actor dies."""
        await asyncio.Event().wait()

    async def _transfer(self, version: int) -> tuple[str, list[EngineWeights]]:
        """Run one broadcast; return the digest of the weights sent, and the weights every engine reports."""
        parcel, size = self._parcel, int(self._config.bucket_mib * (1 << 20))
        if self._backend == "ipc":
            exports = await self._command(Export(parcel.metas, size))
            handles = {export.device: export.handles for export in exports}
            held = await asyncio.gather(
                *(engine.call(RolloutEngine.receive, parcel, size, version, handles) for engine in self._engines)
            )
            await self._command(Release())
            return exports[0].digest, held
        receiving = [engine.call(RolloutEngine.receive, parcel, size, version, None) for engine in self._engines]
        sending = self._command(Publish(parcel.metas, size))
        digests, held = await asyncio.gather(sending, asyncio.gather(*receiving))
        return digests[0], held

    def _verify(self, version: int, sent: str, held: list[EngineWeights]) -> None:
        for index, weights in enumerate(held):
            if weights.version != version or any(digest != sent for digest in weights.digests):
                raise WeightSyncError(
                    f"the trainer sent version {version} with digest {sent}; the engine reports version "
                    f"{weights.version} with {', '.join(weights.digests)}",
                    field=f"engine-{index}",
                    remedy="the transfer is broken: do not use rollouts of this engine",
                )

    async def _compare(self, version: int) -> float:
        """Return the largest log-prob difference on the probe. Raises WeightSyncError if an engine is out of bounds."""
        trainer = (await self._command(Score(self._probe, self._images)))[0]
        worst = 0.0
        for index, engine in enumerate(self._engines):
            async with self._deadline(f"engine-{index} to score the probe batch"):
                scores = await asyncio.gather(
                    *map(partial(engine.call, RolloutEngine.score), self._probe, self._images)
                )
            pairs = [pair for a, b in zip(trainer, scores, strict=True) for pair in zip(a, b, strict=True)]
            pairs.sort(key=lambda pair: abs(pair[0] - pair[1]))
            gaps = [abs(ours - theirs) for ours, theirs in pairs]
            mean, most = sum(gaps) / len(gaps), gaps[math.ceil(self._bounds.share * len(gaps)) - 1]
            # Written so that NaN is out of bounds.
            if not (mean <= self._bounds.mean and most <= self._bounds.most):
                ours, theirs = pairs[-1]
                raise WeightSyncError(
                    f"after version {version} log-probs of the probe batch differ from the trainer's by {mean:.2g} in "
                    f"the mean (accepted: {self._bounds.mean:.2g}), by {most:.2g} or less for {self._bounds.share:.0%} "
                    f"of {len(gaps)} tokens (accepted: {self._bounds.most:.2g}), and by {gaps[-1]:.2g} at most: "
                    f"{theirs:.6f} and {ours:.6f}",
                    field=f"engine-{index}",
                    remedy="the engine does not compute with the trainer's weights; if it does, raise "
                    "weight_sync.tolerance",
                )
            worst = max(worst, gaps[-1])
        return worst

    async def _command(self, command: Command[R]) -> list[R]:
        return await self._trainer.call(Trainer.command, command)

    async def _call_all(self, method: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*(engine.call(method) for engine in self._engines))

    @contextlib.asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._config.deadline_s):
                yield
        except TimeoutError:
            raise WeightSyncError(
                f"waited {self._config.deadline_s:g} s for {what}",
                field="weight_sync",
                remedy="check for a hanging engine, or raise weight_sync.deadline_s",
            ) from None
