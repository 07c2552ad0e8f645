"""Rows of tasks from where people have them: the hub and its cache, saved data sets, CSV, Ray Data; and broken ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets.exceptions import DatasetNotFoundError

from rayrft.config import TasksConfig, TaskSourceConfig, read_config
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.rows import RowsConfig
from rayrft.data.demonstrations import RowEncoder, from_source
from rayrft.data.row_sources import open_source_table
from rayrft.data.tables import open_table, write_table
from rayrft.data.task_sources import RowsRead, read_source
from rayrft.data.task_splits import load_tasks
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from tests.conftest import ROOT
from tests.errors import about

ROWS = [{"question": f"What is {i} + 1?", "answer": f"Add.\n#### {i + 1}", "level": i} for i in range(6)]
HUB = {"source": "datasets", "dataset": "openai/gsm8k", "config": "main"}


def read(note: list[RowsRead] | None = None, **source: Any) -> list[Task]:
    config = TaskSourceConfig.model_validate(source)
    return read_source(config, "tasks.sources.0", (lambda read: None) if note is None else note.append)


@pytest.fixture
def hub_cache(tmp_path: Path, gsm8k: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds openai/gsm8k as if it had been loaded from the hub once, which cannot be reached now."""
    built = datasets.load_dataset(str(gsm8k), "main", cache_dir=str(tmp_path / "built"))
    [made] = Path(built["train"].cache_files[0]["filename"]).parents[0:1]
    kept = tmp_path / "cache" / "openai___gsm8k" / "main" / "0.0.0" / "e53f048856ff4f594e959d75785d2c2d37b678ee"
    kept.parent.mkdir(parents=True)
    made.rename(kept)
    info = kept / "dataset_info.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "config_name": "main"}))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return kept


def test_the_gsm8k_job_reads_its_tasks_by_their_id_on_the_hub(hub_cache: Path, gsm8k: Path) -> None:
    tasks = TasksConfig.model_validate(yaml.safe_load((ROOT / "jobs/gsm8k_grpo.yaml").read_text())["tasks"])
    test = [json.loads(line) for line in (gsm8k / "main/test.jsonl").read_text().splitlines()]
    [source] = tasks.sources
    splits = load_tasks(tasks.model_copy(update={"eval_size": min(300, len(test))}), {}, seed=0)
    assert [task.question for task in splits.evaluation] == [row["question"] for row in test][:300]
    assert splits.train[0].question.startswith("Natalia sold clips to 48") and splits.train[0].answer == "72"
    assert all("####" not in task.answer for task in splits.train), "the worked solution is not the ground truth"
    assert splits.train[0].system == source.system
    with pytest.raises(DataError, check=about("tasks.sources.0.config", "mian"), match="main"):
        read(**{**HUB, "config": "mian"})


def test_the_hub_is_asked_for_what_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*given: Any, **named: Any) -> dict[str, Any]:
        asked.append((*given, named))
        return {"train": datasets.Dataset.from_list(ROWS)}

    monkeypatch.setattr(datasets, "load_dataset", load)
    tasks = read(**HUB, revision="v1.1", size=2, answer_after="####")
    assert asked == [("openai/gsm8k", "main", {"revision": "v1.1", "streaming": False})]
    assert [task.answer for task in tasks] == ["1", "2"]
    assert tasks[0].id == Task.create("openai/gsm8k", "What is 0 + 1?", "1", metadata=tasks[0].metadata).id


@pytest.mark.parametrize(
    ("error", "key", "remedy"),
    [
        (DatasetNotFoundError("Dataset 'x' is a gated dataset on the Hub. Ask for access."), "dataset", "HF_TOKEN"),
        (ConnectionError("Couldn't reach 'x' on the Hub (ConnectError)"), "dataset", "network"),
        (DatasetNotFoundError("Dataset 'x' doesn't exist on the Hub or cannot be accessed."), "dataset", "id"),
        (DatasetNotFoundError("Revision 'v9' doesn't exist for dataset 'x' on the Hub."), "revision", "commit"),
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "dataset", "revision"),
        (ValueError("BuilderConfig 'mian' not found. Available: ['main']"), "config", "name one"),
        (ValueError("Couldn't infer the same data file format for all splits."), "dataset", "check its files"),
    ],
)
def test_why_a_data_set_cannot_be_loaded_is_told_with_what_helps(
    error: Exception, key: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, check=about(f"tasks.sources.0.{key}")) as caught:
        read(**HUB, revision="v9")
    assert remedy in caught.value.remedy and str(error).split()[-1] in caught.value.problem


