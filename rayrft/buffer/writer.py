"""How producers hand groups to the Buffer: packed once, and as many in a call as have come meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rayrft.buffer.experience import check_filled, check_schema, pack
from rayrft.buffer.log.events import GroupReport
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.validation import Fault

_INLINE_BYTES = 64 << 10
"""A smaller message travels inside the call; a larger one lies in the object store and its reference travels."""

_CALL_BYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """What a producer says of a group that it puts. ``dropped`` counts rows that were sampled and are not in it."""

    group_id: str
    ticket: Ticket | None
    report: GroupReport
    dropped: dict[str, int]
    rows: int
    nbytes: int
    digest: int = 0
    """Of the rows, where there is no ticket: by it the same group is known that is put again."""

    @property
    def sequence(self) -> int | None:
        return None if self.ticket is None else self.ticket.sequence


@dataclass(frozen=True)
class Receipt:
    """What became of a group that was put: it is in the log, but for the rows of ``faults``.

    A group that came without a ticket is taken whole or, where it has ``faults``, not at all.
    """

    group_id: str
    faults: tuple[Fault, ...] = ()


_Waiting = tuple[Entry, pa.RecordBatch, "asyncio.Future[Receipt]"]


def group_key(group_id: str) -> int:
    """64 bits by which the Buffer knows a group."""
    return int.from_bytes(hashlib.blake2b(group_id.encode(), digest_size=8).digest(), "little")


def shard_of(group_id: str, shards: int) -> int:
    """The shard that holds a group."""
    return group_key(group_id) % shards


class BufferWriter:
    """One producer's way into the Buffer, for use in an event loop. ``buffer`` is the actor's handle.

    Groups that are put while a call is under way go together with the next one: the fewer calls, the more groups come.
    """

    def __init__(self, buffer: Any, shards: int = 1) -> None:
        self._buffer = buffer
        self._shards = shards
        self._waiting: list[_Waiting] = []
        self._sender: asyncio.Task[None] | None = None

    async def put(
        self,
        batch: pa.RecordBatch,
        report: GroupReport | None = None,
        *,
        ticket: Ticket | None = None,
        dropped: dict[str, int] | None = None,
    ) -> Receipt:
        """Hand in a group, as one record batch; returns when it is in the Buffer's log, with what is not.

        Raises DataError when the rows are not of the experience schema, StorageError when the log cannot be written.
        """
        check_schema(batch.schema)
        check_filled(batch)
        rows, nbytes = batch.num_rows, batch.nbytes
        report = GroupReport(rows=rows) if report is None else report
        digest = zlib.crc32(pack(batch)) if ticket is None else 0
        entry = Entry(batch.column("group_id")[0].as_py(), ticket, report, dropped or {}, rows, nbytes, digest)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, batch, done))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await done

    async def _send(self) -> None:
        """One call at a time, so that groups arrive in order. What fills a call is packed while another is under way;
        less than that waits for more to come."""
        call: asyncio.Future[Any] | None = None
        while self._waiting:
            if call is not None and sum(entry.nbytes for entry, _, _ in self._waiting) < _CALL_BYTES:
                await call
            packed = [(part, self._pack(part)) for part in self._next()]
            if call is not None:
                await call
            call = asyncio.gather(*(self._call(part, payload) for part, payload in packed))
            await asyncio.sleep(0)  # the call goes out before anything else is packed
            if not self._waiting:
                await call

    def _next(self) -> list[list[_Waiting]]:
        """What goes with the next call, by shard: all that waits, up to a size that is copied at little cost."""
        count, nbytes = 0, 0
        while count < len(self._waiting) and nbytes < _CALL_BYTES:
            nbytes += self._waiting[count][0].nbytes
            count += 1
        sent, self._waiting = self._waiting[:count], self._waiting[count:]
        by_shard: dict[int, list[_Waiting]] = {}
        for each in sent:
            by_shard.setdefault(shard_of(each[0].group_id, self._shards), []).append(each)
        return list(by_shard.values())

    def _pack(self, sent: list[_Waiting]) -> list[Any]:
        import ray

        batches = [batch for _, batch, _ in sent]
        message = pack(pa.concat_batches(batches) if len(batches) > 1 else batches[0])
        return [message if len(message) <= _INLINE_BYTES else ray.put(message)]

    async def _call(self, sent: list[_Waiting], payload: list[Any]) -> None:
        try:
            receipts = await self._buffer.put.remote([entry for entry, _, _ in sent], payload)
        except Exception as error:  # whatever it is, those who wait for these groups get it
            for _, _, done in sent:
                if not done.done():
                    done.set_exception(error)
        else:
            for (_, _, done), receipt in zip(sent, receipts, strict=True):
                if not done.done():
                    done.set_result(receipt)
