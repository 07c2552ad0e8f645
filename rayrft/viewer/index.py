"""The rows of a run's log as a table of DuckDB: what rows are filtered and sorted by, without tokens and texts.

The table is in a file outside the run folder (`cache_folder`), is built once and extended with the log; its lists are
read from the log for the rows that are shown. Reading the log checks its checksums, so a damaged file is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayrft.buffer.events import Extent
from rayrft.buffer.expert_rows import expert_file
from rayrft.buffer.log.segments import read_log_rows, segment_name
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import StateReader, log_folder
from rayrft.buffer.state import State
from rayrft.config import load_folder_config
from rayrft.errors import RayrftError, StorageError
from rayrft.experience import Experience, VersionSpan, json_digest
from rayrft.explorer.unstored import ANSWERS
from rayrft.json_lines import read_lines
from rayrft.registry import Lazy
from rayrft.viewer.columns import LOGGED, TEXT_LENGTH, table_of_places, table_of_rows

if TYPE_CHECKING:
    import duckdb
else:
    duckdb = Lazy("duckdb")

CHOICES = ("source", "status", "stop_reason", "group_status", "drop_reason")
"""Columns of a few values, from which one is chosen."""
_QUERY_S = 20.0
_UNUSED_DAYS = 60
_WRITTEN = 122_880
"""Rows of a transaction: DuckDB compresses so many together, and writes fewer to its log and again to the table."""
_UNSTORED = -(1 << 40)
"""Places of answers that the Buffer did not store are less."""
_TABLES = """
create table about (version varchar, value varchar);
create table places (place bigint, first integer, group_status varchar, step bigint, uses integer, drop_reason varchar);
create table rows (place bigint, file varchar, row integer, experience_id varchar, group_id varchar, task_id varchar,
    source varchar, status varchar, stop_reason varchar, error varchar, reward double, prompt_tokens integer,
    tokens integer, logprob double, version bigint, newest_version bigint, turns integer, images integer,
    question varchar, answer varchar, components map(varchar, float), metrics map(varchar, float),
    finished_at double, group_rows integer, group_reward double,
    group_deviation double, group_status varchar, step bigint, uses integer, drop_reason varchar);
create view answers as select *, reward - group_reward as advantage, step - 1 - version as staleness from rows;
"""
"""Answers are the rows of the log and answers that the Buffer did not store."""
_READ = f"""
delete from rows where place < {_UNSTORED} and experience_id in (select experience_id from new_rows);
insert into rows by name select new_rows.* exclude (weight_versions) replace (left(error, {TEXT_LENGTH}) as error,
    coalesce(len(images), 0) as images),
    list_min(list_transform(weight_versions, lambda span: span.version)) as version,
    list_max(list_transform(weight_versions, lambda span: span.version)) as newest_version,
    group_status, step, uses, drop_reason from new_rows join places using (place)
"""
_ADD = f"""
delete from rows where place < {_UNSTORED} and experience_id in (select experience_id from new_answers);
insert into rows by name select * replace (left(question, {TEXT_LENGTH}) as question,
    left(answer, {TEXT_LENGTH}) as answer),
    {_UNSTORED} - (hash(group_id) % {1 << 32})::bigint - 1 as place, count(*) over of_group as group_rows,
    avg(reward) over of_group as group_reward, stddev_pop(reward) over of_group as group_deviation
from new_answers where not exists (select 1 from rows where experience_id = new_answers.experience_id)
window of_group as (partition by group_id)
"""
"""Of an answer that is written again, as steps are repeated after a resume, the row of the log counts, or the last
line."""
_MOVE = """
delete from rows where place in (select place from places except select place from new_places);
update rows set group_status = changed.group_status, step = changed.step, uses = changed.uses,
    drop_reason = changed.drop_reason from (select * from new_places except select * from places) as changed
    where rows.place = changed.place;
