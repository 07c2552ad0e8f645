"""A stage that is opened again: what it was asked for may differ, and nothing begins before its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayrft.buffer.events import Extent
from rayrft.buffer.expert_cursor import ExpertCursor
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.ledger import Ledger
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.schedule import Ticket
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import RayrftError, StorageError
from tests.buffer.disk import Disk
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import expert_rows, group, packed, pairs, plan

Opened = Callable[..., LocalBuffer]


def fill(buffer: LocalBuffer, call: int, count: int, producer: str = "explorer") -> list[Ticket]:
    """Ask for tickets and put a group for each."""
    tickets: list[Ticket] = buffer.do("admit", producer, call, count)
    versions = [group(ticket.sequence, version=ticket.version) for ticket in tickets]
    buffer.put(list(zip(versions, tickets, strict=True)))
    return tickets


def take(buffer: LocalBuffer, step: int) -> list[str]:
    """Ids of the groups of the step's batch."""
    return sorted({name.split("/")[0] for name in buffer.leased(step)})


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
    assert buffer.buffer.state.capacity == 3 * groups - (4 - groups), "three steps' groups, less those that wait"


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


def test_before_rows_are_deleted_everything_that_was_written_anywhere_is_on_the_disk(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    buffer = opened(log_bytes=20_000, segment_bytes=3000)
    buffer.do("load", "gold", packed(expert_rows(4)))
    buffer.do("load", "gold", packed(expert_rows(6)))
    buffer.do("open_stage", plan(1, name="fill", scheduled=False))
    for number in range(40):
        buffer.put_numbers(number)
        if number % 4:
            buffer.trained(number)
            buffer.do("cover", number)
    loose, deleted = set[str](), list[str]()
    for call, file in disk.calls:
        if call == "write":
            loose.add(file)
        elif call in ("fsync", "fdatasync"):
            loose.discard(file)
        elif call == "unlink" and file.startswith(("segment-", "expert-")):
            assert not loose, f"{file} is deleted before what replaces it is on the disk"
            deleted.append(file)
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


# Rows on which a step fails: tried once more by themselves, then left out and counted, whatever is killed between


def begin(buffer: LocalBuffer, groups: int, count: int, **more: Any) -> list[str]:
    """A stage that takes so many groups a step, and groups 1 .. ``count``; gives the rows of its first batch."""
    buffer.do("open_stage", plan(groups, scheduled=False, name="stage", **more))
    buffer.put_numbers(*range(1, count + 1))
    return buffer.leased(0)


def alone(buffer: LocalBuffer) -> int:
    """How many rows of the first batch are to stand alone."""
    return sum(int(part.alone.sum()) for share in buffer.do("lease", 0, 2, 0).shares for part in share.parts)


def blame(buffer: LocalBuffer, *rows: str, attempts: Sequence[str] = ("first", "second")) -> None:
    """The first step fails on these rows in each attempt, and the Buffer dies."""
    for attempt in attempts:
        for _ in range(2):  # a call may be made again
            buffer.do("blame", 0, attempt, [*rows])
        buffer.restart()


def resumed(buffer: LocalBuffer, attempt: str, *rows: str) -> list[str]:
    """The run fails on these rows, and is resumed; gives the rows of its first batch."""
    blame(buffer, *rows, attempts=[attempt])
    buffer.do("resume", 0, f"after the {attempt}")
    buffer.do("open_stage", plan(2, scheduled=False, name="stage"))
    return buffer.leased(0)


def test_a_row_that_fails_twice_is_left_out_with_its_group_and_counted(buffer: LocalBuffer) -> None:
    whole = begin(buffer, 2, 3)
    assert whole == ["1/0", "1/1", "2/0", "2/1"] and alone(buffer) == 0
    assert resumed(buffer, "first", "1/1", "2/0") == whole
    assert alone(buffer) == 4, "each row that may be to blame by itself"
    assert resumed(buffer, "second", "2/0") == ["1/0", "1/1"] and alone(buffer) == 2
    buffer.do("ack", 0)
    stats = buffer.do("stats")
    assert stats.ledger == Ledger(sampled=6, trained=2, dropped={"failed_twice": 2}, held=2)


def test_rows_that_fail_once_are_trained(buffer: LocalBuffer) -> None:
    begin(buffer, 2, 2)
    resumed(buffer, "first", "1/1")
    assert resumed(buffer, "second", "2/1") == ["1/0", "1/1", "2/0", "2/1"]
    buffer.do("ack", 0)
    blame(buffer, "1/1", attempts=["third"])
    assert buffer.do("stats").ledger.trained == 4, "a step that is trained is beyond blame"


def test_a_step_of_which_nothing_is_left_gets_other_groups(buffer: LocalBuffer) -> None:
    assert begin(buffer, 1, 2) == ["1/0", "1/1"]
    blame(buffer, "1/0")
    assert buffer.leased(0) == ["2/0", "2/1"]


def test_a_last_step_of_which_nothing_is_left_may_have_others_sampled(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, name="stage", steps=1, max_staleness=1))
    fill(buffer, 1, 1)
    assert buffer.leased(0) == ["0/0", "0/1"] and not buffer.may_admit(), "it has its batch"
    blame(buffer, "0/0")
    assert buffer.may_admit()


