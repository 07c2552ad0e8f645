"""Operators in a process that can be killed: the object there, and its caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.errors import (
    ActorDied,
    CallFailed,
    CallTimeout,
    EndpointFailed,
    OperatorFailed,
    OperatorTimeout,
    ProcessDied,
)
from rayrft.pipelines.chain import ChainLink, Outcome, apply_each, apply_link
from rayrft.pipelines.run.models import ModelServer
from rayrft.runtime.processes.pool import ProcessPool
from rayrft.runtime.processes.worker import Worker

START_S = 300.0
"""Operators load models and compile as they start."""
_ANSWER_BYTES = 1 << 31

NoteWork = Callable[[tuple[int, Outcome]], None]
"""Takes the number of an operator, and what it did with a batch."""


def operator_pool(
    create: Callable[[], Any], plugins: Sequence[Path], *, processes: int = 1, spares: int = 0
) -> ProcessPool:
    """Return a pool for objects that apply operators."""
    return ProcessPool(
        create,
        processes=processes,
        plugins=plugins,
        spares=spares,
        answer_limit=_ANSWER_BYTES,
        start_s=START_S,
        inherit=True,
    )


def asked_by(links: Sequence[ChainLink]) -> tuple[list[str], bool]:
    """Return the names of the models that operators ask, and whether any has answers scored."""
    asks = sorted({name for link in links for name in link.operator.asks.values()})
    return asks, any(link.operator.scores for link in links)


def segments(links: Sequence[ChainLink], *, apart: bool = False) -> list[list[int]]:
    """Return the numbers of operators that batches stream through, split before each that needs more than a row;
    ``apart``: also between distributable operators and others."""
    found: list[list[int]] = []
    for number, link in enumerate(links):
        other = apart and number > 0 and is_distributable(link) != is_distributable(links[number - 1])
        if not found or link.operator.scope != "row" or other:
            found.append([])
        found[-1].append(number)
    return found


def is_distributable(link: ChainLink) -> bool:
    """Return whether an operator works on each batch alone and asks nothing."""
    operator = link.operator
    return operator.scope == "row" and not operator.asks and not operator.scores


class OperatorHost:
    """The operators, in the process that applies them, and the batch. It prepares ``numbers``, by default all."""

    def __init__(
        self,
        build: Callable[[], list[ChainLink]],
        samples: int,
        leave_out: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._links, self._samples, self._leave_out = build(), samples, leave_out
        for number in range(len(self._links)) if numbers is None else numbers:
            self._links[number].operator.prepare()

    def apply(self, number: int, message: bytes | None = None) -> Outcome:
        """Apply an operator to a batch, by default to what is left of the current one."""
        link = self._links[number]
        if message is not None:
            self._rows: pa.RecordBatch = unpacked(message)
        try:
            self._rows, outcome = apply_link(link, self._rows, self._samples)
        except OperatorFailed as error:  # `operator_failure` names the operator and the remedy
            raise OperatorFailed(error.problem) from error
        except Exception as error:  # an operator may raise anything; the row is found one by one
            if link.operator.scope != "row" or not (self._leave_out or is_distributable(link)):
                raise
            self._rows, outcome = apply_each(link, self._rows, self._samples)
            raised = [each for each in outcome.left_out if each.reason.startswith("raised ")]
            if not self._leave_out:
                raise (OperatorFailed(f"row {raised[0].row}: it {raised[0].reason}") if raised else error) from error
        return outcome

    def observe(self, number: int, message: bytes) -> float:
        """Show an operator a batch; return the seconds that it took."""
        rows, start = unpacked(message), time.perf_counter()
        # Each column in memory of its own: with one that an operator keeps, all of the message would stay.
        self._links[number].operator.observe(rows.take(pa.array(np.arange(rows.num_rows))))
        return time.perf_counter() - start

    def finish(self, number: int) -> float:
        """Let an operator conclude from all batches that it has seen; return the seconds that it took."""
        start = time.perf_counter()
        self._links[number].operator.settle()
        return time.perf_counter() - start

    def result(self) -> bytes:
        """Return the current batch."""
        return packed(self._rows)


class OperatorProcess:
    """Calls of an `OperatorHost` in a process. ``fields`` name the operators in errors; ``models`` answers what these
    ask."""

    def __init__(
        self, worker: Worker, fields: Sequence[str], deadline_s: float, models: ModelServer | None = None
    ) -> None:
        self._worker, self._fields, self._deadline_s = worker, fields, deadline_s
        self._serve = models.serve if models is not None else None

    async def apply(self, numbers: Sequence[int], message: bytes, note: NoteWork) -> bytes | None:
        """Apply operators to a batch; return the rows that are left, or None if there are none."""
        for number in numbers:
            given = message if number == numbers[0] else None
            outcome: Outcome = await self._call(number, message, "apply", number, given)
            note((number, outcome))
            if not outcome.given:
                return None
        result: bytes = await self._call(numbers[-1], message, "result")
        return result

    async def observe(self, number: int, message: bytes) -> float:
        """Show an operator a batch; return the seconds that it took."""
        return await self._call(number, message, "observe", number, message)

    async def finish(self, number: int, batches: int) -> float:
        """Let an operator conclude from all batches that it has seen; return the seconds that it took."""
        return await self._call(number, None, "finish", number, deadline_s=self._deadline_s * max(1, batches))

    async def _call(
        self, number: int, message: bytes | None, method: str, *arguments: Any, deadline_s: float | None = None
    ) -> Any:
        try:
            limit_s = deadline_s or self._deadline_s
            return await self._worker.call(method, *arguments, deadline_s=limit_s, serve=self._serve)
        except (CallFailed, ActorDied, EndpointFailed) as error:
            field, at = self._fields[number], ""
            if message is not None:
                rows = unpacked(message)
                at = f", on the batch of {rows.num_rows} rows that begins with {rows.column(0)[0]}"
            if isinstance(error, CallFailed):
                raise operator_failure(error, f"the operator failed{at}", field) from error
            problem = f"a model that it asks failed{at}: {error.problem}"
            remedy = error.remedy or "see its log; what it has answered is not asked again where answers are kept"
            raise OperatorFailed(problem, remedy, field=field, value=error.field) from error


def operator_failure(error: CallFailed, what: str, field: str) -> OperatorFailed:
    """Return the failure of an operator whose call failed."""
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


def packed(rows: pa.RecordBatch | pa.Table) -> bytes:
    """Return rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    return sink.getvalue().to_pybytes()


def unpacked(message: bytes) -> pa.RecordBatch:
    """Return the batch of an Arrow stream, without a copy."""
    with pa.ipc.open_stream(message) as reader:
        return reader.read_next_batch()
