"""Batches distributed over actors of a cluster, and back in their order.

Failures travel as values, so that the first failure in the order of the batches is raised, as in one process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from rayrft.errors import ActorDied, ActorUnreachable, CallFailed, ClusterError, OperatorFailed, OperatorTimeout
from rayrft.pipelines.chain import Outcome
from rayrft.pipelines.run.host import START_S, OperatorHost, OperatorProcess, operator_failure, operator_pool, packed
from rayrft.runtime.actor_pool import ActorPool
from rayrft.runtime.handle import Handle
from rayrft.runtime.ray_api import ray
from rayrft.runtime.waits import cancel

T = TypeVar("T")
Flow = AsyncGenerator[pa.RecordBatch, None]
_AHEAD = 2
"""Batches in flight per actor."""


@dataclass(frozen=True)
class Segment:
    """Operators by their numbers, through which batches go one after another."""

    numbers: Sequence[int]
    fields: Sequence[str]
    """Names of all operators in errors."""
    create: Callable[[], OperatorHost]
    plugins: tuple[Path, ...]
    deadline_s: float


@dataclass(frozen=True)
class BatchResult:
    """The rows that are left of a batch, as an Arrow message, and what each operator did, up to a failure."""

    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    rows: bytes | None = None
    failure: OperatorFailed | None = None


async def distribute(segment: Segment, stream: Flow, workers: int) -> AsyncGenerator[BatchResult, None]:
    """Apply operators to batches in up to ``workers`` actors, as far as there is room; yield the results in order.

    Raises OperatorFailed if an actor fails, OperatorTimeout if there is no result within the deadlines of a batch and
    the start of an actor, and ClusterError if there is no cluster.
    """
    place = segment.fields[segment.numbers[0]]
    if not ray.is_initialized():
        raise ClusterError("workers need a Ray cluster", "connect to one, or set workers to 1", field=place)
    pool = ActorPool(lambda: _create(segment), lambda actor: actor.call(OperatorWorker.start), workers, place)
    deadline_s = START_S + 2 * segment.deadline_s * len(segment.numbers)

    async def within_deadline(work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await work
        except TimeoutError:
            problem = f"no worker was done with a batch for {deadline_s:g} s"
            remedy = "see whether the cluster has a free CPU for a worker, or set workers to 1"
            raise OperatorTimeout(problem, remedy, field=place) from None
        except (ActorDied, ActorUnreachable) as error:
            raise OperatorFailed(f"the workers failed: {error.problem}", error.remedy, field=place) from error

    async def apply(message: bytes) -> BatchResult:
        result, _ = await pool.call(lambda actor: actor.call(OperatorWorker.apply, message))
        return result

    window = deque[asyncio.Task[BatchResult]]()
    try:
        async with aclosing(stream):
            async for batch in stream:
                if not pool.is_open:
                    await within_deadline(pool.open(any_started=True))
                window.append(asyncio.create_task(apply(packed(batch))))
                if len(window) == _AHEAD * workers:
                    yield await within_deadline(window.popleft())
        while window:
            yield await within_deadline(window.popleft())
    finally:
        await cancel(*window)
        pool.close()


def _create(segment: Segment) -> Handle[OperatorWorker]:
    return Handle("operators", ray.remote(OperatorWorker).options(num_cpus=1).remote(segment))


class OperatorWorker:
    """The actor: operators in a process of its node."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._pool = operator_pool(segment.create, segment.plugins)
        self._busy, self._lease = asyncio.Lock(), AsyncExitStack()
        self._process: OperatorProcess | None = None

    async def start(self) -> None:
        """Return once the actor is placed."""

    async def apply(self, message: bytes) -> BatchResult:
        """Apply the operators to a batch; the first time, start their process."""
        outcomes = list[tuple[int, Outcome]]()
        try:
            async with self._busy:
                self._process = self._process or await self._start_process()
                rows = await self._process.apply(self._segment.numbers, message, outcomes.append)
        except OperatorFailed as failure:
            return BatchResult(outcomes, failure=failure)
        return BatchResult(outcomes, rows)

    async def close(self) -> None:
        """End the process."""
        await self._pool.close()

    async def _start_process(self) -> OperatorProcess:
        try:
            worker = await self._lease.enter_async_context(self._pool.lease())
        except CallFailed as error:
            place = self._segment.fields[self._segment.numbers[0]]
            raise operator_failure(error, "the operators could not be started", place) from error
        return OperatorProcess(worker, self._segment.fields, self._segment.deadline_s)