delete from places;
insert into places select * from new_places
"""
"""Brings the places up to date, and what their rows have of them: little changes at a time."""
_CHANGES = {"new_places": _MOVE, "new_rows": _READ, "new_answers": _ADD}
"""What is done with new places, with new rows, and with new answers that the Buffer did not store."""
_ANSWER = pa.schema(
    {
        **dict.fromkeys(("experience_id", "group_id", "task_id", "source", "status", "stop_reason"), pa.string()),
        **dict.fromkeys(("error", "question", "answer", "group_status", "drop_reason", "file"), pa.string()),
        **dict.fromkeys(("reward", "finished_at"), pa.float64()),
        **dict.fromkeys(("tokens", "version", "uses"), pa.int64()),
        **dict.fromkeys(("components", "metrics"), pa.map_(pa.string(), pa.float32())),
    }
)
"""Of an answer that the Buffer did not store."""
_VERSION = json_digest([_TABLES, _READ, _ADD, _MOVE])
"""Of the tables; files with others are deleted."""


def cache_folder() -> Path:
    """Return the folder of this user's files of the viewer: ``$XDG_CACHE_HOME/rayrft/view``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rayrft" / "view"


def remove_unused() -> None:
    """Delete the tables of runs that nobody has looked at for `_UNUSED_DAYS`."""
    for path in cache_folder().glob("*.duckdb"):
        if path.stat().st_mtime < time.time() - 86_400 * _UNUSED_DAYS:
            path.unlink()


