"""Rows of any number through a chain of operators, in a process that can be killed.

Batches stream through operators that look at single rows. Before one that must see whole groups or all rows, they
are put down in an Arrow file, which is read as it is needed: memory holds one batch, and what operators keep. With more
than one worker, operators of single rows get their batches from such a file by Ray Data (`distributed`).
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.config.pipelines import OperatorConfig
from rayrft.errors import (
    ActorDied,
    CallFailed,
    CallTimeout,
    EndpointFailed,
    OperatorFailed,
    OperatorTimeout,
    ProcessDied,
)
from rayrft.pipelines.chain import LeftOut, Link, Outcome, apply_each, apply_link, build_chain
from rayrft.pipelines.operator import Context
from rayrft.pipelines.report import OperatorReport, Report
from rayrft.pipelines.run.answering import Answerer
from rayrft.registry import load_plugins
from rayrft.runtime.processes.pool import ProcessPool, Worker

ANSWER_BYTES = 1 << 31
START_S = 300.0
"""Operators load models and compile as they start."""

Answers = Callable[[Collection[str], bool], AbstractAsyncContextManager[Answerer]]
"""Has what answers operators, for as long as they work: takes the names of the models that they ask, and whether they
have answers scored."""

Progress = Callable[[int, int], None]
"""Is called with the number of the operator and the rows that it was given."""


class Pipeline:
    """A chain of operators for rows of one schema, which have ids.

    ``origin`` says in errors where the rows come from, ``field`` is the config key of the operators. Constructing it
    raises ConfigError if any of them does not fit. ``leave_out``: rows on which an operator that looks at single rows
    raises are left out, and do not end it. ``workers``: more than one apply operators that look at single rows at once,
    anywhere on the cluster; what comes out does not depend on it.
    """

    def __init__(
        self,
        operators: Sequence[OperatorConfig],
        schema: pa.Schema,
        *,
        field: str = "operators",
        origin: str = "the input",
        context: Context | None = None,
        plugins: Sequence[Path] = (),
        deadline_s: float = 60.0,
        batch_rows: int = 1000,
        samples: int = 3,
        leave_out: bool = False,
        workers: int = 1,
    ) -> None:
        load_plugins(plugins)
        build = partial(build_chain, operators, schema, field=field, origin=origin, context=context or Context())
        self.links = build()
        self.schema = self.links[-1].gives if self.links else schema
        self.report = Report([OperatorReport(link.name) for link in self.links])
        self._segments = segments(self.links, apart=workers > 1)
        self._spread = [workers > 1 and may_spread(self.links[numbers[0]]) for numbers in self._segments]
        here = [n for numbers, spread in zip(self._segments, self._spread, strict=True) if not spread for n in numbers]
        self._create = partial(Applier, build, samples, leave_out, here)
        self._build, self._leave_out, self._workers = build, leave_out, workers
        self._plugins, self._deadline_s = tuple(plugins), deadline_s
        self._batch_rows, self._samples = batch_rows, samples

    def run(
        self,
        batches: Iterable[pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        *,
        left_out: Callable[[str, list[LeftOut]], None] = lambda operator, rows: None,
        progress: Progress = lambda operator, rows: None,
        answers: Answers | None = None,
    ) -> Report:
        """Send rows through all operators. ``take`` gets what comes out, ``left_out`` what each operator left out, and
        ``answers`` has what answers them, where they ask.

        Raises OperatorFailed if one raises, ends its process or returns what does not fit, or if a model that it asks
        died, and OperatorTimeout if one is not done with a batch within the deadline, not counting the time in which it
        waits for answers.
        """
        asks, scores = asked_by(self.links)

        def answerer() -> AbstractAsyncContextManager[Answerer | None]:
            return answers(asks, scores) if answers is not None and (asks or scores) else nullcontext()

        return in_thread(lambda: self._run(batches, take, left_out, progress, answerer))

    async def _run(
        self,
        batches: Iterable[pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        left_out: Callable[[str, list[LeftOut]], None],
        progress: Progress,
        answers: Callable[[], AbstractAsyncContextManager[Answerer | None]],
    ) -> Report:
        pool = ProcessPool(
            self._create,
            processes=1,
            plugins=self._plugins,
            spares=0,
            answer_limit=ANSWER_BYTES,
            start_s=START_S,
            inherit=True,
        )

        def note(number: int, outcome: Outcome) -> None:
            self.report.operators[number].add(outcome, self._samples)
            if outcome.left_out:
                left_out(self.links[number].name, outcome.left_out)
            progress(number, outcome.taken)

        try:
            with tempfile.TemporaryDirectory(prefix="rayrft-pipeline-") as folder:
                try:
                    async with answers() as answerer, pool.lease() as worker:
                        far = Far(worker, self.links, self._deadline_s, answerer)
                        stream = self._stream(far, batches, Path(folder), note)
                        async with aclosing(stream):
                            async for batch in stream:
                                take(batch)
                except CallFailed as error:  # of the lease itself
                    raise operator_failure(error, "the operators could not be started", "operators") from error
        finally:
            await pool.close()
        return self.report

    async def _stream(
        self, far: Far, batches: Iterable[pa.RecordBatch], folder: Path, note: Callable[[int, Outcome], None]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        stream = _whole(batches)
        for numbers, spread in zip(self._segments, self._spread, strict=True):
            first = self.links[numbers[0]]
            if spread:
                stream = self._far_away(numbers, stream, folder, note)
                continue
            if first.operator.scope != "row":
                spool = _Spool(folder / f"{numbers[0]}.arrow", first.takes)
                async with aclosing(stream):
                    async for batch in stream:
                        spool.write(batch)
                        if first.operator.scope == "all":
                            self.report.operators[numbers[0]].seconds += await far.observe(numbers[0], batch)
                spool.close()
                if first.operator.scope == "all":
                    self.report.operators[numbers[0]].seconds += await far.settle(numbers[0], spool.batches)
                    stream = _whole(spool.read())
                else:
                    stream = _whole(spool.read_groups(first.operator.group_by, self._batch_rows))
            stream = self._segment(far, numbers, stream, note)
        async with aclosing(stream):
            async for batch in stream:
                yield batch

    async def _far_away(
        self,
        numbers: Sequence[int],
        stream: AsyncGenerator[pa.RecordBatch, None],
        folder: Path,
        note: Callable[[int, Outcome], None],
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Send batches through operators on the workers of a cluster, as `_segment` does in one process."""
        from rayrft.pipelines.run.distributed import Segment, spread

        spool = _Spool(folder / f"{numbers[0]}.arrow", self.links[numbers[0]].takes)
        async with aclosing(stream):
            async for batch in stream:
                spool.write(batch)
        spool.close()
        create = partial(Applier, self._build, self._samples, self._leave_out, numbers)
        segment = Segment(tuple(numbers), self._build, create, self._plugins, self._deadline_s)
        async with aclosing(spread(segment, spool.path, spool.batches, self._workers)) as results:
            async for result in results:
                for number, outcome in result.outcomes:
                    note(number, outcome)
                if result.failure is not None:
                    raise result.failure
                if result.rows is not None:
                    yield unpacked(result.rows)

    async def _segment(
        self,
        far: Far,
        numbers: Sequence[int],
        stream: AsyncGenerator[pa.RecordBatch, None],
        note: Callable[[int, Outcome], None],
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        async with aclosing(stream):
            async for batch in stream:
                async for part in far.apply(numbers, batch, note):
                    yield part


def asked_by(links: Sequence[Link]) -> tuple[list[str], bool]:
    """Return the names of the models that operators ask, and whether any has answers scored."""
    asks = sorted({name for link in links for name in link.operator.asks.values()})
    return asks, any(link.operator.scores for link in links)


def segments(links: Sequence[Link], *, apart: bool = False) -> list[list[int]]:
    """Return the numbers of operators that batches stream through, split before each that needs more than a row;
    ``apart``: also between those that may be spread and the others."""
    found: list[list[int]] = []
    for number, link in enumerate(links):
        other = apart and number > 0 and may_spread(link) != may_spread(links[number - 1])
        if not found or link.operator.scope != "row" or other:
            found.append([])
        found[-1].append(number)
    return found


def may_spread(link: Link) -> bool:
    """Return whether an operator's batches may be worked on apart from each other, and from who answers it."""
    operator = link.operator
    return operator.scope == "row" and not operator.asks and not operator.scores


class Applier:
    """The operators, in the process that applies them, and the batch that they are at. It prepares those of these
    ``numbers``; all by default."""

    def __init__(
        self,
        build: Callable[[], list[Link]],
        samples: int,
        leave_out: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._links, self._samples, self._leave_out = build(), samples, leave_out
        for number in range(len(self._links)) if numbers is None else numbers:
            self._links[number].operator.prepare()
        self._rows: pa.RecordBatch | None = None

    def take(self, message: bytes) -> None:
        self._rows = unpacked(message)

    def apply(self, number: int) -> Outcome:
        link = self._links[number]
        try:
            self._rows, outcome = apply_link(link, self._rows, self._samples)
        except OperatorFailed as error:  # `operator_failure` names the operator and the remedy
            raise OperatorFailed(error.problem) from error
        except Exception as error:  # an operator may raise anything; which row it was is found one by one
            if link.operator.scope != "row" or not (self._leave_out or may_spread(link)):
                raise
            self._rows, outcome = apply_each(link, self._rows, self._samples)
            raised = [each for each in outcome.left_out if each.reason.startswith("raised ")]
            if not self._leave_out:
                raise (OperatorFailed(f"row {raised[0].row}: it {raised[0].reason}") if raised else error) from error
        return outcome

    def observe(self, number: int) -> None:
        assert self._rows is not None
        # Each column in memory of its own: with one that an operator keeps, all of the message would stay.
        self._rows = self._rows.take(pa.array(np.arange(self._rows.num_rows)))
        self._links[number].operator.observe(self._rows)

    def settle(self, number: int) -> None:
        self._links[number].operator.settle()

    def give(self) -> bytes:
        assert self._rows is not None
        return packed(self._rows)


class Far:
    """The operators' process, seen from here."""

    def __init__(
        self, worker: Worker, links: Sequence[Link], deadline_s: float, answerer: Answerer | None = None
    ) -> None:
        self._worker, self._links, self._deadline_s, self._answerer = worker, links, deadline_s, answerer

    async def apply(
        self, numbers: Sequence[int], batch: pa.RecordBatch, note: Callable[[int, Outcome], None]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Apply operators to a batch, and yield what is left of it, if there is a row."""
        await self._call(numbers[0], "take", packed(batch), rows=batch)
        for number in numbers:
            outcome: Outcome = await self._call(number, "apply", number, rows=batch)
            note(number, outcome)
            if not outcome.given:
                return
        yield unpacked(await self._call(numbers[-1], "give", rows=batch))

    async def observe(self, number: int, batch: pa.RecordBatch) -> float:
        """Let an operator see a batch; return the seconds that it took."""
        await self._call(number, "take", packed(batch), rows=batch)
        return await self._timed(number, "observe", rows=batch)

    async def settle(self, number: int, batches: int) -> float:
        """Let an operator conclude from all batches that it has seen."""
        return await self._timed(number, "settle", deadline_s=self._deadline_s * max(1, batches))

    async def _timed(self, number: int, method: str, **rest: Any) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await self._call(number, method, number, **rest)
        return loop.time() - start

    async def _call(
        self,
        number: int,
        method: str,
        *arguments: Any,
        rows: pa.RecordBatch | None = None,
        deadline_s: float | None = None,
    ) -> Any:
        link, limit_s = self._links[number], deadline_s or self._deadline_s
        at = "" if rows is None else f", on the batch of {rows.num_rows} rows that begins with {rows.column(0)[0]}"
        try:
            if self._answerer is None:
                return await self._worker.call(method, *arguments, deadline_s=limit_s)
            return await self._answerer.call(self._worker, method, *arguments, deadline_s=limit_s)
        except CallFailed as error:
            raise operator_failure(error, f"the operator failed{at}", link.field) from error
        except (ActorDied, EndpointFailed) as error:
            problem = f"a model that it asks failed{at}: {error.problem}"
            remedy = error.remedy or "see its log; what it has answered is not asked again where answers are kept"
            raise OperatorFailed(problem, remedy, field=link.field, value=error.field) from error


def operator_failure(error: CallFailed, what: str, field: str) -> OperatorFailed:
    if isinstance(error, CallTimeout):
        remedy = "raise deadline_s, lower batch_rows, or make the operator faster"
        failure: OperatorFailed = OperatorTimeout(f"{what}: {error.problem}", remedy, field=field)
    elif isinstance(error, ProcessDied):
        remedy = "see what ended it: a crash in a library, or too little memory"
        failure = OperatorFailed(f"{what}: {error.problem}", remedy, field=field, value=error.value)
    else:
        problem = error.problem.removeprefix("OperatorFailed: ").rstrip(".")
        failure = OperatorFailed(f"{what}: {problem}", "correct the operator, or the rows", field=field)
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure


class _Spool:
    """Batches in an Arrow file."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._writer = pa.ipc.new_file(str(path), schema)
        self.batches = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        self.batches += 1

    def close(self) -> None:
        self._writer.close()

    def read(self) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(self.path)) as source, pa.ipc.open_file(source) as file:
            for number in range(file.num_record_batches):
                yield file.get_batch(number)

    def read_groups(self, column: str, rows: int) -> Iterator[pa.RecordBatch]:
        """Iterate over whole groups, in order of appearance, about ``rows`` rows at a time; a row without a group is a
        group of its own."""
        sizes, codes = [], []
        known: dict[Any, int] = {}
        for batch in self.read():
            sizes.append(batch.num_rows)
            for name in batch.column(column).to_pylist():
                codes.append(len(known) if name is None else known.setdefault(name, len(known)))
                if name is None:
                    known[object()] = codes[-1]
        if not codes:
            return
        group = np.array(codes)
        order = np.argsort(group, kind="stable")
        starts = np.flatnonzero(np.diff(group[order], prepend=-1))
        first_rows = np.concatenate([[0], np.cumsum(sizes)])
        ends = np.append(starts[1:], len(order))
        begin = 0
        with pa.memory_map(str(self.path)) as source, pa.ipc.open_file(source) as file:
            for end, following in zip(ends, np.append(ends[1:], len(order)), strict=True):
                if following - begin > rows or end == len(order):
                    if end > begin:
                        yield self._taken(file, order[begin:end], first_rows)
                    begin = int(end)

    def _taken(self, file: Any, wanted: np.ndarray, first_rows: np.ndarray) -> pa.RecordBatch:
        where = np.searchsorted(first_rows, wanted, side="right") - 1
        parts, places = [], []
        for number in np.unique(where):
            here = np.flatnonzero(where == number)
            parts.append(file.get_batch(int(number)).take(pa.array(wanted[here] - first_rows[number])))
            places.append(here)
        back = np.argsort(np.concatenate(places), kind="stable")
        return pa.concat_batches(parts).take(pa.array(back))


async def _whole(batches: Iterable[pa.RecordBatch]) -> AsyncGenerator[pa.RecordBatch, None]:
    for batch in batches:
        if batch.num_rows:
            yield batch


def packed(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def unpacked(message: bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(message) as reader:
        return reader.read_next_batch()


def in_thread(work: Callable[[], Any]) -> Any:
    """Run a coroutine to its end in an event loop of its own, whether or not the caller is in one (Jupyter is)."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(asyncio.run(work()))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="rayrft-pipeline", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