def test_saved_data_sets_are_read_whole_or_by_their_splits(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "split")
    one = read(source="datasets", dataset=str(tmp_path / "one"))
    both = read(source="datasets", dataset=str(tmp_path / "split"))
    assert [task.question for task in one] == [task.question for task in both] == [row["question"] for row in ROWS]
    assert len(read(source="datasets", dataset=str(tmp_path / "split"), split="test")) == 1
    with pytest.raises(DataError, check=about("tasks.sources.0.split", "tset"), match="'test'"):
        read(source="datasets", dataset=str(tmp_path / "split"), split="tset")


def test_files_of_arrow_of_either_format_are_read_one_by_one_and_as_a_folder(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table.slice(0, 4), max_chunksize=3)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.slice(4))
    assert [task.question for task in read(path=tmp_path / "a.arrow")] == [row["question"] for row in ROWS[:4]]
    assert [task.question for task in read(path=tmp_path)] == [row["question"] for row in ROWS]


PARTS = [{"type": "text", "text": "How many?"}]
CHANGING = [
    {"prompt": [{"role": "user", "content": "How many?"}], "answer": "1", "about": "7", "by": {"who": "ann"}},
    {"prompt": [{"role": "user", "content": PARTS}], "answer": "2", "about": {"level": 1}, "by": {"who": ["ann"]}},
]
"""Values change their type from row to row, also inside lists and objects: ``datasets`` makes them JSON."""


