"""Rows of any number through a chain of operators, in a process that can be killed.

Batches stream through operators that look at single rows. Before an operator that must see whole groups or all rows,
they are written to an Arrow file, which is read as it is needed: memory holds one batch, and what operators keep. With
more than one worker, operators of single rows work in actors (`distributed`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrft.config.pipelines import OperatorConfig
from rayrft.errors import CallFailed
from rayrft.pipelines.chain import LeftOut, Outcome, build_chain
from rayrft.pipelines.operator import Context
from rayrft.pipelines.report import OperatorReport
from rayrft.pipelines.rows import grouped
from rayrft.pipelines.run import host
from rayrft.pipelines.run.distributed import Flow, Segment, distribute
from rayrft.pipelines.run.host import NoteWork, OperatorHost, OperatorProcess
from rayrft.pipelines.run.models import ModelServer, OpenModels
from rayrft.registry import load_plugins
from rayrft.runtime.waits import in_thread

NoteGiven = Callable[[int, int], None]
"""Takes the number of an operator, and the rows that it was given."""


class Pipeline:
    """A chain of operators for rows of one schema, which have ids.

    ``origin`` says in errors where rows come from, ``field`` is the operators' config key. Construction raises
    ConfigError if an operator does not fit. ``leave_out``: rows on which an operator of single rows raises are left
    out. ``workers``: more than one apply such operators at once, anywhere on the cluster, with the same result.
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
        self.reports = [OperatorReport(link.name) for link in self.links]
        self._segments = host.segments(self.links, apart=workers > 1)
        self._distributes = [workers > 1 and host.is_distributable(link) for link in self.links]
        self._create, self._plugins = partial(OperatorHost, build, samples, leave_out), tuple(plugins)
        self._fields, self._workers, self._deadline_s = [link.field for link in self.links], workers, deadline_s
        self._batch_rows, self._samples = batch_rows, samples

    def run(
        self,
        batches: Iterable[pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        *,
        left_out: Callable[[str, list[LeftOut]], None] = lambda operator, rows: None,
        progress: NoteGiven = lambda operator, rows: None,
        models: OpenModels | None = None,
    ) -> list[OperatorReport]:
        """Send rows through all operators. ``take`` gets the resulting batches, ``left_out`` the rows that an operator
        left out; ``models`` opens the models that operators ask.

        Raises OperatorFailed if an operator raises, ends its process or returns what does not fit, or a model that it
        asks died. Raises OperatorTimeout if a batch takes longer than the deadline, without waits for answers.
        """
        asks, scores = host.asked_by(self.links)
        opened = models(asks, scores) if models is not None and (asks or scores) else nullcontext()
        return in_thread(lambda: self._run(batches, take, left_out, progress, opened))

    async def _run(
        self,
        batches: Iterable[pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        left_out: Callable[[str, list[LeftOut]], None],
        progress: NoteGiven,
        models: AbstractAsyncContextManager[ModelServer | None],
    ) -> list[OperatorReport]:
        here = [number for number, elsewhere in enumerate(self._distributes) if not elsewhere]
        pool = host.operator_pool(partial(self._create, here), self._plugins)

        def note(done: tuple[int, Outcome]) -> None:
            number, outcome = done
            self.reports[number].add(outcome, self._samples)
            if outcome.left_out:
                left_out(self.links[number].name, outcome.left_out)
            progress(number, outcome.taken)

        async with AsyncExitStack() as stack:
            stack.push_async_callback(pool.close)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrft-pipeline-")))
            try:
                async with models as server, pool.lease() as worker:
                    process = OperatorProcess(worker, self._fields, self._deadline_s, server)
                    async with aclosing(self._stream(process, batches, folder, note)) as stream:
                        async for batch in stream:
                            take(batch)
            except CallFailed as error:  # of the lease itself
                raise host.operator_failure(error, "the operators could not be started", "operators") from error
        return self.reports

    async def _stream(
        self, process: OperatorProcess, batches: Iterable[pa.RecordBatch], folder: Path, note: NoteWork
    ) -> Flow:
        stream = _whole(batches)
        for numbers in self._segments:
            first = self.links[numbers[0]]
            if self._distributes[numbers[0]]:
                stream = self._in_actors(numbers, stream, note)
                continue
            if first.operator.scope != "row":
                spool, report = folder / f"{numbers[0]}.arrow", self.reports[numbers[0]]
                with pa.ipc.new_file(str(spool), first.takes) as writer:
                    async with aclosing(stream):
                        async for batch in stream:
                            writer.write_batch(batch)
                            if first.operator.scope == "all":
                                report.seconds += await process.observe(numbers[0], host.packed(batch))
                if first.operator.scope == "all":
                    report.seconds += await process.finish(numbers[0], writer.stats.num_record_batches)
                    stream = _whole(_batches_of(spool))
                else:
                    stream = _whole(_groups_of(spool, first.operator.group_by, self._batch_rows))
            stream = self._in_process(process, numbers, stream, note)
        async with aclosing(stream):
            async for batch in stream:
                yield batch

    async def _in_process(self, process: OperatorProcess, numbers: Sequence[int], stream: Flow, note: NoteWork) -> Flow:
        async with aclosing(stream):
            async for batch in stream:
                rows = await process.apply(numbers, host.packed(batch), note)
                if rows is not None:
                    yield host.unpacked(rows)

    async def _in_actors(self, numbers: Sequence[int], stream: Flow, note: NoteWork) -> Flow:
        segment = Segment(numbers, self._fields, partial(self._create, numbers), self._plugins, self._deadline_s)
        async with aclosing(distribute(segment, stream, self._workers)) as results:
            async for result in results:
                for each in result.outcomes:
                    note(each)
                if result.failure is not None:
                    raise result.failure
                if result.rows is not None:
                    yield host.unpacked(result.rows)


def _batches_of(spool: Path) -> Iterator[pa.RecordBatch]:
    """Iterate over the batches of an Arrow file."""
    with pa.memory_map(str(spool)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            yield file.get_batch(number)


def _groups_of(spool: Path, column: str, rows: int) -> Iterator[pa.RecordBatch]:
    """Iterate over whole groups (or single rows without one), in order of appearance, about ``rows`` at a time."""
    batches, part = list(_batches_of(spool)), list[int]()
    first_rows = np.cumsum([0, *map(len, batches)])
    for group in grouped(name for batch in batches for name in batch.column(column).to_pylist()):
        if part and len(part) + len(group) > rows:
            yield _taken(batches, np.array(part), first_rows)
            part = []
        part += group
    if part:
        yield _taken(batches, np.array(part), first_rows)


def _taken(batches: list[pa.RecordBatch], wanted: np.ndarray, first_rows: np.ndarray) -> pa.RecordBatch:
    where = np.searchsorted(first_rows, wanted, side="right") - 1
    parts, places = [], []
    for number in np.unique(where):
        here = np.flatnonzero(where == number)
        parts.append(batches[number].take(pa.array(wanted[here] - first_rows[number])))
        places.append(here)
    back = np.argsort(np.concatenate(places), kind="stable")
    return pa.concat_batches(parts).take(pa.array(back))


async def _whole(batches: Iterable[pa.RecordBatch]) -> Flow:
    for batch in batches:
        if batch.num_rows:
            yield batch