def test_a_step_whose_batch_is_discarded_gets_another_and_groups_that_no_step_has_trained_are_dropped(
    opened: Opened,
) -> None:
    buffer = opened(sampler={"name": "uniform", "max_uses": 2})
    buffer.do("open_stage", plan(3, scheduled=False, name="stage"))
    buffer.put_numbers(1, 2, 3)
    first = buffer.trained(0, advance=True)
    buffer.put_numbers(4, 5)
    second = buffer.leased(1)
    fresh = {row for row in second if row[0] in "45"}
    assert fresh and set(second) & set(first)
    for _ in range(2):  # a call may be made again
        buffer.do("discard_batch", 1)
    buffer.restart()
    assert buffer.do("stats").ledger.dropped == {"not_finite": len(fresh)}
    buffer.do("resume", 0, "again")
    assert buffer.leased(0) == first, "the checkpoint is from before this step"
    buffer.do("open_stage", plan(3, scheduled=False, name="stage"))
    buffer.put_numbers(6, 7, 8)
    for step in range(2):
        buffer.trained(step, advance=True)
        buffer.do("discard_batch", step)
    assert not fresh & set(buffer.leased(2))
    ledger = buffer.do("stats").ledger
    assert ledger.closes and ledger.dropped == {"not_finite": len(fresh)}


def test_mini_batches_are_as_few_as_what_is_left(buffer: LocalBuffer) -> None:
    begin(buffer, 2, 2, mini_batches=2)
    blame(buffer, "1/0")
    assert [len(share.rows) for share in buffer.do("lease", 0, 1, 0).shares] == [1]


@pytest.mark.parametrize("unit", [1, 2], ids=["conversations", "pairs"])
def test_a_demonstration_that_fails_twice_is_drawn_no_more(buffer: LocalBuffer, unit: int) -> None:
    gold = pairs(3) if unit == 2 else expert_rows(6)
    buffer.do("load", "gold", packed(gold))
    buffer.do("open_stage", plan(0, expert_rows=4, demonstrations="gold", pairs=unit == 2))
    first = buffer.leased(0)
    gone = [row.experience_id for row in gold if row.experience_id in first][:unit]
    blame(buffer, gone[-1])
    assert buffer.leased(0) == sorted(set(first) - set(gone))
    drawn = [name for step in range(1, 7) for name in buffer.leased(step)]
    assert len(drawn) == 24 and not set(drawn) & set(gone)
    buffer.restart()
    assert [name for step in range(1, 7) for name in buffer.leased(step)] == drawn


def test_every_epoch_has_each_of_the_other_demonstrations_once() -> None:
    cursor, drawn = ExpertCursor(Extent(0, rows=6), seed=0), list[int]()
    cursor.advance(4)
    cursor.exclude(cursor.peek(2)[:1])  # still to come in this epoch
    while len(drawn) < 31:
        drawn += cursor.peek(3)
        cursor.advance(3)
    assert [len(set(drawn[at : at + 5])) for at in range(1, 31, 5)] == [5] * 6 and cursor.excluded[0] not in drawn


def test_an_open_stage_is_adjusted_and_stays_so_when_the_buffer_dies(opened: Opened) -> None:
    buffer = opened(sampler={"name": "uniform", "max_uses": 3})
    stage = plan(1, name="mix", max_staleness=3)
    buffer.do("open_stage", stage)
    fill(buffer, 0, 4)
    buffer.trained(0, advance=True)
    [used] = [slot for slot, uses in enumerate(buffer.buffer.state.groups.uses) if uses]
    once = SamplerConfig(name="uniform", max_uses=1)
    buffer.do("adjust_stage", replace(stage, name="another", sampler=once))
    assert buffer.buffer.state.config.max_uses == 3, "it is not the open stage"
    buffer.do("adjust_stage", replace(stage, max_staleness=1, sampler=once))
    buffer.restart()
    state = buffer.buffer.state
    assert state.config == once and state.stage.plan is not None and state.stage.plan.max_staleness == 1
    assert state.groups.status[used] == GroupStatus.TRAINED, "no step may draw it again"
    buffer.do("advance", 2)
    ledger = buffer.do("stats").ledger
    assert ledger.closes and ledger.dropped == {"stale": 6} and ledger.trained == 2


def test_a_run_that_was_killed_before_it_recorded_its_new_weights_has_them_when_it_resumes(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, name="mix"))
    fill(buffer, 0, 1)
    buffer.trained(0)
    buffer.restart()
    buffer.do("resume", 1, "again")
    buffer.do("open_stage", plan(1, name="mix"))
    assert buffer.may_admit()
