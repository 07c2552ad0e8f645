"""WeightSync: publishes every new weight version to all engines, and verifies it. The Master runs it in its process.

A round: pause all (requests are kept) -> transfer in buckets -> label and resume on every engine -> verify.
Digests prove that the bytes arrived; the log-probs of a probe batch prove that the engine computes with them.
If an engine dies in a round, the round is repeated with the engines that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayrft.config import RunConfig
from rayrft.errors import WeightSyncError
from rayrft.experience import Experience
from rayrft.explorer.engines.engine import EngineWeights, RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member, Membership
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, TrackedHandle
from rayrft.runtime.ray_api import ray
from rayrft.runtime.waits import Waits, cancel
from rayrft.trainer.api import RankApi
from rayrft.trainer.trainer import Trainer, ask_ranks
from rayrft.weights.messages import Link, SendReport, SyncReport

_RESUME_S = 10.0
"""Time that engines have to resume after a round that failed: one that hangs must not hide why it did."""
_SETTLE_S = 5.0
"""Time that the other calls of a round have to end once one has failed."""

_Engines = Sequence[Handle[RolloutEngine]]


@dataclass
class WeightSync:
    """Rounds of one run, one at a time. Calls are noted in ``waits``, as those of ``trainer`` and ``pool`` must."""

    config: RunConfig
    trainer: Handle[Trainer]
    pool: Handle[EnginePool]
    engines: Callable[[], _Engines]
    """Returns all engines that have not died, as far as is known."""
    probe: list[Experience]
    """Rows to score: engine and trainer may differ within ``config.probe_bounds``."""
    waits: Waits
    leave_s: float = 10.0
    """Time in which the death of an engine becomes known after a round that failed, which it may have caused."""
    newest: int = 0
    """Newest version that was sent to a rollout engine. None gets an older one: a run that repeats steps keeps it."""

    def __post_init__(self) -> None:
        self.weights = asyncio.Lock()
        """Held while the trainer's weights change, from a training step to its `publish`, and while new engines get
        them."""
        self._settings = self.config.weight_sync
        self._present = self.trainer
        """The Trainer whose weights the round sends."""
        self._tokens = [row.token_ids.tolist() for row in self.probe]
        self._images = [row.images for row in self.probe]
        self._lock = asyncio.Lock()
        self._membership = Membership(-1, ())
        self._connected: int | None = None
        """The membership's generation that the present link was made under; None: under no membership."""
        self._links = 0
        self._rounds = 0
        self._version: int | None = None
        """Version that was sent last."""
        self._rounds_proven: int | None = None
        """Rounds since the present link's first probe of updated weights: engines that ignore what they receive still
        agree on the weights that they have loaded. None: there was no such probe."""
        self.caught_up = asyncio.Event()
        """Cleared while the run repeats steps whose weights were sent before: no engine is admitted then."""
        self.caught_up.set()

    async def publish(self, version: int) -> SyncReport:
        """Send the trainer's current weights, labelled ``version``, to every member of the pool. Raises WeightSyncError
        if an engine then holds other weights, computes other log-probs, or exceeds the deadline."""
        async with self._round_of(self.trainer.pinned):
            while True:
                newer = await self.pool.call(EnginePool.newer, self._membership.generation)
                membership = self._membership = newer or self._membership  # which is sent only when it has changed
                self.rewind(version)
                if not membership.members or version < self.newest:
                    return SyncReport(version, 0.0, 0, None, None)
                try:
                    return await self._publish(membership, version)
                except (WeightSyncError, ray.exceptions.RayError):
                    if not await self._has_left(membership):
                        raise

    def rewind(self, version: int) -> None:
        """Continue from the weights of this version, which may be older than those that engines hold."""
        if version < self.newest:
            self.caught_up.clear()
        else:
            self.newest = version
            self.caught_up.set()

    async def take_over(self, engines: _Engines) -> None:
        """Learn the newest version that engines hold, which another Master has sent."""
        self.newest = max(await asyncio.gather(*(engine.call(RolloutEngine.respond) for engine in engines)))

    def disconnect(self) -> None:
        """Make a new link for the next round: the ranks are new."""
        self._connected = None

    async def admit(self, handles: _Engines, version: int) -> SyncReport:
        """Send the current weights, labelled ``version``, to new engines, which then become members of the pool. Raises
        WeightSyncError, as `publish` does; the engines are not members then."""
        async with self._round_of(self.trainer.pinned):
            self.newest = max(self.newest, version)
            members = [Member(handle.untracked, version) for handle in handles]  # of now: see `Handle.succeed`
            report = await self._load([member.handle for member in members], version)
            membership = await self.pool.call(EnginePool.join, members)
            if set(membership.names) == {handle.name for handle in handles}:
                self._connected = membership.generation
            return report

    async def load(self, handles: _Engines, version: int) -> SyncReport:
        """Send the current weights to engines that are not members. Raises WeightSyncError, as `publish` does."""
        async with self._round_of(self.trainer.pinned):
            return await self._load(handles, version)

    @contextlib.asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Let the engines free their GPU memory for the trainer inside, if ``explorer.engine.sleep`` is set. Those that
        get weights inside wake up then, the others at the end; after a failure the ranks may still need the memory, and
        `wake_up` is for the caller."""
        await self._tell(RolloutEngine.sleep)
        yield
        await self._tell(RolloutEngine.wake_up)

    async def wake_up(self) -> None:
        """Wake up the engines, once the ranks have ended what a step or a Master that failed has left."""
        await self._tell(RolloutEngine.wake_up)

    async def _tell(self, method: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        """Make a call of all engines, also of non-members, if they sleep while the ranks train."""
        if self.config.explorer.engine.sleep:
            calls = (engine.call(method) for engine in self.engines())
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(answer, BaseException) and not isinstance(answer, ray_api.ACTOR_DEATHS):
                    raise answer

    @contextlib.asynccontextmanager
    async def _round_of(self, trainer: Handle[Trainer]) -> AsyncIterator[None]:
        """Send the weights of this Trainer inside: those of its successor may be of another version."""
        async with self._lock:
            self._present = trainer
            yield

    async def _publish(self, membership: Membership, version: int) -> SyncReport:
        engines = self._tracked(membership.engines)
        connected, self._connected = self._connected, None  # a round that fails leaves no link to build on
        if membership.generation != connected:
            await self._connect(engines)
        updated, proven = version != self._version, self._rounds_proven
        report = await self._round(engines, version, probe=not (proven or 0) % self._settings.probe_every)
        self._rounds_proven = proven + 1 if proven is not None else 1 if updated else None
        await self.pool.call(EnginePool.synced, membership.names, version)
        self._connected = membership.generation
        return report

    async def _has_left(self, membership: Membership) -> bool:
        """Return whether an engine leaves, which died in a round that failed. One that does not answer is killed."""

        async def kill_silent(engine: Handle[RolloutEngine]) -> None:
            try:
                await asyncio.wait_for(engine.call(RolloutEngine.respond), self.leave_s)
            except TimeoutError:
                engine.kill()
            except ray.exceptions.RayError:
                pass  # it has died, and leaves

        leaving = asyncio.ensure_future(self.pool.call(EnginePool.members, membership.generation))
        await asyncio.gather(*map(kill_silent, membership.engines))
        await asyncio.wait({leaving}, timeout=self.leave_s)
        return leaving.done() and not leaving.cancelled() and leaving.exception() is None

    async def _load(self, handles: _Engines, version: int) -> SyncReport:
        engines, self._connected = self._tracked(handles), None
        await self._connect(engines)
        return await self._round(engines, version, probe=True)

    def _tracked(self, handles: _Engines) -> _Engines:
        return [TrackedHandle(handle, self.waits) for handle in handles]

    async def _connect(self, engines: _Engines) -> None:
        self._links += 1
        self._rounds_proven = None
        config, deadline_s = self.config, self._settings.deadline_s
        workers = config.explorer.engine.tensor_parallel
        async with self._deadline("the ranks to end the link before"):  # whose engines may have died
            located = (await ask_ranks(self._present, RankApi.locate, deadline_s))[0]
            assert located is not None  # the first rank opens the store
        async with self._deadline("engines and trainer to connect"):
            host, port = located
            link = Link(
                config.sync_backend,
                host,
                port,
                self._links,
                senders=config.trainer.ranks,
                receivers=workers * len(engines),
                timeout_s=deadline_s,
                secret=secrets.token_hex(),
                plugins=tuple(map(str, config.plugins)),
                options=config.transport_options,
            )
            connecting = [each.call(RolloutEngine.connect, link, i * workers) for i, each in enumerate(engines)]
            problem, *_ = await _all(ask_ranks(self._present, RankApi.connect, link), *connecting)
            _check_link(problem[0])

    async def _round(self, engines: _Engines, version: int, *, probe: bool) -> SyncReport:
        started = time.perf_counter()
        self._rounds += 1
        bucket_bytes = self.config.bucket_bytes
        async with self._deadline(f"weights of version {version} to reach {len(engines)} engines"):
            try:
                keep = self._settings.kv_cache == "keep"
                await asyncio.gather(*(engine.call(RolloutEngine.pause, keep) for engine in engines))
            except BaseException:
                await _resume(engines)
                raise
            # After a transfer that failed the engines stay paused, as they may have weights of two versions.
            receiving = [engine.call(RolloutEngine.receive, self._rounds, version) for engine in engines]
            sending = ask_ranks(self._present, RankApi.send, self._rounds, version, bucket_bytes)
            [sent, *_], *held = await _all(sending, *receiving)
            _check_link(sent.problem)
        _verify(version, sent, {engine.name: weights for engine, weights in zip(engines, held, strict=True)})
        seconds = time.perf_counter() - started
        gap = await self._compare(engines, version) if probe else None
        self._version = version
        return SyncReport(version, seconds, sent.nbytes, sent.digest, gap)

    async def _compare(self, engines: _Engines, version: int) -> float:
        """Return the largest log-prob difference on the probe. Raises WeightSyncError if an engine is out of bounds."""
        bounds = self.config.probe_bounds
        trainer = (await ask_ranks(self._present, RankApi.score, self._tokens, self._images))[0]

        async def score(engine: Handle[RolloutEngine]) -> list[list[float]]:
            async with self._deadline(f"{engine.name} to score the probe batch"):
                return await asyncio.gather(*map(partial(engine.call, RolloutEngine.score), self._tokens, self._images))

        worst = 0.0
        for engine, scores in zip(engines, await asyncio.gather(*map(score, engines)), strict=True):
            pairs = [pair for a, b in zip(trainer, scores, strict=True) for pair in zip(a, b, strict=True)]
            pairs.sort(key=lambda pair: abs(pair[0] - pair[1]))
            gaps = [abs(ours - theirs) for ours, theirs in pairs]
            mean, most = sum(gaps) / len(gaps), gaps[math.ceil(bounds.share * len(gaps)) - 1]
            # Written so that NaN is out of bounds.
            if not (mean <= bounds.mean and most <= bounds.most):
                ours, theirs = pairs[-1]
                raise WeightSyncError(
                    f"after version {version} log-probs of the probe batch differ from the trainer's by {mean:.2g} in "
                    f"the mean (accepted: {bounds.mean:.2g}), by {most:.2g} or less for {bounds.share:.0%} "
                    f"of {len(gaps)} tokens (accepted: {bounds.most:.2g}), and by {gaps[-1]:.2g} at most: "
                    f"{theirs:.6f} and {ours:.6f}",
                    "the engine does not compute with the trainer's weights; if it does, raise weight_sync.tolerance",
                    field=engine.name,
                )
            worst = max(worst, gaps[-1])
        return worst

    @contextlib.asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                yield
        except TimeoutError:
            problem = f"waited {self._settings.deadline_s:g} s for {what}"
            remedy = "check for a hanging engine, or raise weight_sync.deadline_s"
            raise WeightSyncError(problem, remedy, field="weight_sync") from None


def _verify(version: int, sent: SendReport, held: Mapping[str, EngineWeights]) -> None:
    for name, weights in held.items():
        if weights.version != version or any(digest != sent.digest for digest in weights.digests):
            problem = (
                f"the trainer sent version {version} with digest {sent.digest}; the engine reports version "
                f"{weights.version} with {', '.join(weights.digests)}"
            )
            raise WeightSyncError(problem, "the transfer is broken: do not use rollouts of this engine", field=name)


def _check_link(problem: str | None) -> None:
    """Raise WeightSyncError if the first rank had a problem with the link."""
    if problem is not None:
        remedy = "see the engines' logs in the Ray dashboard: one of them has failed"
        raise WeightSyncError(f"the link to the engines failed: {problem}", remedy, field="weight_sync")


async def _all(*calls: Awaitable[Any]) -> list[Any]:
    """Return the results of calls. Raises the first error once the others have ended, too, or after `_SETTLE_S`."""
    futures = list(map(asyncio.ensure_future, calls))
    try:
        _, running = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        if running:
            await asyncio.wait(running, timeout=_SETTLE_S)
        for each in futures:
            if each.done():
                each.result()
        return [each.result() for each in futures]
    finally:
        await cancel(*futures)


async def _resume(engines: _Engines) -> None:
    """Resume the engines of a round that failed: a dead one must neither keep the others paused nor hide the error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RESUME_S):
            await asyncio.gather(*(engine.call(RolloutEngine.resume) for engine in engines), return_exceptions=True)
