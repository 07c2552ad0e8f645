"""A stage that is opened again: what it was asked for may differ, and nothing begins before its time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayrft.buffer.log.storage import Appender, Storage
from rayrft.buffer.schedule import Ticket
from rayrft.errors import RayrftError, StorageError
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import expert_rows, group, packed, plan

Opened = Callable[..., LocalBuffer]


def fill(buffer: LocalBuffer, call: int, count: int, producer: str = "explorer") -> list[Ticket]:
    """Ask for tickets and put a group for each."""
    tickets: list[Ticket] = buffer.do("admit", producer, call, count)
    versions = [group(ticket.sequence, version=ticket.version) for ticket in tickets]
    buffer.put(list(zip(versions, tickets, strict=True)))
    return tickets


def take(buffer: LocalBuffer, step: int) -> list[str]:
    """Ids of the groups of the step's batch."""
    _, shares, *_ = buffer.lease(step, 1)
    return sorted({name.split("/")[0] for name, *_ in shares[0]})


def test_nothing_is_admitted_until_the_weights_of_the_last_repeated_step_are_published(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, name="mix"))
    for step in range(2):
        fill(buffer, step, 1)
        buffer.trained(step, advance=True)
    buffer.restart()
    buffer.do("resume", 0, "again")
    buffer.do("open_stage", plan(1, name="mix"))
    for step in range(2):
        assert not buffer.may_admit()
        buffer.trained(step)
        assert not buffer.may_admit(), "engines still hold the weights from before this step"
        buffer.do("advance", step + 1)
    assert buffer.may_admit()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sampler", ["fifo", "uniform"])
def test_a_stage_goes_on_with_another_batch_size(opened: Opened, groups: int, sampler: str) -> None:
    buffer = opened(sampler={"name": sampler})
    buffer.do("open_stage", plan(2, name="mix", max_staleness=2))
    assert len(fill(buffer, 0, 6)) == 6
    first = take(buffer, 0)
    buffer.restart()
    buffer.do("resume", 0, "again")
    buffer.do("open_stage", plan(groups, name="mix", max_staleness=2))
    assert take(buffer, 0) == first, "what was leased is the same"
    for step in range(2):
        assert len(take(buffer, step)) == (2 if step == 0 else groups)
        buffer.trained(step, advance=True)
    assert buffer.buffer._state.capacity == 3 * groups - (4 - groups), "three steps' groups, less those that wait"


@pytest.mark.parametrize("sampler", ["fifo", "uniform"])
def test_a_stage_goes_on_with_a_tighter_bound_of_staleness(opened: Opened, sampler: str) -> None:
    buffer = opened(sampler={"name": sampler})
    buffer.do("open_stage", plan(1, name="mix", max_staleness=3))
    fill(buffer, 0, 4)
    for step in range(2):
        buffer.trained(step, advance=True)
    buffer.restart()
    buffer.do("resume", 2, "again")
    buffer.do("open_stage", plan(1, name="mix", max_staleness=1))
    assert buffer.do("stats").ledger.dropped == {"stale": 4}, "two groups of version 0 are too old for step 2"
    fresh = fill(buffer, 1, 1, "explorer of the resumed run")
    assert take(buffer, 2) == [str(ticket.sequence) for ticket in fresh]


def test_the_batch_of_a_step_that_a_checkpoint_holds_is_said_to_be_gone(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, name="mix"))
    for step in range(3):
        fill(buffer, step, 1)
        buffer.trained(step, advance=True)
    buffer.do("cover", 2)
    buffer.restart()
    buffer.do("resume", 1, "again")
    with pytest.raises(RayrftError, match=r"deleted, because a checkpoint covers it .* from a checkpoint of step 2 or"):
        buffer.do("lease", 1, 1, 60)


def test_tickets_of_a_stage_before_keep_no_step_waiting_for_tasks_that_have_ended(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, name="first", max_staleness=1))
    assert len(buffer.do("admit", "explorer", 0, 2)) == 2, "they are abandoned when the stage is closed"
    buffer.do("close_stage")
    buffer.do("open_stage", plan(1, name="second", max_staleness=1))
    buffer.do("finish")
    assert buffer.do("lease", 0, 1, 60) == ("LeaseEnded", "end_of_data")


def test_that_no_more_groups_will_be_put_is_known_after_a_restart(buffer: LocalBuffer) -> None:
    filling = plan(1, name="fill", scheduled=False)
    buffer.do("open_stage", filling)
    buffer.put_numbers(0)
    buffer.do("finish")
    buffer.restart()
    buffer.do("resume", 0, "again")
    buffer.do("open_stage", filling)
    assert take(buffer, 0) == ["0"]
    assert buffer.do("lease", 1, 1, 60) == ("LeaseEnded", "end_of_data")


def test_a_full_buffer_of_rows_to_replay_takes_the_new_groups_that_the_next_step_waits_for(opened: Opened) -> None:
    buffer = opened(max_rows=4, when_full="wait", sampler={"name": "uniform", "max_uses": 4, "replay_ratio": 1})
    buffer.do("open_stage", plan(2, name="mix", max_staleness=3))
    fill(buffer, 0, 2)
    buffer.trained(0, advance=True)
    assert buffer.do("stats").ledger.held == 4 and buffer.may_admit()
    fill(buffer, 1, 2)
    assert len(take(buffer, 1)) == 2


def test_rows_that_were_not_forced_to_the_disk_stand_elsewhere_until_they_are(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a segment is deleted, everything that was appended anywhere is on the disk."""
    loose: set[int] = set()
    deleted = []

    def append(self: Appender, data: Any, real: Any = Appender.append) -> None:
        real(self, data)
        loose.add(id(self))

    def sync(self: Appender, real: Any = Appender.sync) -> None:
        real(self)
        loose.discard(id(self))

    def delete(self: Storage, name: str, real: Any = Storage.delete) -> None:
        if name.startswith(("segment-", "expert-")):
            assert not loose, f"{name} is deleted before what replaces it is on the disk"
            deleted.append(name)
        real(self, name)

    for owner, function in ((Appender, append), (Appender, sync), (Storage, delete)):
        monkeypatch.setattr(owner, function.__name__, function)
    buffer = opened(log_bytes=20_000, segment_bytes=3000)
    buffer.do("load", "gold", packed(expert_rows(4)))
    buffer.do("load", "gold", packed(expert_rows(6)))
    buffer.do("open_stage", plan(1, name="fill", scheduled=False))
    for number in range(40):
        buffer.put_numbers(number)
        if number % 4:
            buffer.trained(number)
            buffer.do("cover", number)
    assert len([name for name in deleted if name.startswith("segment")]) > 3 and deleted[0].startswith("expert")


def test_a_file_whose_sync_failed_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Storage(tmp_path).open("file")
    file.append(b"one")
    with monkeypatch.context() as broken:
        broken.setattr("os.fdatasync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StorageError, match="Input/output error"):
            file.sync()
    for call in (file.sync, lambda: file.append(b"two")):
        with pytest.raises(StorageError, match="Input/output error"):
            call()
    assert (tmp_path / "file").read_bytes() == b"one"