class RowIndex:
    """The rows of the run in a folder. Its methods may be called in any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.generation = 0
        """Number of changes by this process: of the tables, and of the answers to queries about them."""
        self.problem = ""
        """Why the log cannot be read."""
        self._told = False
        self._opened: duckdb.DuckDBPyConnection | None = None
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._reading: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "index")

    @property
    def _database(self) -> duckdb.DuckDBPyConnection:
        with self._opening:
            if self._opened is None:
                path = cache_folder() / f"{json_digest(str(self._run.resolve()))}.duckdb"
                self._opened = _open(path)
                path.touch()
            return self._opened

    @cached_property
    def _log(self) -> tuple[Storage, StateReader]:
        config = load_folder_config(self._run)
        storage = Storage(log_folder(self._run, config))
        return storage, StateReader(storage, config.buffer.sampler, config.seed)

    @property
    def log(self) -> Path | None:
        """The folder of the log; None if the run's config cannot be read."""
        with contextlib.suppress(RayrftError):
            return self._log[0].folder
        return None

    @property
    def _answers(self) -> list[Path]:
        """The files of answers that the Buffer did not store."""
        return sorted((self._run / ANSWERS).glob("*.jsonl"))

    def update(self, wait_s: float) -> None:
        """Read what was appended to the log, in a thread; wait at most so long for it."""
        with self._lock:
            if self._reading is None or self._reading.done():
                self._reading = self._thread.submit(self._update)
            reading = self._reading
        try:
            reading.result(wait_s)
        except TimeoutError:
            self._told = True

    def about(self) -> dict[str, Any]:
        """Describe the log: ``ledger``, ``damaged`` files with their problems, the values of `CHOICES`,
        ``rows``, whether the table ``lags`` behind the log, and the ``problem`` if the log cannot be read."""
        about = self._read_about()
        lags = self._reading is not None and not self._reading.done()
        shown = {name: about.get(name) for name in ("ledger", "damaged", "choices")}
        return {
            **shown,
            "rows": sum(rows for _, rows, *_ in about.get("extents", {}).values()),
            "lags": lags,
            "problem": self.problem,
        }

    @contextlib.contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give a connection for one thread. A query that takes longer than `_QUERY_S` is interrupted."""
        with self._database.cursor() as connection:
            timer = threading.Timer(_QUERY_S, connection.interrupt)
            timer.start()
            try:
                yield connection
            finally:
                timer.cancel()

    def read_group(self, file: str, first: int, count: int) -> pa.RecordBatch:
        """Return rows of a file of the log, of `rayrft.experience.SCHEMA`. Raises StorageError if it is gone."""
        storage, extent = self._log[0], self._read_about().get("extents", {}).get(file)
        try:
            data = storage.read(file)
        except FileNotFoundError:
            raise StorageError("the file is gone", "reload the page", field=str(storage.folder / file)) from None
        found, rows = list[pa.RecordBatch](), 0
        try:
            with pa.ipc.open_stream(data[: extent[2]] if extent else data) as stream:
                while rows < first + count:
                    found.append(stream.read_next_batch())
                    rows += found[-1].num_rows
        except (pa.ArrowInvalid, StopIteration):
            remedy = "restore it from a backup"
            raise StorageError("the file is damaged", remedy, field=str(storage.folder / file)) from None
        return pa.Table.from_batches(found).slice(first, count).combine_chunks().to_batches()[0]

    def read_answers(self, file: str, group_id: str) -> list[Experience]:
        """Return the answers of a group that the Buffer did not store, without tokens."""
        written = json.dumps(group_id).encode()
        with (self._run / ANSWERS / file).open("rb") as lines:
            rows = [json.loads(line) for line in lines if written in line and line.endswith(b"\n")]
        return [*{row["experience_id"]: _experience(row) for row in rows}.values()]

    def late_feedback(self, experience_id: str) -> list[dict[str, Any]]:
        """Return the feedback that came after a row was trained."""
        return [note for note in self._read_about().get("late", []) if note["experience_id"] == experience_id]

    # In the thread.

    def _update(self) -> None:
        try:
            storage, reader = self._log
            seen = [storage.files(), {path.name: path.stat().st_size for path in self._answers}]
            if seen != self._read_about().get("files"):
                self._extend(storage, reader.read(), seen)
            self.problem = ""
        except RayrftError as error:
            self.problem = str(error)
        if self._told:  # pages that got a table that lags shall ask again
            self._told = False
            self.generation += 1

    def _extend(self, storage: Storage, state: State, seen: list[dict[str, int]]) -> None:
        before, contents = self._read_about(), state.contents
        old = before if before.get("run") == state.meta.run else {}
        extents = {segment_name(number): extent for number, extent in sorted(contents.extents.items(), reverse=True)}
        experts = {expert_file(name, cursor.extent): cursor.extent for name, cursor in contents.experts.items()}
        kept = {name: each for name, each in old.get("extents", {}).items() if name in {*extents, *experts}}
        late = [asdict(note) for notes in contents.late_feedback.values() for note in notes]
        ledger = asdict(state.ledger(recount=True))
        about: dict[str, Any] = {"run": state.meta.run, "extents": kept, "ledger": ledger, "late": late, "damaged": {}}
        about["choices"] = before.get("choices")
        about["answers"] = {name: end for name, end in old.get("answers", {}).items() if end <= seen[1].get(name, -1)}
        stale = {*before.get("extents", ()), *before.get("answers", ())} - kept.keys() - about["answers"].keys()
        self._write(about, stale, new_places=table_of_places(state, experts))
        parts = _new_rows(storage, state, {**extents, **experts}, experts.keys(), dict(kept))
        with ThreadPoolExecutor(1, "log") as reading:  # the next rows are read while these are written
            following = reading.submit(next, parts, None)
            while (part := following.result()) is not None:
                following = reading.submit(next, parts, None)
                about["extents"] |= part.extents
                about["damaged"] |= part.damaged
                new = {"new_rows": pa.concat_tables(part.rows)} if part.rows else {}
                self._write(about, part.stale, **new)
        for path in self._answers:
            if lines := list(read_lines(path, _answer_row, about["answers"].get(path.name, 0))):
                about["answers"][path.name] = lines[-1][0]
                last = {row["experience_id"]: {**row, "file": path.name} for _, row in lines if row}
                self._write(about, new_answers=pa.Table.from_pylist([*last.values()], _ANSWER))
        with self.cursor() as connection:
            sql = "select distinct {0} from answers where {0} is not null order by 1 limit 50"
            found = {name: connection.execute(sql.format(name)).fetchall() for name in CHOICES}
        about["choices"] = {name: [value for (value,) in values] for name, values in found.items()}
        self._write({**about, "files": seen})

    def _write(self, about: dict[str, Any], stale: Set[str] = frozenset(), **changes: pa.Table) -> None:
        """Change the tables in one transaction: without the rows of ``stale`` files, and with the tables of `_CHANGES`
        by name."""
        with self._database.cursor() as connection:
            connection.begin()
            if stale:
                connection.execute("delete from rows where file in (select unnest($1))", [list(stale)])
            for name, table in changes.items():
                connection.register(name, table)
                connection.execute(_CHANGES[name])
            connection.execute("update about set value = $1", [json.dumps(about)])
            connection.commit()
        self.generation += 1

    def _read_about(self) -> dict[str, Any]:
        with self._database.cursor() as connection:
            return json.loads(connection.execute("select value from about").fetchall()[0][0])


@dataclass
class _Part:
    """New rows of some files of the log."""

    extents: dict[str, tuple[int, ...]] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    """Files of which no row in the table counts any more."""
    rows: list[pa.Table] = field(default_factory=list)


def _new_rows(
    storage: Storage, state: State, extents: dict[str, Extent], experts: Set[str], kept: dict[str, Any]
) -> Iterator[_Part]:
    """Read what the files have beyond the ``kept`` extents: of a new table the newest rows at once."""
    part, least = _Part(), _WRITTEN if kept else 1
    for name, extent in extents.items():
        known = kept.get(name)
        before = Extent(*known) if known and known[2] <= extent.nbytes else None
        if before == extent or not extent.rows:
            continue
        try:
            batch = read_log_rows(storage, name, extent, before, LOGGED)
        except StorageError as error:
            part.damaged[name] = str(error)
            continue
        part.extents[name] = astuple(extent)
        part.stale |= set() if before else {name}
        part.rows.append(table_of_rows(state, extent, batch, name, before.rows if before else 0, name in experts))
        if sum(rows.num_rows for rows in part.rows) >= least:
            yield part
            part, least = _Part(), _WRITTEN
    yield part


def _answer_row(line: bytes) -> dict[str, Any] | None:
    """Return an answer that the Buffer did not store; None for a line that a crash has torn."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    maps = {name: list(row[name].items()) for name in ("components", "metrics") if name in row}
    return {"status": "finished", "uses": 0, **row, **maps}


