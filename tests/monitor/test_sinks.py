"""What reaches the sinks of a run; a sink that fails, or blocks, costs nothing else."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sqlite3
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from rayrft.config import RunConfig, load_config
from rayrft.errors import ConfigError
from rayrft.monitor import sinks
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import NoteRecord
from rayrft.monitor.records import Record as RunRecord
from rayrft.monitor.sinks import Mlflow, Trackio, Wandb, check_sinks, register_sink
from rayrft.monitor.summary import Summary
from tests.buffer.in_process import ObjectTable
from tests.buffer.rows import group, plan
from tests.core.given import run_folder
from tests.errors import about
from tests.monitor.made import evaluation, step
from tests.viewer.recorded import ApartBuffer

_BLOCK, _WHOLE, _LAST = 1 << 15, 1, 4
"""Of LevelDB's log: size of a block, and the types of chunks that end a record."""


def records(file: Path) -> Iterator[Record]:
    data, at, record = file.read_bytes(), 7, b""
    while at < len(data):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left  # no header fits
            continue
        length, kind = struct.unpack_from("<xxxxHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(record)
            record = b""


def with_secret(storage: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A config that refers to a secret of the environment."""
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    judge = {"judge": {"url": "http://judge/v1", "model": "m", "api_key": "env:JUDGE_KEY"}}
    return run_folder(storage, "run", reward={"name": "judge", "options": judge})


def written(folder: Path) -> str:
    """All that is in the files of a folder, as text."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return "".join(file.read_bytes().decode(errors="ignore") for file in files)


def test_an_evaluation_that_ends_after_later_steps_arrives_and_a_resumed_run_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = with_secret(tmp_path, monkeypatch)
    sink = Wandb(config)
    for record in (step(step=1), step(step=5), evaluation("mix", 2, 50, step=2), step(step=6)):
        sink.write(record)
    sink.write_rows(6, ["id", "reward"], [["0/1", 0.5], ["0/2", None]])
    sink.close(failed=True)
    wandb.teardown()  # its process writes the rest of the file
    [file] = config.folder.glob("wandb/offline-run-*/*.wandb")
    assert [record.exit.exit_code for record in records(file) if record.HasField("exit")] == [1]
    logged = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.HasField("history")
    ]
    assert [each["train/step"] for each in logged if "train/step" in each] == [1, 5, 6, 6]
    tables = [value for each in logged for key, value in each.items() if key.startswith("train/rows")]
    assert "table-file" in str(tables) and [*config.folder.glob("wandb/offline-run-*/files/media/table/train/rows_*")]
    assert "env:JUDGE_KEY" in file.read_bytes().decode(errors="ignore") and "sk-secret" not in written(config.folder)
    assert [(each["eval/step"], each["eval/accuracy_t0"]) for each in logged if "eval/step" in each] == [(2, 0.5)]
    axes = {record.metric.glob_name: record.metric.step_metric for record in records(file) if record.HasField("metric")}
    assert axes["eval/*"] == "eval/step" and axes["train/*"] == "train/step"

    asked: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", lambda **settings: asked.update(settings) or Wandb.__new__(Wandb))
    monkeypatch.setattr(Wandb, "define_metric", lambda *_, **__: None, raising=False)
    Wandb(config)
    assert asked["id"] == file.stem.removeprefix("run-") and asked["resume"] == "allow"


ENDED = Summary("run", "finished", None, {}, None, None, {}, 5, 0, {}, None)


@register_sink("listed")
class Listed:
    """Keeps what it gets."""

    got: ClassVar[list[Any]] = []

    def __init__(self, config: Any) -> None:
        Listed.got = []

    def write(self, record: RunRecord) -> None:
        self.got.append(record)

    def close(self, failed: bool) -> None:
        self.got.append("closed")


class Raises(Listed):
    """Its server is away from the second step on."""

    def write(self, record: RunRecord) -> None:
        if record.step == 2:
            raise OSError("no route to host\nand more")


@register_sink("tabled")
class Tabled(Listed):
    """Keeps the tables of rows that it gets."""

    tables: ClassVar[list[tuple[int, list[str], list[list[Any]]]]] = []

    def write_rows(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self.tables.append((step, columns, rows))


class Blocks(Listed):
    """Waits for a server at every record."""

    answers = threading.Event()

    def write(self, record: RunRecord) -> None:
        assert self.answers.wait(60)
        super().write(record)


class NeverTakes(Blocks):
    answers = threading.Event()

    def __init__(self, config: Any) -> None:
        pass

    def write(self, record: RunRecord) -> None:
        self.answers.wait(60)


class CannotEnd(Listed):
    """Its server is away at the end."""

    def close(self, failed: bool) -> None:
        raise OSError("no route to host")


class NeverEnds(Listed):
    """Waits for a server at the end."""

    answers = threading.Event()

    def close(self, failed: bool) -> None:
        self.answers.wait(60)


class NeverOpens(Listed):
    """Waits for a server at the beginning."""

    answers = threading.Event()

    def __init__(self, config: Any) -> None:
        self.answers.wait(60)


class Refuses(Listed):
    def __init__(self, config: Any) -> None:
        raise RuntimeError("wrong key")


async def test_a_sink_that_fails_is_named_once_and_the_others_get_every_record(tmp_path: Path) -> None:
    config = run_folder(tmp_path, "run", monitor={"sinks": [f"{__name__}:Raises", "listed"]})
    recorder = Recorder(config)
    for number in (1, 2, 3, 4):
        await recorder.add(step(step=number))
    async with asyncio.timeout(20):
        while [each for each in Listed.got if each.step == 4] == []:  # noqa: ASYNC110 - it is written by a thread
            await asyncio.sleep(0.001)
    await recorder.add(step(step=5))
    await recorder.close(ENDED)
    *got, last = Listed.got
    notes = [record.text for record in await recorder.after(0) if isinstance(record, NoteRecord)]
    assert [record.step for record in got if not isinstance(record, NoteRecord)] == [1, 2, 3, 4, 5]
    assert notes == [f"a sink failed and gets no more records: {__name__}:Raises: OSError: no route to host"]
    assert last == "closed" and len(await recorder.after(0)) == 6


async def test_a_sink_that_hangs_keeps_no_record_from_the_others_and_fails_once_too_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_MOST_WAITING", 5)
    monkeypatch.setattr(RayMetrics, "write", lambda *_: None)  # whose first one imports Ray
    sampling = {"max_tokens": 16, "max_prompt_tokens": 32}
    monitor = {"sinks": [f"{__name__}:NeverTakes", "listed"], "stall_s": 0.1}
    config = run_folder(tmp_path, "run", monitor=monitor, explorer={"deadline_s": 0.05, "sampling": sampling})
    NeverTakes.answers.clear()
    recorder = Recorder(config)
    try:
        for number in range(8):
            await recorder.add(step(step=number))
            async with asyncio.timeout(20):
                while Listed.got[-1:] == [] or Listed.got[-1].step < number:  # noqa: ASYNC110 - written by a thread
                    await asyncio.sleep(0.001)
        await recorder.close(ENDED)
    finally:
        NeverTakes.answers.set()
    notes = [record.text for record in await recorder.after(0) if isinstance(record, NoteRecord)]
    assert notes == [f"a sink failed and gets no more records: {__name__}:NeverTakes: it did not take 5 records"]


async def test_rows_come_every_so_many_steps_and_a_damaged_log_costs_a_table(tmp_path: Path) -> None:
    monitor = {"sinks": ["tabled"], "samples_every": 2, "sample_rows": 3}
    config = run_folder(tmp_path, "run", monitor=monitor)
    Tabled.tables.clear()
    recorder, patch = Recorder(config), pytest.MonkeyPatch()
    ObjectTable(patch)
    buffer = ApartBuffer(config.buffer_folder, config.buffer, run="run")
    try:
        buffer.do("open_stage", plan(1, scheduled=False))
        buffer.put([(group(number, rows=2), None) for number in range(5)])
        for number in (1, 2, 3):
            await recorder.add(step(step=number))
        async with asyncio.timeout(20):
            while not Tabled.tables:  # noqa: ASYNC110 - it is written by a thread
                await asyncio.sleep(0.001)
        [segment] = config.buffer_folder.glob("segment-*.arrow")
        segment.write_bytes(b"damaged")
        await recorder.add(step(step=4))
        await recorder.close(ENDED)
    finally:
        buffer.kill()
        patch.undo()
    [(at, columns, rows)] = Tabled.tables
    assert at == 2 and columns[:2] == ["id", "reward"] and [row[0] for row in rows] == ["2/1", "3/1", "4/1"]
    assert all(isinstance(value, str | float | None) for row in rows for value in row)
    assert not [record for record in await recorder.after(0) if isinstance(record, NoteRecord)]


async def test_a_sink_that_blocks_delays_no_record_and_gets_all_in_order(tmp_path: Path) -> None:
    config = run_folder(tmp_path, "run", monitor={"sinks": [f"{__name__}:Blocks"]})
    Blocks.answers.clear()
    recorder = Recorder(config)
    for number in range(20):
        await recorder.add(step(step=number))
    assert (recorder.count(0), Listed.got) == (20, [])
    closing = asyncio.ensure_future(recorder.close(ENDED))
    Blocks.answers.set()
    await closing
    assert [each if isinstance(each, str) else each.step for each in Listed.got] == [*range(20), "closed"]


@pytest.mark.parametrize(
    ("name", "patience_s", "reason"),
    [
        ("CannotEnd", 60.0, "OSError: no route to host"),
        ("NeverEnds", 60.0, "it did not return within 0.1 s"),
        ("NeverEnds", 0.05, "it did not return within 0.05 s"),
    ],
)
async def test_a_sink_that_fails_as_it_is_closed_is_named_and_does_not_hold_the_end(
    name: str, patience_s: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {"max_tokens": 16, "max_prompt_tokens": 32}
    monitor = {"sinks": [f"{__name__}:{name}"], "stall_s": 0.1}
    config = run_folder(tmp_path, "run", monitor=monitor, explorer={"deadline_s": 0.05, "sampling": sampling})
    recorder = Recorder(load_config(config, {"monitor.stall_s": 600.0}))
    recorder.config = config  # as it was changed while the run was running
    NeverEnds.answers.clear()
    monkeypatch.setattr(sinks, "_PATIENCE_S", patience_s)
    await recorder.add(step(step=3))
    try:
        await recorder.close(ENDED)
        [last] = (await recorder.after(0))[1:]
    finally:
        NeverEnds.answers.set()
    assert isinstance(last, NoteRecord) and last.step == 3
    assert last.text == f"a sink failed and gets no more records: {__name__}:{name}: {reason}"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("wandbb", "wandb"),
        ("mlflow", "pip install mlflow"),
        ("no_such:Sink", "imported"),
        (f"{__name__}:Refuses", "wrong key"),
        (f"{__name__}:NeverOpens", "no answer within 1 s"),
    ],
)
def test_a_sink_that_cannot_be_opened_is_an_error_before_the_first_step(
    name: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    config = run_folder(tmp_path, "run", monitor={"sinks": [name]})
    monkeypatch.setattr(sinks, "_PATIENCE_S", 1.0)
    NeverOpens.answers.clear()
    try:
        with pytest.raises(ConfigError, match=found, check=about("monitor.sinks")):
            check_sinks(config)
            Recorder(config)
    finally:
        NeverOpens.answers.set()


async def test_a_sink_that_cannot_be_opened_again_by_a_restarted_master_is_a_note(tmp_path: Path) -> None:
    recorder = Recorder(run_folder(tmp_path, "run", monitor={"sinks": [f"{__name__}:Refuses"]}), taken_over=True)
    await recorder.add(step(step=3))
    await recorder.close(ENDED)
    note, record = await recorder.after(0)
    assert isinstance(note, NoteRecord) and note.step == 3 and record.step == 3
    assert note.text.endswith(":Refuses: cannot be opened: RuntimeError: wrong key")


def test_mlflow_has_every_number_at_its_step_and_a_resumed_run_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="installed by the test of newest releases")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = with_secret(tmp_path, monkeypatch)
    for numbers in ((1, 5), (6,)):
        sink = Mlflow(config)
        for number in numbers:
            sink.write(step(step=number, reward=number / 4))
        sink.write(evaluation("mix", 2, 50, step=2))
        sink.write_rows(numbers[-1], ["id", "reward"], [["0/1", 0.5], ["0/2", None]])
        sink.close(failed=numbers == (6,))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{config.folder}/mlflow.db")
    experiment = client.get_experiment_by_name("rayrft")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FAILED")
    rewards = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(each.step, each.value) for each in rewards] == [(1, 0.25), (5, 1.25), (6, 1.5)]
    assert run.data.metrics["eval/accuracy_t0"] == 0.5
    [file] = (config.folder / "mlflow").rglob("rows.json")
    assert json.loads(file.read_text()) == {
        "columns": ["step", "id", "reward"],
        "data": [[step, *row] for step in (5, 6) for row in (["0/1", 0.5], ["0/2", None])],
    }
    assert run.data.params["model.max_length"] == str(config.model.max_length)
    assert "env:JUDGE_KEY" in str(run.data.params) and "sk-secret" not in written(config.folder)


def test_trackio_has_every_number_at_its_step_and_a_resumed_run_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="installed by the test of newest releases")
    config = with_secret(tmp_path, monkeypatch)
    for numbers in ((1, 5), (6,)):
        sink = Trackio(config)
        for number in numbers:
            sink.write(step(step=number, reward=number / 4))
        sink.close(failed=False)
    [file] = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by step").fetchall()
    found = [(name, at, json.loads(metrics)["train/reward"]) for name, at, metrics in rows]
    assert found == [("run", 1, 0.25), ("run", 5, 1.25), ("run", 6, 1.5)]
    assert "sk-secret" not in written(tmp_path)
