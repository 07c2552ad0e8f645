"""What the Buffer has acknowledged is on the disk, whatever the disk, the folder or the caller does."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import resource
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayrft.buffer.client import BufferWriter
from rayrft.buffer.events import Event, GroupReport
from rayrft.buffer.log import journal
from rayrft.buffer.log.journal import Position
from rayrft.buffer.schedule import Ticket
from rayrft.errors import DataError, StorageError
from rayrft.experience import to_batch
from rayrft.runtime.waits import ROOM
from tests.buffer.disk import Disk
from tests.buffer.in_process import LocalBuffer, small
from tests.buffer.rows import group, plan
from tests.errors import about
from tests.full_disk import FullDisk
from tests.scripted import remote

CONFIG = small(segment_bytes=6000)
Opened = Callable[..., LocalBuffer]
put = LocalBuffer.put_numbers


def held(buffer: LocalBuffer) -> list[int]:
    return sorted({int(name.split("/")[0]) for name, _ in buffer.held()})


class TestOpening:
    def test_the_log_of_another_run_is_refused(self, buffer: LocalBuffer) -> None:
        buffer.kill()
        with pytest.raises(StorageError, match=r"the log belongs to run 'run'\. Choose another name"):
            LocalBuffer(buffer.folder, CONFIG, run="another")

    def test_two_cannot_write_at_once(self, buffer: LocalBuffer) -> None:
        put(buffer, 1)
        with pytest.raises(StorageError, check=about("buffer")):
            LocalBuffer(buffer.folder, CONFIG)
        put(buffer, 2)
        assert held(buffer) == [1, 2]

    def test_a_folder_that_may_not_be_written_is_named_with_the_remedy(self, tmp_path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o555)
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)  # root may write anywhere
            try:
                with pytest.raises(StorageError, match=rf"{folder}/\w+: .*Make the folder writable for this user"):
                    LocalBuffer(Path(folder), CONFIG)
            finally:
                os.seteuid(user)
        (tmp_path / "file").touch()
        with pytest.raises(StorageError, check=about("buffer")):
            LocalBuffer(tmp_path / "file" / "buffer", CONFIG)

    def test_a_folder_that_vanishes_is_an_error_and_not_a_silent_wait(self, buffer: LocalBuffer) -> None:
        put(buffer, 1)
        buffer.folder.rename(buffer.folder.with_name("gone"))
        with pytest.raises(StorageError, match=r"segment-00000001\.arrow: .*No such file"):
            for number in range(2, 9):
                put(buffer, number)


def fill_disk(of: Any) -> None:
    """From here on the disk that the journal, or the segments, are written to is full."""
    device = os.open("/dev/full", os.O_WRONLY)
    os.dup2(device, of._file._descriptor)
    os.close(device)


class TestFullDisk:
    @pytest.mark.parametrize("full", ["rows", "journal"])
    def test_what_was_acknowledged_is_kept_and_nothing_else_is_acknowledged(
        self, buffer: LocalBuffer, full: str
    ) -> None:
        put(buffer, 1)
        fill_disk(buffer.buffer.store.rows if full == "rows" else buffer.buffer.store.journal)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"No space left on device \(.* free\)\. Free disk space and start"):
                put(buffer, 2)
        buffer.restart()
        assert held(buffer) == [1]
        put(buffer, 2, 3)
        buffer.restart()
        assert held(buffer) == [1, 2, 3]

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
    @pytest.mark.parametrize("full", ["segment", "journal"])
    def test_a_write_of_a_run_waits_for_room_and_is_made_once(
        self, buffer: LocalBuffer, full: str, error: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(buffer, 1)
        disk = FullDisk(monkeypatch, full, error=error)

        async def put_on_full_disk() -> None:
            report = GroupReport(rows=2)
            putting = asyncio.ensure_future(BufferWriter(remote(buffer.buffer)).put(to_batch(group(2)), report))
            assert await asyncio.to_thread(disk.waited_for.wait, 20)
            [wait] = (await buffer.buffer.waiting()).waits
            assert wait.target == ROOM and f"/{full}" in wait.what and f"{os.strerror(error)} (" in wait.what
            assert await buffer.buffer.stats() and not putting.done(), "calls that only read are answered"
            disk.has_room = True
            await putting

        buffer.run(put_on_full_disk())
        assert not buffer.do("waiting").waits
        put(buffer, 3)
        buffer.restart()
        assert held(buffer) == [1, 2, 3] and buffer.buffer.store.torn_bytes == 0

    def test_nothing_is_said_to_be_done_already_that_the_journal_does_not_hold(self, buffer: LocalBuffer) -> None:
        put(buffer, 1, 2)
        buffer.do("open_stage", plan(1, scheduled=False))
        buffer.lease(0)
        fill_disk(buffer.buffer.store.journal)
        for method, *arguments in (("ack", 0), ("lease", 1, 1, 0), ("requeue", 0, 0), ("cover", 1), ("ack", 0)):
            with pytest.raises(StorageError, check=about("journal-00000000.jsonl")):
                buffer.do(method, *arguments)
        buffer.restart()
        assert buffer.do("stats").ledger.trained == 0 and held(buffer) == [1, 2]

    @pytest.mark.parametrize("limit", [3000, 5001, 5999])
    def test_a_write_that_is_cut_short_by_a_limit_leaves_no_trace(self, limit: int, opened: Opened) -> None:
        buffer, acknowledged, most = opened(segment_bytes=1 << 20), list[int](), resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            with pytest.raises(StorageError, match=r"File too large.*Raise the limit"):
                for number in range(99):
                    put(buffer, number)
                    acknowledged.append(number)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        buffer.restart()
        assert held(buffer) == acknowledged
        put(buffer, 99)
        buffer.restart()
        assert held(buffer) == [*acknowledged, 99]


class TestOrder:
    @pytest.mark.parametrize("fsync", ["always", "never"])
    def test_rows_are_on_the_disk_before_the_journal_speaks_of_them(
        self, fsync: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(monkeypatch)
        buffer = opened(segment_bytes=1 << 20, fsync=fsync)
        put(buffer, 0)
        disk.calls.clear()
        put(buffer, 1)
        done = [(call, file.split("-")[0]) for call, file in disk.calls]
        synced = [("write", "segment"), ("fdatasync", "segment"), ("write", "journal"), ("fdatasync", "journal")]
        noted = [("open", "synced"), ("pwrite", "synced")]
        assert done == (synced + noted if fsync == "always" else synced[::2])

    def test_what_is_written_while_the_disk_is_forced_is_forced_the_next_time(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(monkeypatch)
        buffer = opened(segment_bytes=1 << 20, fsync="interval", fsync_s=0.001)

        async def until_synced() -> None:
            while (syncer := buffer.buffer.store._syncer) is not None and not syncer.done():
                await syncer

        real = buffer.buffer.store.journal.sync

        def sync(position: Position) -> None:
            real(position)
            monkeypatch.setattr(buffer.buffer.store.journal, "sync", real)
            failing = buffer.buffer.fail(Ticket(0, 0, 0), "meanwhile")
            asyncio.run_coroutine_threadsafe(failing, buffer.loop).result()

        monkeypatch.setattr(buffer.buffer.store.journal, "sync", sync)
        put(buffer, 1)
        buffer.run(until_synced())
        journal = [call for call, file in disk.calls if file.startswith("journal")]
        assert journal[-2:] == ["write", "fdatasync"]
        segment = [call for call, file in disk.calls if file.startswith("segment")]
        assert segment[:3] == ["open", "write", "fdatasync"]

    def test_a_group_that_is_sent_again_is_not_acknowledged_before_it_is_written(self, buffer: LocalBuffer) -> None:
        put(buffer, 1)
        journal, begun, free = buffer.buffer.store.journal, asyncio.Event(), threading.Event()
        append = journal.append

        def held_up(events: list[Event]) -> None:
            buffer.loop.call_soon_threadsafe(begun.set)
            free.wait()
            append(events)

        journal.append = held_up  # type: ignore[method-assign]

        async def twice() -> None:
            puts = [asyncio.ensure_future(BufferWriter(remote(buffer.buffer)).put(to_batch(group(2))))]
            await begun.wait()
            puts.append(asyncio.ensure_future(BufferWriter(remote(buffer.buffer)).put(to_batch(group(2)))))
            done, _ = await asyncio.wait(puts, timeout=0.3, return_when=asyncio.FIRST_COMPLETED)
            free.set()
            await asyncio.gather(*puts)
            assert not done

        buffer.run(twice())
        buffer.restart()
        assert held(buffer) == [1, 2]


class TestPower:
    """What a machine that loses power does to files that were not forced to the disk."""

    def rows_lost(self, buffer: LocalBuffer) -> None:
        buffer.kill()
        segment = max(buffer.folder.glob("segment-*"))
        os.truncate(segment, segment.stat().st_size - 1)

    def test_the_log_goes_back_to_the_last_group_whose_rows_are_there(self, buffer: LocalBuffer) -> None:
        for number in range(8):
            put(buffer, number)
            if number % 3:
                self.rows_lost(buffer)
                buffer.open()
                assert held(buffer) == list(range(number)) and buffer.buffer.store.torn_bytes > 0
                put(buffer, number)
        assert held(buffer) == list(range(8))

    def test_a_group_that_comes_between_the_sync_of_rows_and_of_the_journal_is_not_said_to_be_on_the_disk(
        self, buffer: LocalBuffer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(buffer, 1)
        store, real = buffer.buffer.store, buffer.buffer.store._sync_rows

        async def sync_rows() -> None:
            await real()
            await BufferWriter(remote(buffer.buffer)).put(to_batch(group(2)))

        monkeypatch.setattr(store, "_sync_rows", sync_rows)
        buffer.do("flush")
        self.rows_lost(buffer)
        buffer.open()
        assert held(buffer) == [1]

    def test_a_lost_segment_is_an_error_and_not_a_loss_of_all_that_came_after(self, buffer: LocalBuffer) -> None:
        for number in range(8):
            put(buffer, number)
        buffer.kill()
        oldest = min(buffer.folder.glob("segment-*"))
        whole = oldest.read_bytes()
        oldest.write_bytes(whole[:-1])
        problem = f"{oldest.name}: {len(whole)} bytes were written and {len(whole) - 1} are"
        with pytest.raises(StorageError, match=problem):
            buffer.open()
        oldest.write_bytes(whole)
        buffer.open()
        assert held(buffer) == list(range(8))

    @pytest.mark.parametrize("fsync", ["always", "never"])
    def test_rows_that_were_forced_to_the_disk_cannot_be_lost_so(self, fsync: str, opened: Opened) -> None:
        buffer = opened(segment_bytes=1 << 20, fsync=fsync)
        put(buffer, 1)
        if fsync == "never":
            buffer.do("flush")
        self.rows_lost(buffer)
        with pytest.raises(StorageError, check=about("segment-00000000.arrow")):
            buffer.open()


class TestLostEnd:
    """A journal whose end is gone, and with it what was acknowledged."""

    def filled(self, opened: Opened, fsync: str = "never") -> LocalBuffer:
        buffer = opened(segment_bytes=1 << 20, fsync=fsync)
        for number in range(6):
            put(buffer, number)
        return buffer

    def cut(self, buffer: LocalBuffer, line: int) -> tuple[Path, bytes]:
        """Keep so many lines of the journal, whole; gives its file, and what it was."""
        buffer.kill()
        [file] = buffer.folder.glob("journal*")
        whole = file.read_bytes()
        file.write_bytes(b"".join(whole.splitlines(keepends=True)[:line]))
        return file, whole

    def refused(self, buffer: LocalBuffer, file: Path) -> None:
        before = {each: each.read_bytes() for each in file.parent.rglob("*") if each.is_file()}
        for _ in range(2):
            with pytest.raises(StorageError, check=about(str(file))):
                buffer.open()
        assert {each: each.read_bytes() for each in before} == before, "left as it was, so that it can be repaired"

    @pytest.mark.parametrize("line", [0, 3, 6])
    def test_one_that_was_on_the_disk_is_damage(self, opened: Opened, line: int) -> None:
        buffer = self.filled(opened, "always")
        file, whole = self.cut(buffer, line)
        self.refused(buffer, file)
        file.write_bytes(whole)
        buffer.open()
        assert held(buffer) == list(range(6))

    def test_one_that_is_gone_with_its_snapshot_is_damage(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(journal, "SNAPSHOT_BYTES", 500)
        monkeypatch.setattr(journal, "SNAPSHOT_RATIO", 0)
        buffer = self.filled(opened)
        buffer.kill()
        for file in [*buffer.folder.glob("snapshot*"), *buffer.folder.glob("journal*")]:
            file.unlink()
        self.refused(buffer, buffer.folder / "journal-00000000.jsonl")

    def test_one_that_a_checkpoint_goes_on_from_is_damage_whatever_the_policy(self, opened: Opened) -> None:
        buffer = self.filled(opened)
        buffer.named["logged"] = buffer.do("flush")
        put(buffer, 6)
        (buffer.folder / "synced").unlink()
        file, whole = self.cut(buffer, 6)
        self.refused(buffer, file)
        file.write_bytes(whole)
        self.cut(buffer, 7)  # what came after the checkpoint was never forced to the disk
        buffer.open()
        assert held(buffer) == list(range(6))

    def test_one_without_steps_that_a_checkpoint_holds_is_damage_also_where_nothing_else_tells(
        self, opened: Opened
    ) -> None:
        buffer = self.filled(opened)
        buffer.do("open_stage", plan(1, scheduled=False))
        buffer.lease(0)
        with pytest.raises(StorageError, check=about(str(buffer.folder), 0)):
            buffer.do("resume", 1, "life")
        buffer.do("ack", 0)
        buffer.do("resume", 1, "life")


class TestDoors:
    def test_a_report_that_is_not_a_number_does_not_keep_the_log_from_being_read(self, buffer: LocalBuffer) -> None:
        for number, reward in enumerate((math.nan, math.inf, -math.inf)):
            buffer.put([(group(number), None)], reward_sum=reward, scored=2)
        before = buffer.buffer.state.training.reports
        buffer.restart()
        assert repr(buffer.buffer.state.training.reports) == repr(before)

    def test_labels_that_cannot_be_written_are_refused_and_the_buffer_goes_on(self, buffer: LocalBuffer) -> None:
        put(buffer, 1)
        for labels in ({"said": "\ud800"}, {"\udfff": "good"}):
            assert buffer.do("feedback", "1/0", None, labels)[0] == "DataError"
        buffer.do("feedback", "1/0", 3.0, {"said": "😀"})
        buffer.restart()
        assert buffer.held() == [("1/0", 3.0), ("1/1", 1.0)]

    @pytest.mark.parametrize("rows", [group(1) + group(2), group(1, name="1") + group(2, name="2")[:1]])
    def test_rows_of_two_groups_put_as_one_are_refused_and_none_is_lost_in_silence(
        self, buffer: LocalBuffer, rows: list[Any]
    ) -> None:
        with pytest.raises(DataError, match="the message holds 2 groups and 1 were announced"):
            buffer.put([(rows, None)])
        assert buffer.do("stats").ledger.sampled == 0

    def test_a_group_that_is_put_twice_at_once_is_taken_once(self, buffer: LocalBuffer) -> None:
        put(buffer, 1, 1)
        stats = buffer.do("stats")
        assert (stats.ledger.sampled, stats.ledger.held, stats.ledger.dropped) == (2, 2, {})
