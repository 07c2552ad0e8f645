"""A log read without its actor: beside a live one, after a crash, and where it is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rayrft.buffer.events import Event
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.log.journal import EventJournal
from rayrft.buffer.log.segments import read_log_rows, segment_name
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import ARCHIVE_SCHEMA, Archive, StateReader
from rayrft.buffer.state import State
from rayrft.buffer.transitions import decode
from rayrft.buffer.transitions.contents import Began
from rayrft.buffer.transitions.leases import VersionAdvanced
from rayrft.config import dump_config, load_config
from rayrft.config.buffer import SamplerConfig
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import DataError, StorageError
from rayrft.experience import SCHEMA, SCHEMA_VERSION
from tests.buffer.in_process import LocalBuffer, ObjectTable, small
from tests.buffer.live import history
from tests.buffer.rows import group, plan
from tests.e2e.conftest import small_config
from tests.errors import about

Ended = tuple[Path, dict[str, list[int]]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The log of a Buffer that was killed after its `history`, and the groups by status."""
    with pytest.MonkeyPatch.context() as patch:
        ObjectTable(patch)
        buffer = LocalBuffer(tmp_path_factory.mktemp("ended"), small(segment_bytes=4096))
        expected = history(buffer, length=1000)
        buffer.kill()
        return buffer.folder, expected


