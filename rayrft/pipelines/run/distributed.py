"""Batches spread over the workers of a cluster by Ray Data, and back in their order.

Ray Data distributes and bounds what is under way; a worker applies operators as the runner does in one process, in a
process that can be killed. Errors travel as values, so that the first one in the order of the batches is raised, as in
one process.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from rayrft.data.ray_data import quiet_ray_data
from rayrft.errors import CallFailed, ClusterError, OperatorFailed, OperatorTimeout
from rayrft.pipelines.chain import Link, Outcome
from rayrft.pipelines.run.process import ANSWER_BYTES, START_S, Applier, Far, operator_failure, packed
from rayrft.registry import load_plugins
from rayrft.runtime.processes.pool import ProcessPool, Worker

T = TypeVar("T")
_MOST_BLOCKS = 2000
"""Ray Data plans every block."""
_READERS, _READER_CPUS = 2, 0.05
"""Reading a file of Arrow costs next to nothing."""


@dataclass(frozen=True)
class Segment:
    """Operators by their numbers, which batches go through one after another."""

    numbers: tuple[int, ...]
    build: Callable[[], list[Link]]
    create: Callable[[], Applier]
    plugins: tuple[Path, ...]
    deadline_s: float


@dataclass(frozen=True)
class Result:
    """What came of a batch: the rows that go on, as an Arrow message, and what each operator did, up to a failure."""

    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    rows: bytes | None = None
    failure: OperatorFailed | None = None


async def spread(segment: Segment, path: Path, batches: int, workers: int) -> AsyncGenerator[Result, None]:
    """Apply operators to the batches of an Arrow file, up to ``workers`` of them at once, and yield what came of each,
    in their order.

    Raises OperatorFailed if Ray Data fails, OperatorTimeout if nothing comes within the deadlines of a batch and the
    start of a worker, and ClusterError if there is no cluster.
    """
    import ray
    from ray.exceptions import RayError

    place = segment.build()[segment.numbers[0]].field
    if not ray.is_initialized():
        raise ClusterError("workers need a Ray cluster", "connect to one, or set workers to 1", field=place)
    if not batches:
        return
    deadline_s = START_S + 2 * segment.deadline_s * len(segment.numbers)
    with quiet_ray_data():
        results = _results(segment, path, batches, workers)
        while True:
            try:
                async with asyncio.timeout(deadline_s):
                    result = await _in_daemon(partial(next, results, None))
            except TimeoutError:
                problem = f"no worker was done with a batch for {deadline_s:g} s"
                remedy = "see whether the cluster has a free CPU for a worker, or set workers to 1"
                raise OperatorTimeout(problem, remedy, field=place) from None
            except RayError as error:
                problem = f"the workers failed: {str(error).strip().splitlines()[-1]}"
                raise OperatorFailed(problem, "see the cause in Ray's logs", field=place) from error
            if result is None:
                return
            yield result


def _in_daemon(work: Callable[[], T]) -> asyncio.Future[T]:
    """Do work in a thread that nobody joins, unlike those of `asyncio.to_thread`: it may never be done."""
    done = Future[T]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="rayrft-results", daemon=True).start()
    return asyncio.wrap_future(done)


def _results(segment: Segment, path: Path, batches: int, workers: int) -> Generator[Result, None, None]:
    import ray.data

    data = (
        ray.data.range(batches, override_num_blocks=min(batches, _MOST_BLOCKS), concurrency=_READERS)
        # The file is on this node; workers are on any.
        .map(
            partial(_read, str(path)),
            compute=ray.data.TaskPoolStrategy(size=_READERS),
            num_cpus=_READER_CPUS,
            resources={_this_node(): _READER_CPUS},
        )
        .map(
            _SegmentWorker,
            fn_constructor_args=(segment,),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers),
            num_cpus=1,
        )
    )
    for row in data.iter_rows():
        yield pickle.loads(row["result"])


def _this_node() -> str:
    """Return the resource that only this node has, one of it."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == own]
    name: str = next(each for each in node["Resources"] if each.startswith("node:") and "__" not in each)
    return name


def _read(path: str, row: dict[str, Any]) -> dict[str, Any]:
    with pa.memory_map(path) as source, pa.ipc.open_file(source) as file:
        return {"rows": packed(file.get_batch(row["id"]))}


class _SegmentWorker:
    """The actor of Ray Data: operators in a process of its node."""

    def __init__(self, segment: Segment) -> None:
        load_plugins(segment.plugins)
        self._segment = segment
        self._links = segment.build()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rayrft-operators", daemon=True).start()
        self._stack = AsyncExitStack()
        self._worker: Worker | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        result = asyncio.run_coroutine_threadsafe(self._apply(row["rows"]), self._loop).result()
        return {"result": pickle.dumps(result)}

    async def _apply(self, message: bytes) -> Result:
        with pa.ipc.open_stream(message) as reader:
            batch = reader.read_next_batch()
        outcomes: list[tuple[int, Outcome]] = []

        def note(number: int, outcome: Outcome) -> None:
            outcomes.append((number, outcome))

        try:
            far = Far(await self._started(), self._links, self._segment.deadline_s)
            async for part in far.apply(self._segment.numbers, batch, note):
                return Result(outcomes, packed(part))
        except OperatorFailed as failure:
            return Result(outcomes, failure=failure)
        return Result(outcomes)

    async def _started(self) -> Worker:
        """Return the operators' process; the first time, start it."""
        if self._worker is None:
            pool = ProcessPool(
                self._segment.create,
                processes=1,
                plugins=self._segment.plugins,
                spares=0,
                answer_limit=ANSWER_BYTES,
                start_s=START_S,
                inherit=True,
            )
            try:
                self._worker = await self._stack.enter_async_context(pool.lease())
            except CallFailed as error:
                place = self._links[self._segment.numbers[0]].field
                raise operator_failure(error, "the operators could not be started", place) from error
        return self._worker
