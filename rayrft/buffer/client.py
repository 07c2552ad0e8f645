"""Client of the Buffer for producers: packs groups once, and batches the groups that arrive during a call."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.events import GroupReport
from rayrft.buffer.ingest import GroupEntry
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.validation import Fault
from rayrft.errors import DataError
from rayrft.experience import Experience, check_filled, check_schema, from_batch, pack, to_batch
from rayrft.runtime.handle import Handle, put_object
from rayrft.runtime.waits import in_thread, settle

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm

INLINE_BYTES = 64 << 10
"""Smaller messages are sent inside the call; larger ones are put in the object store and sent by reference."""

_CALL_BYTES = 4 << 20


_TOKEN_BYTES, _ROW_BYTES = 16, 512
"""Estimates: what a row takes for each of its tokens, with their log-probs and text, and beside them."""

Rows: TypeAlias = Sequence[Experience] | pa.RecordBatch
_Waiting = tuple[GroupEntry, Rows, "asyncio.Future[list[Fault]]"]


class BufferWriter:
    """Writes one producer's groups to the Buffer, in an event loop.

    Groups that are put while a call is in flight are sent together in the next one.
    """

    def __init__(self, buffer: Handle[Buffer]) -> None:
        self._buffer = buffer
        self._waiting: list[_Waiting] = []
        self._sender: asyncio.Task[None] | None = None

    async def put(
        self,
        rows: Rows,
        report: GroupReport | None = None,
        *,
        ticket: Ticket | None = None,
        dropped: dict[str, int] | None = None,
    ) -> list[Fault]:
        """Put a group, together with others that are sent; return its faults when it is in the Buffer's log.

        Raises DataError if a row or batch does not fit its schema, and StorageError if the log cannot be written.
        """
        if ticket is None:
            rows = _batch(rows)
        if isinstance(rows, pa.RecordBatch):
            check_schema(rows.schema)
            check_filled(rows)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((_entry(rows, ticket, report or GroupReport(rows=len(rows)), dropped or {}), rows, done))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await done

    async def park(self, batch: pa.RecordBatch, ticket: Ticket) -> None:
        """Store the calls of a group's unfinished attempts; return when they are in the log."""
        await self._buffer.call(Buffer.park, _entry(batch, ticket, GroupReport(), {}), [await _payload(pack(batch))])

    async def _send(self) -> None:
        """Send one call at a time, so that groups arrive in order. A full call is packed while another is in flight;
        smaller ones wait for more groups."""
        call: asyncio.Task[None] | None = None
        while self._waiting:
            if call is not None and sum(entry.nbytes for entry, _, _ in self._waiting) < _CALL_BYTES:
                await call
            sent = self._next()
            try:  # the schema of batches was checked
                payload = await _payload(_joined([rows for _, rows, _ in sent]).serialize())
            except DataError:
                self._waiting[:0] = _converted(sent)
            except Exception as error:  # raised in the callers of `put`, as those of the call
                _fail(sent, error)
            else:
                if call is not None:
                    await call
                call = asyncio.create_task(self._call(sent, payload))
                await asyncio.sleep(0)  # send the call before packing the next one
            if call is not None and not self._waiting:
                await call

    def _next(self) -> list[_Waiting]:
        """Return the groups of the next call: all waiting ones up to `_CALL_BYTES`, and up to a group id that occurs
        twice. In one message, groups of one id could not be distinguished."""
        count, nbytes, names = 0, 0, set[str]()
        while count < len(self._waiting) and nbytes < _CALL_BYTES:
            entry = self._waiting[count][0]
            if entry.group_id in names:
                break
            names.add(entry.group_id)
            nbytes += entry.nbytes
            count += 1
        sent, self._waiting = self._waiting[:count], self._waiting[count:]
        return sent

    async def _call(self, sent: list[_Waiting], payload: Any) -> None:
        try:
            faults = await self._buffer.call(Buffer.put, [entry for entry, _, _ in sent], [payload])
        except Exception as error:  # any error is raised in the callers of `put`
            _fail(sent, error)
        else:
            for (_, _, done), found in zip(sent, faults, strict=True):
                settle(done, found)