@pytest.fixture
def log(ended: Ended, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    shutil.copytree(ended[0], tmp_path / "log")
    return tmp_path / "log"


def archive(folder: Path, **sampler: Any) -> Archive:
    return Archive(folder, SamplerConfig(**sampler))


def rows(of: Archive, store: str = "usual", **asked: Any) -> list[dict[str, Any]]:
    return [row for batch in of.rows(store, **asked) for row in batch.to_pylist(maps_as_pydicts="strict")]


def group_statuses(of: Archive, **asked: Any) -> dict[str, list[int]]:
    """Groups by group_status; every group whole."""
    found: dict[str, list[int]] = {}
    seen = [(row["group_status"], row["group_id"], row["experience_id"]) for row in rows(of, **asked)]
    assert len(set(seen)) == len(seen)
    for group_status, number, _ in sorted(seen)[::2]:
        found.setdefault(group_status, []).append(int(number))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.arrow"))


def test_every_row_is_there_with_what_became_of_it(ended: Ended) -> None:
    folder, expected = ended
    seen = archive(folder)
    assert group_statuses(seen) == expected
    assert seen.stores == ["usual", "expert/gold"]
    assert all(batch.schema.equals(ARCHIVE_SCHEMA) for store in seen.stores for batch in seen.rows(store))
    steps = {row["group_id"]: (row["trained_step"], row["uses"]) for row in rows(seen)}
    assert steps == {"0": (0, 1), "1": (0, 1), **{number: (None, 0) for number in "2349"}}
    assert {row["group_status"] for row in rows(seen, "expert/gold")} == {None} and len(rows(seen, "expert/gold")) == 5
    assert all((folder / row["segment"]).is_file() for row in [*rows(seen), *rows(seen, "expert/gold")])
    labels = {row["experience_id"]: row["labels"] for row in rows(seen) if row["group_id"] == "4"}
    assert labels == {"4/0": {"quality": "good"}, "4/1": {}}, "what feedback changed is there once, as it is now"


def test_the_ledger_is_the_live_ones_and_stores_are_counted(buffer: LocalBuffer) -> None:
    history(buffer)
    stats, live = archive(buffer.folder).stats(), buffer.do("stats")
    assert (stats.ledger, stats.expert) == (live.ledger, live.expert)
    usual = stats.stores["usual"]
    assert usual == usual | {"rows": 12, "groups": 6, "trained": 4, "leased": 4, "ready": 2, "dropped": 2}
    assert (
        usual["bytes"]
        == buffer.buffer.state.contents.log_bytes
        == sum(path.stat().st_size for path in segments(buffer.folder))
    )
    assert stats.stores["expert/gold"]["rows"] == 5
    assert (stats.late_feedback, stats.torn_bytes, stats.run) == (1, 0, "run")


def test_a_live_log_is_neither_locked_nor_changed_by_its_readers(buffer: LocalBuffer) -> None:
    expected = history(buffer)
    before = contents(buffer.folder)
    for _ in range(2):
        seen = archive(buffer.folder)
        assert group_statuses(seen) == expected
        seen.stats()
        seen.find("0/1")
    assert contents(buffer.folder) == before
    buffer.put_numbers(5)
    assert group_statuses(archive(buffer.folder)) == expected | {"ready": [4, 5]}
    assert group_statuses(seen) == expected, "an archive stands where it was opened"


def test_what_a_crash_left_behind_is_reported_and_does_not_count(ended: Ended, log: Path) -> None:
    [journal] = log.glob("journal-*")
    for path in (journal, segments(log)[-1]):
        with path.open("ab") as file:
            file.write(b'{"event":"stored","sha')
    before = contents(log)
    seen = archive(log)
    assert group_statuses(seen) == ended[1] and seen.stats().torn_bytes == 44
    assert contents(log) == before


def test_a_run_with_tasks_is_read_without_them_even_behind_their_end(opened: Callable[..., LocalBuffer]) -> None:
    tasks = TaskSetSpec(list("abcde"), [0] * 5, [1.0], sampler="shuffled", seed=0, epochs=1)
    buffer = opened(tasks=tasks)
    for stage in range(3):
        buffer.do("open_stage", plan(2, max_staleness=1, version=stage))
        for ticket in buffer.do("admit", "test", stage, 2):
            buffer.put([(group(ticket.sequence, version=stage), ticket)])
        if stage == 2:
            assert buffer.do("admit", "test", 3, 1) == []
        buffer.do("close_stage")
    live, stats = buffer.do("stats"), archive(buffer.folder).stats()
    assert live.ledger.sampled == 10 and buffer.buffer.state.tasks[""].position == 5
    assert (stats.ledger, stats.expert) == (live.ledger, live.expert)


def test_columns_and_conditions_on_what_became_of_a_row(log: Path) -> None:
    seen = archive(log)
    kept = rows(seen, columns=["experience_id"], where="group_status = 'trained' and reward = 1")
    assert kept == [{"experience_id": "0/1"}, {"experience_id": "1/1"}]
    with pytest.raises(DataError, check=about("store")):
        seen.rows("expert/silver")


def test_a_row_is_found_as_it_is_now_and_an_unknown_id_is_named(log: Path) -> None:
    found = archive(log).find("4/0").experience
    assert (set(found.token_ids), found.reward, found.labels) == ({40}, 7.0, {"quality": "good"})
    for unknown in ("0/2", "77/0", "", "0/1/2"):
        with pytest.raises(DataError, match=f"no row of this id is in the log .found '{unknown}'"):
            archive(log).find(unknown)


class TestDamage:
    def test_a_damaged_segment_is_named_and_the_others_stay_readable(self, log: Path) -> None:
        whole = {row["experience_id"]: row["segment"] for row in rows(archive(log))}
        broken = whole["2/0"]
        data = bytearray((log / broken).read_bytes())
        data[len(data) // 2] ^= 0xFF
        (log / broken).write_bytes(data)
        with pytest.raises(StorageError, match=rf"{broken}: the file was changed"):
            rows(archive(log))
        seen = archive(log)
        kept = {row["experience_id"] for row in rows(seen, skip_damaged=True)}
        lost = {name for name, segment in whole.items() if segment == broken}
        assert kept == whole.keys() - lost and kept and seen.damaged == {str(log / broken): len(lost)}
        with pytest.raises(StorageError, match=broken):
            seen.find("2/0")
        assert seen.find("4/0").group_status == "ready" and seen.stats().ledger.sampled == 12

    def test_missing_demonstrations_and_a_folder_without_a_log_are_named(self, log: Path, tmp_path: Path) -> None:
        [file] = log.glob("expert-gold*.arrow")
        file.unlink()
        seen = archive(log)
        with pytest.raises(StorageError, match=f"{file.name}: the file is gone"):
            rows(seen, "expert/gold")
        assert rows(seen, "expert/gold", skip_damaged=True) == [] and seen.damaged == {str(file): 5}
        for folder in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(StorageError, match="no Buffer has written here"):
                archive(folder)


def test_the_log_of_a_run_is_found_in_its_folder_wherever_that_was_moved(log: Path, tmp_path: Path) -> None:
    config = load_config(small_config(tmp_path / "elsewhere", "moved"))
    folder = tmp_path / "moved.20260101-000000"
    shutil.copytree(log, folder / "buffer")
    (folder / "config.yaml").write_text(dump_config(config))
    assert Archive.of_run(folder).stats() == archive(log).stats()


def test_other_programs_read_the_log(log: Path) -> None:
    import duckdb
    import pandas as pd

    files, [journal] = segments(log), log.glob("journal-*")
    table = pa.concat_tables(pa.ipc.open_stream(file.read_bytes()).read_all() for file in files)
    assert table.schema.equals(SCHEMA) and table.num_rows == 14, "two rows were written again with feedback"
    frame = table.to_pandas()
    assert frame.groupby("group_id")["reward"].max().to_dict() == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 7, "9": 1}
    assert frame["token_ids"][0].tolist() == [90] * 1000
    events = pd.read_json(journal, lines=True)
    kinds = ["groups_stored", "batch_leased", "step_acked", "demonstrations_loaded"]
    assert events["event"].value_counts()[kinds].tolist() == [6, 2, 1, 1]
    labelled = "select max(reward) from rows where labels['quality'] = 'good'"
    assert duckdb.from_arrow(table).query("rows", labelled).fetchall() == [(7.0,)]
    assert duckdb.sql(f"select count(*) from read_json('{journal}') where event = 'groups_stored'").fetchall() == [(6,)]


# What a live Buffer does between two looks at its log


class Writer:
    """Writes a journal whose events say the version, and begins a new one on request."""

    def __init__(self, folder: Path) -> None:
        self.version = 0
        self._state = State(SamplerConfig(), 0, None)
        self._journal = EventJournal(Storage(folder))
        self._journal.open()
        self._write(Began("run", SCHEMA_VERSION))
        self.compact()

    def compact(self) -> None:
        self._journal.begin(self._state.to_snapshot())
        self.version += 1
        self._write(VersionAdvanced(self.version))

    def _write(self, event: Event) -> None:
        event.apply(self._state)
        self._journal.append([event])


class Interrupted(Storage):
    """Something happens before a look at the files, counted from 1, and before every later one, up to ``times``."""

    def __init__(self, folder: Path, before: int, happens: Callable[[], None], times: int = 1) -> None:
        super().__init__(folder)
        self._before, self._happens, self._times = before, happens, times
        self._looks = 0
        self.interruptions = 0

    def files(self) -> dict[str, int]:
        self._look()
        return super().files()

    def read(self, name: str) -> pa.Buffer:
        self._look()
        return super().read(name)

    def _look(self) -> None:
        self._looks += 1
        if self._looks >= self._before and self.interruptions < self._times:
            self.interruptions += 1
            self._happens()


def test_a_journal_that_is_replaced_while_it_is_read_is_read_again_and_if_it_always_is_given_up(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for before in range(1, 6):
        reader = Interrupted(tmp_path, before, writer.compact)
        state = StateReader(reader, SamplerConfig(), 0).read()
        assert (state.training.version, state.meta.run) == (writer.version, "run")
        assert reader.interruptions == 1
    with pytest.raises(StorageError, match="each of the 5 times"):
        StateReader(Interrupted(tmp_path, 1, writer.compact, times=100), SamplerConfig(), 0).read()


def test_groups_are_read_once_wherever_they_are_moved(opened: Callable[..., LocalBuffer]) -> None:
    buffer = opened(segment_bytes=400_000, log_bytes=1 << 20)
    for number in range(8):
        buffer.put([(group(number, length=5800), None)])
    reading = Archive(buffer.folder, SamplerConfig()).rows(columns=["group_id", "segment"])
    before = next(reading).to_pylist()
    assert {row["group_id"] for row in before} == {"0", "1", "2", "3"}
    buffer.do("open_stage", plan(7, scheduled=False))
    buffer.trained(0)
    for number in range(8, 16):
        buffer.put([(group(number, length=5800), None)])
    buffer.do("cover", 1)  # nothing needs the first two segments any more, but for group 7
    after = [row for batch in reading for row in batch.to_pylist()]
    found = [row["group_id"] for row in [*before, *after]]
    assert {number: found.count(number) for number in found} == dict.fromkeys(found, 2)
    assert {"7", "8", "15"} <= set(found)
    moved = {row["segment"] for row in after if row["group_id"] == "7"}
    assert moved and not moved & {segment_name(number) for number in (0, 1)}


def test_a_log_is_read_from_where_it_was_read_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ObjectTable(monkeypatch)
    buffer = LocalBuffer(tmp_path / "log", small())
    history(buffer)
    storage = Storage(buffer.folder)
    reader, decoded = StateReader(storage, SamplerConfig(), 0), list[bytes]()

    def counted(line: bytes) -> Event:
        decoded.append(line)
        return decode(line)

    monkeypatch.setattr("rayrft.buffer.log.journal.decode", counted)

    def read() -> int:
        """Compare with a reader that begins at the start; return how many events were read before that."""
        decoded.clear()
        found = reader.read()
        events = len(decoded)
        fresh = StateReader(storage, SamplerConfig(), 0).read()
        assert found.to_snapshot().equals(fresh.to_snapshot()), "the state is the same"
        return events

    assert read() > 5
    assert read() == 0
    buffer.put_numbers(20, 21)
    assert read() == 1
    buffer.run(buffer.buffer.store.renew())
    buffer.put_numbers(22)
    assert read() == 1, "a snapshot stands for the events before it"
    buffer.kill()


def test_rows_are_read_from_an_earlier_extent_on_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ObjectTable(monkeypatch)
    buffer = LocalBuffer(tmp_path / "log", small())
    buffer.do("open_stage", plan(9, scheduled=False))
    buffer.put_numbers(1, 2)
    [before] = buffer.buffer.state.contents.extents.values()
    buffer.put_numbers(3)
    [after] = buffer.buffer.state.contents.extents.values()
    buffer.kill()
    storage, name = Storage(buffer.folder), segment_name(after.segment)
    new = read_log_rows(storage, name, after, before)
    assert new.equals(read_log_rows(storage, name, after).slice(before.rows))
    data = bytearray((buffer.folder / name).read_bytes())
    data[-9] ^= 0xFF
    (buffer.folder / name).write_bytes(data)
    with pytest.raises(StorageError, match="changed since it was written"):
        read_log_rows(storage, name, after, before)


def test_the_reason_of_a_drop_is_kept_by_group(ended: Ended) -> None:
    def reasons(state: State) -> dict[int, str]:
        dropped, groups = list(state.contents.ledger.dropped), state.groups
        slots = groups.where(*(status for status in GroupStatus if status != GroupStatus.FREE))
        return {int(groups.status[slot]): dropped[groups.reason[slot]] for slot in slots if groups.reason[slot] >= 0}

    state = StateReader(Storage(ended[0]), SamplerConfig(), 0).read()
    assert reasons(state) == {GroupStatus.DROPPED: "stage_ended"}
    restored = State(SamplerConfig(), 0, None)
    restored.restore(state.to_snapshot())
    assert reasons(restored) == reasons(state)
    earlier = pa.ipc.open_file(state.to_snapshot()).read_all().drop_columns(["reason"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, earlier.schema) as writer:
        writer.write_table(earlier)
    with pytest.raises(StorageError, match="cannot read the snapshot"):
        restored.restore(sink.getvalue())
