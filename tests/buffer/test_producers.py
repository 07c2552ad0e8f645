"""Tickets, what comes of them, and producers that end or die."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest

from rayrft.buffer import client
from rayrft.buffer.client import BufferWriter
from rayrft.errors import DataError
from rayrft.experience import to_batch
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import group, plan
from tests.errors import about
from tests.scripted import remote


def test_admission_waits_for_new_weights_and_is_woken_by_them(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    [ticket] = buffer.do("admit", "explorer", 1, 10)
    buffer.put([(group(0), ticket)])
    waiting = buffer.begin("admit", "explorer", 2, 10)
    buffer.trained(0)
    assert not waiting.done()
    buffer.do("advance", 1)
    [later] = buffer.run(waiting)
    assert (later.version, later.deadline) == (1, 1)


def test_a_closed_stage_wakes_all_that_a_producer_waits_for(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    [ticket] = buffer.do("admit", "explorer", 1, 10)
    buffer.put([(group(0), ticket)])
    waiting = [buffer.begin("admit", "explorer", 2, 10), buffer.begin("leased", 0), buffer.begin("closed")]
    buffer.lease(0)
    assert buffer.do("leased", -1) == 0 and not any(each.done() for each in waiting)
    buffer.do("close_stage")
    assert [buffer.run(each) for each in waiting] == [[], 0, None]


def test_rows_of_another_schema_are_refused(buffer: LocalBuffer) -> None:
    with pytest.raises(DataError, check=about("schema")):
        buffer.run(BufferWriter(remote(buffer.buffer)).put(pa.RecordBatch.from_pydict({"group_id": ["x"]})))


def test_a_group_that_cannot_be_sent_is_an_error_of_its_own(
    buffer: LocalBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full object store, for example: who waits for the receipt must not wait for ever."""
    payload, errors, writer = client._payload, [OSError("full")], BufferWriter(remote(buffer.buffer))

    def sometimes(message: pa.Buffer) -> Any:
        if errors:
            raise errors.pop()
        return payload(message)

    async def put_two() -> list[Any]:
        async with asyncio.timeout(60):
            first = await asyncio.gather(writer.put(to_batch(group(0))), return_exceptions=True)
            return [*first, await writer.put(to_batch(group(1)))]

    monkeypatch.setattr(client, "_payload", sometimes)
    refused, receipt = buffer.run(put_two())
    assert isinstance(refused, OSError) and receipt.faults == () and buffer.do("stats").ledger.held == 2


def test_groups_of_an_ended_stage_are_dropped_and_not_taken_for_those_of_the_next(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, max_staleness=1))
    left, late = buffer.do("admit", "explorer", 1, 10)
    buffer.put([(group(0), left)])
    buffer.do("close_stage")
    buffer.do("open_stage", plan(1, version=5))
    [new] = buffer.do("admit", "explorer", 2, 10)
    buffer.put([(group(1), late), (group(2, version=5), new)])
    assert buffer.trained(5) == ["2/0", "2/1"]
    assert buffer.do("stats").ledger.dropped == {"stage_ended": 2, "late": 2}


def test_tickets_of_the_life_before_go_to_the_next(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    first = buffer.do("admit", "one", 1, 1)
    buffer.resume(0, "again")
    assert buffer.do("admit", "two", 1, 1) == first
    assert buffer.do("admit", "one", 2, 1) == ("DataError", "one")


def test_a_request_for_tickets_that_comes_after_a_later_one_gets_none(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(3))
    later = buffer.do("admit", "one", 2, 1)
    assert [buffer.do("admit", "one", call, 1) for call in (1, 2)] == [[], later]
