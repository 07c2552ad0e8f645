"""What people said is kept through every crash, and read again as it was."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rayrft.errors import StorageError
from rayrft.feedback.journal import FILE, entry_line, forget_judgements, open_journal, read_journal
from rayrft.feedback.judgements import EditSent, Entry, Judgement, JudgementAdded, JudgementUndone, RowSent
from rayrft.files import atomic_file
from tests.errors import about

ENTRIES: list[Entry] = [
    JudgementAdded(
        Judgement("j1", "Ann", "one:g/0", "one", ("g/0",), score=4, labels=("polite",), comment="good \u2028 ü 😀")
    ),
    RowSent("g/0", 0.75, {"score": "4"}, "applied", before=0.1),
    JudgementAdded(Judgement("j2", "Bob", "pair:g", "pair", ("g/0", "g/1"), ranking=("g/1", "g/0"), seconds=1.5)),
    EditSent("j1", "refused", "too long"),
    JudgementUndone("j2"),
]


def written(folder: Path) -> Path:
    journal, entries = open_journal(folder)
    assert entries == []
    journal.append(*map(entry_line, ENTRIES), durable=True)
    journal.close()
    return folder / FILE


def test_what_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path / "feedback")
    assert read_journal(path) == ENTRIES
    journal, entries = open_journal(path.parent)
    journal.close()
    assert entries == ENTRIES
    assert read_journal(tmp_path / "none") == []
    assert path.stat().st_mode & 0o077 == 0, "what people say is not for everybody"


def test_what_was_said_of_a_row_is_erased_with_it_but_not_while_the_page_is_open(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert forget_judgements(tmp_path, {"g/2", "j1"}) == 0 and read_journal(path) == ENTRIES
    journal, _ = open_journal(tmp_path)
    with pytest.raises(StorageError, check=about(str(path))):
        forget_judgements(tmp_path, {"g/1"})
    journal.close()
    assert forget_judgements(tmp_path, {"g/1"}) == 2 and read_journal(path) == [*ENTRIES[:2], ENTRIES[3]]
    assert path.stat().st_mode & 0o077 == 0
    assert forget_judgements(tmp_path, {"g/0"}) == 3 and read_journal(path) == []


def test_a_page_that_waited_for_a_journal_has_its_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked, lock = written(tmp_path), threading.Event(), fcntl.flock

    def flock(*given: Any) -> None:
        asked.set()
        lock(*given)

    first, _ = open_journal(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    with ThreadPoolExecutor(1) as page:
        waiting = page.submit(open_journal, tmp_path)
        assert asked.wait(30)
        with atomic_file(path) as draft:
            draft.write_bytes(entry_line(ENTRIES[0]))
        first.close()
        journal, entries = waiting.result(30)
    journal.append(entry_line(ENTRIES[1]))
    journal.close()
    assert entries == ENTRIES[:1] and read_journal(path) == ENTRIES[:2]


def test_any_tail_that_a_crash_cut_is_left_out_and_the_next_entry_follows_the_last_whole_one(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    starts = [0, *(at + 1 for at, byte in enumerate(data) if byte == ord("\n"))]
    for cut in sorted({*starts[:-1], *range(starts[-3], len(data))}):  # between entries, and anywhere in the last two
        whole = sum(end <= cut for end in starts[1:])
        path.write_bytes(data[:cut])
        assert read_journal(path) == ENTRIES[:whole], "a reader of a file that is being written"
        journal, entries = open_journal(tmp_path)
        assert entries == ENTRIES[:whole]
        assert path.stat().st_size == starts[whole]
        journal.append(entry_line(ENTRIES[-1]))
        journal.close()
        assert read_journal(path) == [*ENTRIES[:whole], ENTRIES[-1]]


def test_a_last_line_of_wrong_bytes_is_left_out_and_any_other_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(b"j2", b"j3"))
    assert read_journal(path) == ENTRIES[:-1]
    path.write_bytes(data.replace(b'"score":4', b'"score":5', 1))
    for read in (lambda: read_journal(path), lambda: open_journal(tmp_path)):
        with pytest.raises(StorageError, match="damaged in the line at byte 0", check=about(str(path))):
            read()
    assert path.read_bytes() != data and len(path.read_bytes()) == len(data), "nothing is cut off a damaged journal"
    path.write_bytes(data)
    assert open_journal(tmp_path, wait=False)[1] == ENTRIES, "who failed on it holds no lock on it"


async def test_what_is_written_at_once_is_all_there_in_order(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    await asyncio.gather(*(journal.append_durably(entry_line(JudgementUndone(str(number)))) for number in range(200)))
    assert [entry.id for entry in read_journal(tmp_path / FILE)] == [str(number) for number in range(200)]  # type: ignore[union-attr]
    journal.close()


async def test_a_failed_write_leaves_nothing_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = open_journal(tmp_path)
    await journal.append_durably(entry_line(JudgementUndone("first")))
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        write(descriptor, bytes(data)[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rayrft.json_lines.os.write", full)
    with pytest.raises(StorageError, match="No space left"):
        await journal.append_durably(entry_line(JudgementUndone("lost")))
    monkeypatch.undo()
    await journal.append_durably(entry_line(JudgementUndone("second")))
    assert read_journal(tmp_path / FILE) == [JudgementUndone("first"), JudgementUndone("second")]
    journal.close()


def test_it_has_one_writer_whose_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from rayrft.feedback.journal import open_journal;"
        "journal = open_journal(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        with pytest.raises(StorageError, match="another process is writing the file"):
            open_journal(tmp_path, wait=False)
    finally:
        holder.kill()
        holder.wait()
    open_journal(tmp_path, wait=False)
