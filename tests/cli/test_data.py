"""``rayrft data``, on the log of a real Buffer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayrft.cli.main import app
from rayrft.config import dump_config, load_config
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.data.demonstrations import RowEncoder, from_source
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError, RunNotFound, StorageError
from rayrft.feedback.journal import entry_line, feedback_folder, open_journal
from rayrft.feedback.judgements import Judgement, JudgementAdded
from tests.buffer.in_process import LocalBuffer, ObjectTable
from tests.buffer.live import TURNS, live_run
from tests.buffer.rows import group
from tests.e2e.conftest import small_config
from tests.errors import about

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def live(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with live_run(tmp_path_factory.mktemp("runs"), "tool") as folder:
        yield folder


def call(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_stats_are_json(live: Path) -> None:
    stats = json.loads(call("stats", live))
    ledger = stats["ledger"]
    assert ledger["sampled"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["held"] == 13
    assert stats["stores"]["expert/gold"]["rows"] == 5


def test_a_run_is_named_by_its_folder_or_by_its_name(
    live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_folder = call("stats", live)
    assert call("stats", "tool", "--storage", live.parent) == by_folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(live.parent)
    assert call("stats", "tool") == by_folder
    with pytest.raises(RunNotFound, check=about("run", "tol")):
        call("stats", "tol")
    with pytest.raises(RunNotFound, check=about("run", "tool")):
        call("stats", "tool", "--storage", "nowhere")


def test_head_shows_a_line_a_row_and_no_more_than_asked_for(live: Path) -> None:
    lines = call("head", live).splitlines()
    assert lines[0].split() == ["id", "group_status", "reward", "tokens", "version", "uses", "answer"]
    assert len(lines) == 11
    assert len(call("head", live, "-n", 3).splitlines()) == 4
    assert len(call("head", live, "--store", "expert/gold").splitlines()) == 6
    command = [sys.executable, "-m", "rayrft", "data", "head", str(live), "--where", "group_id = '7'"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    [_, line], said = shown.stdout.splitlines(), shown.stderr
    assert not said, "a condition leaves nothing behind of DuckDB, which would be printed"
    assert line.split() == ["7/0", "ready", "0", "4", "0", "0", "It", "is", "2."]
    narrow = CliRunner().invoke(app, ["data", "head", str(live)], env={"COLUMNS": "40"})
    assert narrow.output.splitlines() == lines, "nothing is cut where nobody looks on"
    [line] = call("lineage", "7/0", live).splitlines()
    assert line.startswith("7/0: answer: 'It is\\n2.', ") and "token_ids" not in line


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        ("group_status = 'trained' and reward > 0.5", ["0/1", "1/1"]),
        ("trained_step = 0 and reward != 1", ["0/0", "1/0"]),
        ("labels['quality'] = 'good'", ["4/0"]),
        ("contains(segment, 'nothing')", []),
    ],
)
def test_a_condition_chooses_rows(live: Path, tmp_path: Path, condition: str, ids: list[str]) -> None:
    call("export", live, tmp_path / "out.jsonl", "--where", condition)
    assert sorted(row["experience_id"] for row in read_jsonl(tmp_path / "out.jsonl")) == ids


@pytest.mark.parametrize("condition", ["rewards > 1", "group_status = trained", ""])
def test_a_bad_condition_is_refused(live: Path, tmp_path: Path, condition: str) -> None:
    out = tmp_path / "out.jsonl"
    for command in (("head", live), ("export", live, out), ("import", live, out, "--name", "good")):
        with pytest.raises(DataError, check=about("where", condition)):
            call(*command, "--where", condition)
    assert not out.exists()


def test_show_has_everything_that_is_known_of_a_row(live: Path) -> None:
    text = call("show", live, "7/0")
    for part in ("7/0", "'format': 0.5", "[user]\n1 + 1?", "[assistant]\nIt is\n2.", "4: 1 of the prompt, 3 produced"):
        assert part in text
    text = call("show", live, "0/1")
    for part in ("  group_status         trained", "last trained at step 0", "mean -1, from -1 to -1, on 3 tokens"):
        assert part in text
    assert "late feedback        reward None, labels {'quality': 'bad'}, after version 0" in text
    assert "store                expert/gold" in call("show", live, "90/1")
    with pytest.raises(DataError, check=about("experience_id", "8/0")):
        call("show", live, "8/0")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_exported_is_read_by_pandas_and_imported_whole(live: Path, tmp_path: Path, suffix: str) -> None:
    out, again = tmp_path / f"out.{suffix}", tmp_path / "again.jsonl"
    assert f"13 rows in {out}" in call("export", live, out)
    frame = pd.read_parquet(out) if suffix == "parquet" else pd.read_json(out, lines=True, dtype={"group_id": str})
    counts = frame["group_status"].value_counts().to_dict()
    assert counts == {"dropped": 2, "leased": 4, "ready": 3, "trained": 4}
    assert "13 rows loaded as demonstrations 'found' of tool" in call("import", live, out, "--name", "found")
    call("export", live, again, "--store", "expert/found")
    before = {row["experience_id"]: row for row in read_jsonl_of(out, tmp_path)}
    for row in read_jsonl(again):
        changed = {"source": "expert", "uses": 0, "group_status": None, "trained_step": None}
        assert row == before[row["experience_id"]] | changed | {"segment": row["segment"]}
    assert len(before) == 13


def test_of_a_file_those_rows_are_imported_that_meet_the_condition(live: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out.parquet", tmp_path / "again.jsonl"
    call("export", live, out)
    message = call("import", live, out, "--name", "good", "--where", "reward = 1 and group_id != '7'")
    call("export", live, again, "--store", "expert/good")
    wanted = [r for r in read_jsonl_of(out, tmp_path) if r["reward"] == 1 and r["group_id"] != "7"]
    assert [row["experience_id"] for row in read_jsonl(again)] == [row["experience_id"] for row in wanted]
    assert 0 < len(wanted) < 13 and f"{len(wanted)} rows loaded as demonstrations 'good'" in message
    with pytest.raises(DataError, check=about("where", "group_status = 'trained'")):
        call("import", live, out, "--name", "good", "--where", "group_status = 'trained'")
    with pytest.raises(DataError, check=about("where")):
        call("import", live, out, "--name", "good", "--where", "reward > 1000")


def read_jsonl_of(out: Path, folder: Path) -> list[dict[str, Any]]:
    if out.suffix == ".jsonl":
        return read_jsonl(out)
    return pq.read_table(out).to_pylist(maps_as_pydicts="strict")


def test_chosen_columns_are_exported_and_an_empty_choice_is_a_readable_file(live: Path, tmp_path: Path) -> None:
    call("export", live, tmp_path / "few.jsonl", "--columns", "experience_id,group_status", "--where", "reward = 7")
    assert read_jsonl(tmp_path / "few.jsonl") == [{"experience_id": "4/0", "group_status": "ready"}]
    call("export", live, tmp_path / "none.parquet", "--where", "reward = 8")
    assert len(pd.read_parquet(tmp_path / "none.parquet")) == 0
    few, none = tmp_path / "few.jsonl", tmp_path / "none.parquet"
    with pytest.raises(DataError, check=about(str(few), ["experience_id", "group_status"])):
        call("import", live, few, "--name", "found")
    with pytest.raises(DataError, check=about("demonstrations.found")):
        call("import", live, none, "--name", "found")


def test_an_export_that_fails_leaves_no_file(live: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "out.csv", tmp_path / "nowhere" / "out.jsonl"):
        with pytest.raises(DataError, check=about("file", str(out))):
            call("export", live, out)
    with pytest.raises(DataError, check=about("columns", "rewards")):
        call("export", live, tmp_path / "out.jsonl", "--columns", "rewards")
    assert list(tmp_path.iterdir()) == []


def test_a_jsonl_export_is_a_file_of_demonstrations(live: Path, tmp_path: Path, tiny_model: Path) -> None:
    call("export", live, tmp_path / "out.jsonl", "--where", "group_id = '7'")
    config = DemonstrationsConfig(path=tmp_path / "out.jsonl", messages="turns")
    [row], left_out = from_source(RowEncoder("gold", config, ChatTokenizer(str(tiny_model)), 64))
    assert row.turns == TURNS and not len(left_out)


def test_broken_files_are_not_imported(live: Path, tmp_path: Path) -> None:
    call("export", live, tmp_path / "good.jsonl", "--store", "expert/gold")
    first, *rest = (tmp_path / "good.jsonl").read_text().splitlines()
    for change, problem in (
        (None, "line 1: not JSON"),
        ({"token_ids": "x"}, "rows are not experiences"),
        ({"group_id": None}, "column 'group_id' has missing values"),
        ({"prompt_length": 9}, "row 0 is invalid: empty prompt or answer"),
    ):
        broken = "{" if change is None else json.dumps({**json.loads(first), **change})
        (tmp_path / "bad.jsonl").write_text("\n".join([broken, *rest]))
        with pytest.raises(DataError, match=problem):
            call("import", live, tmp_path / "bad.jsonl", "--name", "bad")
    (tmp_path / "bad.parquet").write_text("no Parquet")
    for name in ("bad.parquet", "none.jsonl", "x.csv"):
        with pytest.raises(DataError, check=about("file", str(tmp_path / name))):
            call("import", live, tmp_path / name, "--name", "bad")
    assert "expert/bad" not in json.loads(call("stats", live))["stores"]


def test_a_run_that_ended_takes_no_rows_and_says_what_to_do(live: Path, tmp_path: Path) -> None:
    call("export", live, tmp_path / "out.jsonl")
    older = live.with_name("tool.20260101-000000")
    older.mkdir()
    (older / "config.yaml").write_text((live / "config.yaml").read_text())
    config = load_config(small_config(live.parent, "ended"))
    config.folder.mkdir()
    (config.folder / "config.yaml").write_text(dump_config(config))
    for folder in (older, config.folder):  # another run of that name is under way, or none is
        with pytest.raises(RunNotFound, check=about("run", str(folder))):
            call("import", folder, tmp_path / "out.jsonl", "--name", "found")


def test_damaged_files_are_passed_over_only_when_told_to(live: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tool"
    shutil.copytree(live, copy)
    [segment] = copy.glob("buffer/segment-*")
    segment.write_bytes(segment.read_bytes()[:-1] + b"?")
    for command in (("head", copy), ("export", copy, tmp_path / "out.jsonl")):
        with pytest.raises(StorageError, match=r"segment-00000000\.arrow: the file was changed"):
            call(*command)
        assert f"skipped 13 rows of {segment}, which cannot be read" in call(*command, "--skip-damaged")
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_rows_of_a_run_that_ended_are_erased_by_id_from_its_log_and_from_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(small_config(tmp_path, "ended"))
    config.folder.mkdir()
    (config.folder / "config.yaml").write_text(dump_config(config))
    ObjectTable(monkeypatch)
    buffer = LocalBuffer(config.folder / "buffer", config.buffer)
    buffer.put([(group(number), None) for number in range(3)])
    buffer.kill()
    files = [tmp_path / "rows.jsonl", tmp_path / "rows.parquet"]
    for file in files:
        call("export", config.folder, file)
    before = [files[0].read_text().splitlines(), pq.read_table(files[1])]
    named = [part for file in files for part in ("--file", file)]
    journal, _ = open_journal(feedback_folder(config.folder))
    said = [Judgement(name, "Ann", f"one:{name}", "one", (name,), score=4) for name in ("1/0", "2/0")]
    journal.append(*(entry_line(JudgementAdded(each)) for each in said))
    journal.close()
    page, *erased = call("forget", config.folder, "--id", "1/0", *named).splitlines()
    assert page == "1 entries of the feedback page erased"
    assert erased == ["2 rows erased", *(f"2 rows erased from {file}" for file in files)]
    assert files[0].read_text().splitlines() == [*before[0][:2], *before[0][4:]], "the others are as they were"
    assert pq.read_table(files[1]) == pa.concat_tables([before[1][:2], before[1][4:]])
    again = call("forget", config.folder, "--id", "1/0", "--days", 0, *named).splitlines()
    assert again == [
        "0 entries of the feedback page erased",
        "0 rows erased",
        *(f"0 rows erased from {file}" for file in files),
    ]
    call("export", config.folder, files[0], "--columns", "experience_id,reward")
    with pytest.raises(DataError, check=about("file", str(files[0]))):
        call("forget", config.folder, "--id", "1/0", "--file", files[0])
    stats = json.loads(call("stats", config.folder))
    assert stats["ledger"]["dropped"] == {"forgotten": 2} and stats["stores"]["usual"]["rows"] == 4