@pytest.fixture
def changing(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Sources that hold the same rows, by their kind."""
    lines = tmp_path / "lines" / "rows.jsonl"
    lines.parent.mkdir()
    lines.write_text("".join(json.dumps(row) + "\n" for row in CHANGING))
    data = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "saved")
    table = open_table(lines)
    write_table(tmp_path / "ours.parquet", table.schema, table.batches(10))
    return {
        "JSONL": {"path": lines},
        "folder of a data set": {"dataset": str(lines.parent)},
        "streamed folder of a data set": {"dataset": str(lines.parent), "streaming": True},
        "saved data set": {"dataset": str(tmp_path / "saved")},
        "files of a saved data set": {"path": tmp_path / "saved"},
        "Parquet": {"path": tmp_path / "rows.parquet"},
        "Parquet of rayrft": {"path": tmp_path / "ours.parquet"},
        "Ray Data": {"read": "read_parquet", "options": {"paths": str(tmp_path / "rows.parquet")}},
    }


@pytest.mark.usefixtures("ray_cluster")
def test_the_same_rows_give_the_same_tasks_whatever_holds_them(
    changing: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    expected = [({**row, "prompt": None}, "How many?", row["answer"]) for row in CHANGING]
    for kind, source in changing.items():
        tasks = read(**source)
        assert [(task.metadata | {"prompt": None}, task.question, task.answer) for task in tasks] == expected, kind
        with pytest.raises(DataError, match="'about' is an object"):
            read(**source, question="about")
        rows = open_source_table(RowsConfig.model_validate(source), "rows.0")
        write_table(tmp_path / "written.jsonl", rows.schema, rows.batches(1))
        assert [json.loads(line) for line in (tmp_path / "written.jsonl").open()] == CHANGING, kind


def test_demonstrations_have_the_keys_of_tasks(gsm8k: Path, tiny_model: Path) -> None:
    """A data set of the hub, of which only the rows that are asked for need to come."""
    hub = {"dataset": str(gsm8k), "config": "main", "split": "test", "streaming": True}
    form = DemonstrationsConfig.model_validate({**hub, "size": 3})
    rows, _ = from_source(encoder := RowEncoder("gold", form, ChatTokenizer(tiny_model), 4096))
    assert encoder.layouts.total() == 3, "rows beyond the size are not looked at"
    assert [row.turns[0]["content"] for row in rows] == [task.question for task in read(**hub, size=3)]
    assert next(iter(encoder.layouts)).startswith("question and answer: ")
    with pytest.raises(DataError, check=about("demonstrations.gold.split", "tset")):
        from_source(replace(encoder, form=DemonstrationsConfig.model_validate({**hub, "split": "tset"})))


def endless() -> Iterator[dict[str, str]]:
    yield from ({"question": f"How much is {i}?", "answer": str(i)} for i in range(5000))
    raise AssertionError("rows are read without an end")


def test_a_stream_without_an_end_is_read_up_to_the_size(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = datasets.IterableDataset.from_generator(endless)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": stream})
    hub = {"dataset": "my/web", "streaming": True, "size": 3}
    rows, _ = from_source(RowEncoder("gold", DemonstrationsConfig.model_validate(hub), ChatTokenizer(tiny_model), 4096))
    assert [row.turns[0]["content"] for row in rows] == [task.question for task in read(**hub)]


def test_rows_come_from_one_place() -> None:
    for wrong, key in (
        ({"path": "a.jsonl", "dataset": "b"}, "dataset"),
        ({"path": "a.jsonl", "streaming": True}, "streaming"),
        ({}, "path"),
    ):
        with pytest.raises(ConfigError, match=key):
            read_config(DemonstrationsConfig, wrong)
    with pytest.raises(ConfigError, match="source"):
        read_config(TaskSourceConfig, {"size": 3})
    assert TaskSourceConfig.model_validate({"read": "range"}).source == "ray"


def test_what_stands_in_csv_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_text('\ufeffquestion,answer,level\n"Two,\nlines?",007,1.5\nHow many?,42,\n\nWhich?,1e5,3\n')
    tasks = read(source="file", path=path)
    found = [(task.question, task.answer) for task in tasks]
    assert found == [("Two,\nlines?", "007"), ("How many?", "42"), ("Which?", "1e5")]
    assert [task.metadata["level"] for task in tasks] == [1.5, None, 3]


def test_row_numbers_of_pandas_are_not_metadata(tmp_path: Path) -> None:
    frame = pd.DataFrame({"question": ["a?", "b?", "c?", "d?"], "answer": ["1", "2", "3", "4"]})
    frame.iloc[[0, 1, 3]].to_parquet(tmp_path / "tasks.parquet")
    assert "__index_level_0__" in pq.read_schema(tmp_path / "tasks.parquet").names
    assert [[*task.metadata] for task in read(source="file", path=tmp_path / "tasks.parquet")] == [["answer"]] * 3


def test_the_answer_is_what_stands_after_the_last_mark(tmp_path: Path) -> None:
    answers = ["#### 3 is not it.\n#### 4", "7", "5####"]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": each, "answer": each}) + "\n" for each in answers))
    found = {"source": "file", "path": path, "answer_after": "####"}
    assert [task.answer for task in read(**found, on_broken="skip")] == ["4", "7"]
    with pytest.raises(DataError, check=about("tasks.sources.0.path", 3), match="nothing stands after '####'"):
        read(**found)


def test_broken_rows_end_it_or_are_counted_as_the_config_says(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    good = b"".join(b"question %d,%d\n" % (i, i) for i in range(3))
    path.write_bytes(b"question,answer\n" + good + b"too,many,values\nno answer,\n\xff\xfe,1\nlast,9\n")
    with pytest.raises(DataError, check=about("tasks.sources.0.path", 5), match="3 broken rows of 7") as caught:
        read(source="file", path=path)
    assert "line 5: has 3 values" in str(caught.value) and "on_broken" in caught.value.remedy
    skipped: list[RowsRead] = []
    tasks = read(skipped, source="file", path=path, on_broken="skip")
    assert [task.question for task in tasks] == ["question 0", "question 1", "question 2", "last"]
    [found] = skipped
    assert found.rows == 7 and found.left_out == {"broken (lines 5, 6, 7)": 3}
    lines = tmp_path / "tasks.jsonl"
    lines.write_text('{"question": "a", "answer": 1}\n{"question"\n[1]\n{"question": "b", "answer": 2}\n')
    assert [task.question for task in read(source="file", path=lines, on_broken="skip", size=1)] == ["a"]
    sources = [{"source": "file", "path": lines, "on_broken": "skip"}]
    splits = load_tasks(TasksConfig.model_validate({"sources": sources, "eval_size": 1}), {}, seed=0)
    assert [(each.rows, each.left_out) for each in splits.skipped] == [(4, {"broken (lines 2, 3)": 2})]


@pytest.mark.parametrize("text", ["", "question,answer\n", "\n\n"])
def test_a_file_without_a_task_is_refused_whatever_becomes_of_broken_rows(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_text(text)
    with pytest.raises(DataError, check=about("tasks.sources.0.path"), match="holds no rows"):
        read(source="file", path=path, on_broken="skip")
    path.write_text("question,answer\nalone\n")
    with pytest.raises(DataError, check=about("tasks.sources.0.path", 2), match="1 broken rows of 1"):
        read(source="file", path=path, on_broken="skip")


def test_tries_and_pass_rates_come_from_fields_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    rows = [{"question": "a", "answer": "1", "n": 8, "rate": 0.25}, {"question": "b", "answer": "1", "n": None}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    given = {"source": "file", "path": path, "tries": "n"}
    assert [(task.tries, task.pass_rate) for task in read(**given, pass_rate="rate")] == [(8, 0.25), (0, None)]
    with pytest.raises(DataError, check=about("tasks.sources.0.pass_rate", "rte"), match="'rate'"):
        read(**given, pass_rate="rte")
    with pytest.raises(DataError, check=about("tasks.sources.0.pass_rate"), match="8 tries with a pass rate of 8"):
        read(**given, pass_rate="n")


def words(count: int) -> Any:
    import ray.data

    return ray.data.from_items([{"question": str(i), "answer": str(i)} for i in range(count)])


def no_data(count: int) -> int:
    return count


@pytest.mark.usefixtures("ray_cluster")
def test_any_source_of_ray_data_is_a_source_of_tasks(tmp_path: Path) -> None:
    for part in range(3):
        rows = [{"question": f"{part} {i}", "answer": "a"} for i in range(40)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{part}.parquet")
    read_files = {"source": "ray", "read": "read_parquet", "options": {"paths": str(tmp_path)}}
    assert [task.question for task in read(**read_files)] == [f"{part} {i}" for part in range(3) for i in range(40)]
    own = {"source": "ray", "read": f"{__name__}:words"}
    assert [task.question for task in read(**own, options={"count": 9}, size=4)] == ["0", "1", "2", "3"]
    for key, source, message in [
        ("read", {"read": "read_parqet"}, "read_parquet"),
        ("read", {"read": f"{__name__}:wrds"}, "cannot be imported"),
        ("read", {"read": f"{__name__}:no_data", "options": {"count": 3}}, "gives a int"),
        ("read", {**own, "options": {"count": 0}}, "holds no rows"),
        ("options", {**own, "options": {"number": 3}}, "number"),
        ("options", {**read_files, "options": {"paths": str(tmp_path / "no-such")}}, "no-such"),
        ("answer", {**own, "options": {"count": 3}, "answer": "anser"}, "'answer'"),
    ]:
        with pytest.raises(DataError, check=about(f"tasks.sources.0.{key}"), match=message):
            read(**{"source": "ray", **source})


@pytest.mark.parametrize(("source", "key"), [("ray", "read"), ("tasks", "path"), ("file", "path")])
def test_a_source_that_lacks_what_it_reads_is_refused(source: str, key: str) -> None:
    with pytest.raises(ValueError) as caught:
        TasksConfig.model_validate({"sources": [{"source": source}]})
    [problem] = caught.value.errors()  # type: ignore[attr-defined]
    assert isinstance(cause := problem["ctx"]["error"].args[0], ConfigError) and cause.field == key