def _entry(rows: Rows, ticket: Ticket | None, report: GroupReport, dropped: dict[str, int]) -> GroupEntry:
    if isinstance(rows, pa.RecordBatch):
        name, nbytes = rows.column("group_id")[0].as_py(), rows.get_total_buffer_size()
    else:
        name, nbytes = rows[0].group_id, sum(_ROW_BYTES + _TOKEN_BYTES * len(row.token_ids) for row in rows)
    digest = zlib.crc32(pack(rows)) if ticket is None else 0
    return GroupEntry(name, ticket, report, dropped, len(rows), nbytes, digest)


def _batch(rows: Rows) -> pa.RecordBatch:
    return rows if isinstance(rows, pa.RecordBatch) else to_batch(rows)


def _joined(groups: list[Rows]) -> pa.RecordBatch:
    """Return one batch of the rows of groups. Raises DataError if a row does not fit its columns' types."""
    if not any(isinstance(rows, pa.RecordBatch) for rows in groups):
        return to_batch([*chain.from_iterable(groups)])
    return pa.concat_batches([*map(_batch, groups)]) if len(groups) > 1 else _batch(groups[0])


def _converted(groups: list[_Waiting]) -> list[_Waiting]:
    """Return groups with their rows as batches. Groups with a row that does not fit end in the error."""
    fitting = list[_Waiting]()
    for entry, rows, done in groups:
        try:
            fitting.append((entry, _batch(rows), done))
        except DataError as error:
            _fail([(entry, rows, done)], error)
    return fitting


def _fail(sent: list[_Waiting], error: Exception) -> None:
    for _, _, done in sent:
        settle(done, error)


async def _payload(message: pa.Buffer) -> Any:
    return message if len(message) <= INLINE_BYTES else await asyncio.to_thread(put_object, message)


def put_groups(buffer: Handle[Buffer], rows: list[Experience], algorithms: list[Algorithm], group_size: int) -> None:
    """Put rows, grouped by their group ids; return when they are in the log.

    Raises DataError, and puts nothing, if a row does not fit its columns' types, or lacks a reward that advantages of
    the stages' ``algorithms`` need, or if a group has not ``group_size`` trajectories. Raises it also if the Buffer
    rejected groups: ``value`` maps experience or group ids to faults. Rejected groups may be put again, fixed; the
    others are stored.
    """
    by_group: dict[str, list[Experience]] = {}
    for row in from_batch(to_batch(rows)):  # with the columns' types
        by_group.setdefault(row.group_id, []).append(row)
    groups = list(by_group.values())
    for group in groups:
        check_group(group, algorithms, group_size)

    async def put() -> list[list[Fault]]:
        writer = BufferWriter(buffer)
        return await asyncio.gather(*(writer.put(to_batch(group), GroupReport.of(group)) for group in groups))

    answers = in_thread(put)  # in a notebook this thread already runs an event loop
    if faults := [*chain.from_iterable(answers)]:
        refused = sum(map(bool, answers))
        reasons = Counter(fault.reason for fault in faults)
        problem = f"{refused} of {len(groups)} groups were rejected: {', '.join(reasons)}"
        found = {fault.experience_id: fault.reason for fault in faults}
        raise DataError(problem, "fix them, and put them again: the others were stored", field="rows", value=found)


def check_group(group: list[Experience], algorithms: list[Algorithm], group_size: int) -> None:
    """Raise DataError if a group lacks a reward that the algorithms' advantages need, or if it has more trajectories
    than ``group_size``, or fewer although a whole group is compared."""
    size, of = len({row.repeat for row in group}), group[0].group_id
    compared = not all(algorithm.advantage_is_by_token for algorithm in algorithms)
    if size > group_size or (compared and size < group_size):
        problem = f"a group has {size} trajectories, but the stage's group_size is {group_size}"
        raise DataError(problem, "put whole groups of that size", field="group_id", value=of)
    if any(row.reward is None for row in group):
        raise DataError("a row has no reward", "score the row", field="reward", value=of)
    greedy = [algorithm.advantage for algorithm in algorithms if "greedy_baseline" in algorithm.needs]
    if greedy and any(row.greedy_reward is None for row in group):
        problem = f"advantage {greedy[0]!r} needs the reward of a greedy answer to the task"
        raise DataError(problem, "set it on every row of the group", field="greedy_reward", value=of)