def _experience(row: dict[str, Any]) -> Experience:
    """Return an answer that the Buffer did not store as a row without tokens."""
    same = ("experience_id", "group_id", "task_id", "source", "reward", "stop_reason", "error", "finished_at")
    texts = ("user", row["question"]), ("assistant", row["answer"] or "")
    none, version = np.zeros(0, np.float32), row["version"]
    return Experience(
        **{name: row[name] for name in same},
        token_ids=none,
        action_mask=none,
        logprobs=none,
        prompt_length=0,
        weight_versions=() if version is None else (VersionSpan(0, 0, version),),
        reward_components=row.get("components", {}),
        metrics=row.get("metrics", {}),
        turns=tuple({"role": role, "content": text} for role, text in texts),
        created_at=row["finished_at"],
    )


def _open(path: Path) -> duckdb.DuckDBPyConnection:
    """Open a database, or one in memory while another viewer has the file open."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        return _connect(str(path))
    except duckdb.Error as error:
        if "lock" in str(error):
            return _connect(":memory:")
    path.unlink()  # another release wrote it, or it is damaged
    return _connect(str(path))


def _connect(path: str) -> duckdb.DuckDBPyConnection:
    """Open a database, and create its tables unless it has them. Raises duckdb.Error for tables of other versions."""
    # No access to other files and to extensions. Each checkpoint writes the table's last rows again.
    connection = duckdb.connect(
        path, config={"enable_external_access": False, "lock_configuration": True, "wal_autocheckpoint": "128MB"}
    )
    if not connection.execute("select * from duckdb_tables()").fetchall():
        connection.execute(_TABLES)
        connection.execute("insert into about values ($1, '{}')", [_VERSION])
    if connection.execute("select version from about").fetchall() != [(_VERSION,)]:
        connection.close()
        raise duckdb.InvalidInputException("tables of another version")
    return connection
