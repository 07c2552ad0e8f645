"""The log in this process: what is torn is cut and counted, what is damaged is named, and the rest is as it was."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rayrft.buffer.events import Event, Extent
from rayrft.buffer.log import segments
from rayrft.buffer.log.journal import EventJournal
from rayrft.buffer.log.row_log import RowLog, RowSpan
from rayrft.buffer.log.segments import segment_name
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.state import State
from rayrft.buffer.transitions.contents import Began, TaskFailed
from rayrft.buffer.transitions.leases import StepAcked, VersionAdvanced
from rayrft.errors import StorageError
from rayrft.experience import SCHEMA, SCHEMA_VERSION, pack, to_batch
from tests.buffer.in_process import small
from tests.buffer.rows import group
from tests.errors import about

CONFIG = small(segment_bytes=6000)
EVENTS: list[Event] = [
    Began("run", SCHEMA_VERSION),
    VersionAdvanced(1),
    TaskFailed(3, "no\nreason\r\x85"),
    StepAcked(2),
]
pytestmark = pytest.mark.usefixtures("objects")


def journal_of(folder: Path, events: list[Event]) -> Path:
    """A journal with these events; gives its file."""
    journal = EventJournal(Storage(folder))
    journal.open()
    for event in events:
        journal.append([event])
    journal.close()
    [file] = folder.glob("journal*")
    return file


def opened(folder: Path, committed: list[Extent] | None = None) -> RowLog:
    return RowLog(Storage(folder), CONFIG, committed or [])


class TestJournal:
    @pytest.mark.parametrize(
        "garbage", [b"\0" * 99, b'{"half', b'{"event":"acked","step":1}\n', b"\n", b"\xff\n\xfe\n\0"]
    )
    def test_garbage_behind_the_last_line_is_cut_and_counted(self, tmp_path: Path, garbage: bytes) -> None:
        file = journal_of(tmp_path, EVENTS)
        whole = file.read_bytes()
        file.write_bytes(whole + garbage)
        for read in (EventJournal.read, EventJournal.read, EventJournal.open):  # looking at it changes nothing
            assert file.read_bytes() == whole + garbage
            recovered = read(EventJournal(Storage(tmp_path)))
            assert (recovered.events, recovered.torn_bytes) == (EVENTS, len(garbage))
        assert file.read_bytes() == whole

    def test_any_change_before_the_last_line_is_an_error_that_names_the_line_and_mends_nothing(
        self, tmp_path: Path
    ) -> None:
        file = journal_of(tmp_path, EVENTS)
        whole = file.read_bytes()
        first = whole.index(b"\n") + 1
        for place in range(first, whole.index(b"\n", first) + 1):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            file.write_bytes(damaged)
            with pytest.raises(StorageError, match=r"journal-00000000\.jsonl, line 2: the line was changed since"):
                EventJournal(Storage(tmp_path)).open()
            assert file.read_bytes() == damaged

    def test_a_line_of_another_rayrft_is_an_error_that_says_so_before_others_are_read(self, tmp_path: Path) -> None:
        file = journal_of(tmp_path, EVENTS)
        body = b'{"step":1,"event":"forgotten"}'
        file.write_bytes(file.read_bytes() + b'%s,"crc":%d}\n' % (body[:-1], zlib.crc32(body)))
        problem = "line 5: this version of rayrft cannot read the line: unknown event 'forgotten'. Continue with"
        with pytest.raises(StorageError, match=problem):
            EventJournal(Storage(tmp_path)).open()
        bodies = b'{"run":"r","schema":"4","event":"began"}', b'{"step":1,"life":"a","event":"blamed"}'
        lines = [b'%s,"crc":%d}\n' % (body[:-1], zlib.crc32(body)) for body in bodies]
        (tmp_path / "journal-00000000.jsonl").write_bytes(b"".join(lines))
        with pytest.raises(StorageError, match=r"line 1: the log has schema version 4.*Use the version of rayrft that"):
            EventJournal(Storage(tmp_path)).open()

    def test_a_snapshot_that_is_changed_or_of_another_rayrft_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        journal = EventJournal(Storage(tmp_path))
        journal.open()
        journal.begin(pa.py_buffer(b"the state"))
        [file] = tmp_path.glob("snapshot*")
        for place in range(9):
            damaged = bytearray(b"the state")
            damaged[place] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(StorageError, match=rf"{file.name}: the snapshot was changed"):
                EventJournal(Storage(tmp_path)).open()
        state = State(small().sampler, 0, None)
        state.meta.schema = SCHEMA_VERSION
        table = pa.ipc.open_file(state.to_snapshot()).read_all().drop_columns(["digest"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(StorageError, check=about("snapshot")):
            state.restore(sink.getvalue())


class TestRowLog:
    def written(self, folder: Path, groups: int = 6) -> tuple[RowLog, list[Extent], list[RowSpan]]:
        """One group after another, the extents of their segments, and where each group lies."""
        rows = opened(folder)
        extents, spans = {}, []
        for number in range(groups):
            done = rows.append(pack(to_batch(group(number))))
            extents[done.extent.segment] = done.extent
            spans.append(RowSpan(done.extent.segment, done.row, 2))
        return rows, list(extents.values()), spans

    def test_a_byte_changed_anywhere_names_the_segment_and_leaves_the_others_readable(self, tmp_path: Path) -> None:
        rows, extents, spans = self.written(tmp_path)
        assert len(extents) > 1
        file = tmp_path / segment_name(extents[0].segment)
        whole = file.read_bytes()
        for place in [*range(0, len(whole), 97), len(whole) - 1]:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            file.write_bytes(damaged)
            with pytest.raises(StorageError, match=rf"{file.name}: the file was changed since it was written"):
                rows.read(spans[:1])
        file.unlink()
        with pytest.raises(StorageError, match=rf"{file.name}: the file is gone"):
            rows.read(spans[:1])
        assert rows.read(spans[-1:]).column("group_id").to_pylist() == ["5", "5"]

    @pytest.mark.parametrize("behind", ["half a message", "a whole message", "another segment"])
    def test_what_the_journal_does_not_speak_of_is_cut_off_and_counted(self, tmp_path: Path, behind: str) -> None:
        _, extents, spans = self.written(tmp_path)
        message = pack(to_batch(group(9))).to_pybytes()
        torn = message[: len(message) // 2] if behind == "half a message" else message
        last = extents[-1].segment + (behind == "another segment")
        with (tmp_path / segment_name(last)).open("ab") as file:
            file.write(torn)
        rows = opened(tmp_path, extents)
        assert rows.torn_bytes == len(torn)
        assert rows.read(spans).column("group_id").to_pylist() == [str(i // 2) for i in range(12)]
        assert {each.name: each.stat().st_size for each in tmp_path.iterdir()} == {
            segment_name(each.segment): each.nbytes for each in extents
        }

    def test_a_log_that_is_opened_again_goes_on_in_the_segment_where_it_stood(self, tmp_path: Path) -> None:
        straight, interrupted = tmp_path / "straight", tmp_path / "interrupted"
        straight.mkdir()
        _, extents, spans = self.written(straight, 9)
        interrupted.mkdir()
        known: dict[int, Extent] = {}
        for number in range(9):
            rows = opened(interrupted, list(known.values()))
            rows.append(pack(to_batch(group(90))))  # nobody hears of it
            rows = opened(interrupted, list(known.values()))
            done = rows.append(pack(to_batch(group(number))))
            known[done.extent.segment] = done.extent
            blocks = rows.refs(spans[: number + 1])
            assert [self.first_row(*block) for block in blocks] == list(range(0, 10 * number + 1, 10))
        assert list(known.values()) == extents
        assert rows.read(spans).equals(opened(straight, extents).read(spans))

    def first_row(self, ref: int, row: int, tokens: np.ndarray) -> int:
        import ray

        batch = pa.ipc.read_record_batch(ray.get([ref])[0], SCHEMA)
        return int(batch.column("token_ids")[row].as_py()[0])

    def test_a_group_is_read_from_memory_wherever_it_lies_there_and_else_from_the_disk(self, tmp_path: Path) -> None:
        rows, extents, spans = self.written(tmp_path, 9)
        expected = [rows.read([span]) for span in spans]
        for state in ("as written", "merged into blocks", "opened again", "opened again and grown"):
            if state == "merged into blocks":
                rows.refs(spans)
            elif state == "opened again":
                rows = opened(tmp_path, extents)
            elif state == "opened again and grown":
                done = rows.append(pack(to_batch(group(9))))
                spans.append(RowSpan(done.extent.segment, done.row, 2))
                expected.append(rows.read(spans[-1:]))
            assert [rows.read_group(span) for span in spans] == expected, state
        rows.refs(spans)
        for file in tmp_path.iterdir():
            file.write_bytes(b"")
        assert [rows.read_group(span) for span in spans] == expected, "no file was read"

    def test_rows_of_another_schema_are_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(segments, "SCHEMA", SCHEMA.with_metadata({"rayrft.schema": "0"}))
        rows, _, spans = self.written(tmp_path)
        monkeypatch.undo()
        with pytest.raises(StorageError, match=r"the rows have schema version 0; this rayrft reads \d+"):
            rows.read(spans)

    def test_blocks_that_memory_has_no_room_for_come_back_from_the_disk(self, tmp_path: Path) -> None:
        rows = RowLog(Storage(tmp_path), CONFIG.model_copy(update={"memory_bytes": 1}), [])
        done = [rows.append(pack(to_batch(group(number)))) for number in range(8)]
        spans = [RowSpan(each.extent.segment, each.row, 2) for each in done]
        for _ in range(2):
            blocks = rows.refs(spans)
            assert [self.first_row(*block) for block in blocks] == list(range(0, 80, 10))
            assert rows.memory() < 6000, "at most the segment that grows"
