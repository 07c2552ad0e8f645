"""Task sets: rows become tasks, sources are mixed without duplicates, splits do not overlap."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrft.config import TasksConfig, TaskSourceConfig
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.data.task_sources import read_source
from rayrft.data.task_splits import TaskSplits, load_tasks
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from tests.errors import about


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    rows = [{"problem": f"What is {i} + 1?", "solution": f"Add.\n#### {i + 1}", "level": i} for i in range(20)]
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist([*rows, rows[3]]), path)
    return path


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(*sources: Any, eval_size: int = 5, seed: int = 0, **demonstrated: int) -> TaskSplits:
    """Splits of sources, or of a config; so many tasks are shown by each of the demonstrations."""
    tasks = sources[0] if isinstance(sources[0], TasksConfig) else TasksConfig(sources=[*sources], eval_size=eval_size)
    return load_tasks(tasks, {name: DemonstrationsConfig(size=size) for name, size in demonstrated.items()}, seed)


def config(path: Path, *others: dict[str, Any], eval_size: int = 5, **changes: Any) -> TasksConfig:
    source = {"source": "file", "path": path, "question": "problem", "answer": "solution", **changes}
    return TasksConfig(sources=[source, *others], eval_size=eval_size)


def numbers(config: TaskSourceConfig, field: str) -> list[Task]:
    """A reader of one's own: questions first, first + 1, …, with a difficulty."""
    first = config.options["first"]
    assert config.size is not None
    return [Task.create("numbers", str(i), str(i), difficulty=float(i)) for i in range(first, first + config.size)]


def own(first: int, size: int, **changes: Any) -> dict[str, Any]:
    return {"source": f"{__name__}:numbers", "options": {"first": first}, "size": size, **changes}


def questions(splits: TaskSplits) -> list[str]:
    demonstrated = [task for part in splits.demonstrated.values() for task in part]
    return [task.question for task in (*splits.train, *splits.evaluation, *demonstrated)]


def test_parquet_rows_become_tasks_without_duplicates(parquet: Path) -> None:
    splits = load(config(parquet, answer_after="####"), gold=4)
    assert (len(splits.evaluation), len(splits.demonstrated["gold"]), len(splits.train)) == (5, 4, 11)
    assert splits.sources == [0] * 11
    tasks = [*splits.evaluation, *splits.demonstrated["gold"], *splits.train]
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == 20
    for task in tasks:
        assert task.question == f"What is {task.metadata['level']} + 1?"
        assert task.answer == str(task.metadata["level"] + 1)
        assert task.difficulty is None


def test_splits_follow_from_the_seed_and_training_tasks_keep_their_order(parquet: Path) -> None:
    first, again, other = (load(config(parquet), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.train != other.train
    levels = [task.metadata["level"] for task in first.train]
    assert levels == sorted(levels)


def test_held_out_tasks_from_a_file_of_their_own_never_reach_training(parquet: Path, tmp_path: Path) -> None:
    rows = [{"problem": "What is 3 + 1?", "solution": "#### 4"}, {"problem": "new", "solution": "#### 1"}]
    splits = load(config(parquet, eval_path=jsonl(tmp_path / "test.jsonl", *rows)))
    assert {task.question for task in splits.evaluation} == {"What is 3 + 1?", "new"}
    assert "What is 3 + 1?" not in {task.question for task in splits.train}
    assert len(splits.train) == 19


def test_a_held_out_file_keeps_its_questions_from_every_source(tmp_path: Path) -> None:
    held_out = jsonl(tmp_path / "test.jsonl", *({"question": str(i), "answer": "a"} for i in range(8, 12)))
    splits = load(own(0, 10), own(10, 10, eval_path=held_out), eval_size=4)
    assert [task.question for task in splits.evaluation[2:]] == ["8", "9"]
    assert not {task.question for task in splits.train} & {task.question for task in splits.evaluation}


def hub(folder: Path, **changes: Any) -> dict[str, Any]:
    source = {"source": "datasets", "dataset": str(folder), "config": "main", "eval_split": "test"}
    return {**source, "answer_after": "####", **changes}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"config": "mian"}, "config", "name one"),
        ({"config": None}, "config", "name one"),
        ({"split": "trian"}, "split", "did you mean 'train'"),
        ({"eval_split": "tset"}, "eval_split", "did you mean 'test'"),
        ({"question": "qestion"}, "question", "did you mean 'question'"),
        ({"answer": "x"}, "answer", "known: answer, question"),
        ({"images": "answer"}, "eval_split", "give paths"),
        ({"dataset": "rayrft/no-such-data-set"}, "dataset", "HF_HOME"),  # the tests' hub is offline
        ({"dataset": "/no/such/folder"}, "dataset", "a folder with a copy"),
    ],
)
def test_what_does_not_fit_a_data_set_is_named_with_its_remedy(
    gsm8k: Path, changes: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(DataError, check=about(f"tasks.sources.0.{field}")) as caught:
        load(hub(gsm8k, **changes), eval_size=2)
    assert remedy in caught.value.remedy


def test_a_broken_file_of_a_data_set_is_named_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": 1\nx')
    with pytest.raises(DataError, match="JSON", check=about("s.dataset")):
        read_source(TaskSourceConfig(**hub(tmp_path, config=None, eval_split=None)), "s")


def test_tasks_of_one_question_are_told_apart_by_all_they_have_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows = [{"problem": f"question {i % 50}", "solution": f"answer {i % 100}"} for i in range(110)]
    splits = load(config(jsonl(tmp_path / "tasks.jsonl", *rows)))
    held_out = {task.question for task in splits.evaluation}
    assert not held_out & {task.question for task in splits.train}
    other = [row for row in rows[:100] if row["problem"] not in held_out]
    assert [(task.question, task.answer) for task in splits.train] == [tuple(row.values()) for row in other]
    assert [(each.origin, each.rows, each.left_out) for each in splits.skipped if each.left_out] == [
        ("tasks.sources.0", 110, {"the same task again": 10}),
        ("tasks.sources.0", 95, {"shows a held-out task": 95 - len(other)}),
    ]


def test_one_question_for_all_tasks_is_refused_unless_their_environment_tells_them_apart(tmp_path: Path) -> None:
    rows = [{"problem": "Play.", "solution": "", "seed": i} for i in range(100)]
    with pytest.raises(DataError, match="metadata 'environment' say what differs", check=about("tasks.sources.0")):
        load(config(jsonl(tmp_path / "tasks.jsonl", *rows)))


def test_a_procedural_question_that_comes_again_is_one_task() -> None:
    words = {"min_word_len": 3, "max_word_len": 3}
    source = {"source": "reasoning_gym", "dataset": "spell_backward", "options": words, "size": 1000}
    splits = load(source, eval_size=40, gold=60)
    asked = questions(splits)
    assert len(asked) == len(set(asked)) == 1000 - splits.skipped[0].left_out["the same task again"]


def test_a_question_of_two_sources_stays_with_the_first() -> None:
    splits = load(own(0, 60), own(40, 60), eval_size=10, seed=3, gold=6)
    assert sorted(questions(splits), key=int) == [str(i) for i in range(100)]
    for task, source in zip(splits.train, splits.sources, strict=True):
        assert source == (int(task.question) >= 60)


def test_held_out_and_demonstrated_tasks_are_shared_by_weight() -> None:
    splits = load(own(0, 50, weight=3), own(100, 50), own(200, 50), eval_size=12, gold=10, more=5)
    for part, shares in (
        (splits.evaluation, ((7, 8), (2, 3), (2, 3))),
        (splits.demonstrated["gold"], ((6,), (2,), (2,))),
        (splits.demonstrated["more"], ((3,), (1,), (1,))),
    ):
        counts = Counter(int(task.question) // 100 for task in part)
        assert all(counts[source] in allowed for source, allowed in enumerate(shares)), counts
    assert len(questions(splits)) == len(set(questions(splits))) == 150


def test_a_source_of_which_nothing_is_left_or_less_than_its_share_is_refused(parquet: Path) -> None:
    with pytest.raises(DataError, match=r"tasks\.sources\.1: no task is left to train on \(0 in the source"):
        load(own(0, 60), own(10, 20), eval_size=1)
    with pytest.raises(DataError, match=r"tasks\.eval_size: only 4 of 5 tasks are left \(4 distinct"):
        load(own(0, 60), own(100, 4), eval_size=10)
    with pytest.raises(DataError, check=about("tasks.sources.0")):
        load(config(parquet), gold=15)


def test_difficulties_come_from_a_field_of_the_rows(parquet: Path) -> None:
    splits = load(config(parquet, difficulty="level"))
    assert [task.difficulty for task in splits.train] == [task.metadata["level"] for task in splits.train]


@pytest.mark.parametrize("levels", [[1.0, None], [1.0, float("nan")], ["hard", "easy"], ["3", "4"], [True], [None]])
def test_the_first_row_without_a_number_for_its_difficulty_is_named(tmp_path: Path, levels: list[Any]) -> None:
    first = 2 if levels[0] == 1.0 and levels[0] is not True else 1
    rows = [{"problem": str(i), "solution": "a", "level": level} for i, level in enumerate(levels)]
    path = jsonl(tmp_path / "tasks.jsonl", *rows)
    problem = f": line {first}: it has no number in 'level'"
    with pytest.raises(DataError, match=problem, check=about("tasks.sources.0.difficulty")):
        load(config(path, difficulty="level"))


def test_the_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    sizes = [5000, 1, 300, 1, 2000, 7]
    for number, size in enumerate(sizes):
        rows = [{"question": f"{number} {i}", "answer": "a"} for i in range(size)]
        jsonl(tmp_path / f"{number}.jsonl", *rows)
    tasks = read_source(TaskSourceConfig(source="file", path=tmp_path), "tasks.sources.0")
    assert [task.question for task in tasks] == [
        f"{number} {i}" for number, size in enumerate(sizes) for i in range(size)
    ]


ASKED = {"role": "user", "content": "1 + 1?"}


@pytest.mark.parametrize(
    ("row", "names", "task"),
    [
        ({"problem": [ASKED], "solution": "2"}, {}, ("1 + 1?", "2", None)),
        ({"problem": [{"role": "system", "content": "Add."}, ASKED], "solution": 2}, {}, ("1 + 1?", "2", "Add.")),
        ({"problem": "10 ** 18?", "solution": 10**18}, {}, ("10 ** 18?", f"1{'0' * 18}", None)),
        ({"problem": "1 / 2?", "solution": 0.5}, {}, ("1 / 2?", "0.5", None)),
        ({"problem": "true?", "solution": True}, {}, ("true?", "true", None)),
        (
            {"p": {"q": [ASKED]}, "reward_model": {"style": "rule", "ground_truth": "2"}},
            {"question": "p.q", "answer": "reward_model.ground_truth"},
            ("1 + 1?", "2", None),
        ),
    ],
)
@pytest.mark.parametrize("write", [jsonl, lambda path, row: pq.write_table(pa.Table.from_pylist([row]), path)])
def test_the_type_of_a_value_decides_what_it_says(
    tmp_path: Path, write: Any, row: dict[str, Any], names: dict[str, str], task: tuple[str, str, str | None]
) -> None:
    path = tmp_path / ("rows.jsonl" if write is jsonl else "rows.parquet")
    write(path, row)
    [read] = read_source(config(path, **names).sources[0], "tasks.sources.0")
    assert (read.question, read.answer, read.system) == task
    path = jsonl(tmp_path / "large.jsonl", {"problem": "2 ** 2000?", "solution": 2**2000})
    assert read_source(config(path).sources[0], "s")[0].answer == str(2**2000), "the digits that no float holds"


@pytest.mark.parametrize(
    ("row", "key", "problem", "remedy"),
    [
        ({"solution": [["a"], "b"]}, "answer", "'solution' is a list", "name a field that holds"),
        ({"solution": {"style": "rule", "truth": "2"}}, "answer", "'solution' is an object", "such as solution.style"),
        ({"solution": float("inf")}, "answer", "not a finite number", "fill it in"),
        ({"problem": {"text": "1 + 1?"}}, "question", "'problem' is an object", "such as problem.text"),
        ({"problem": [ASKED, {**ASKED, "role": "tool"}, ASKED]}, "question", "not a prompt", "texts of system"),
        ({"problem": [{**ASKED, "name": "Ann"}]}, "question", "besides role and content: name", "texts of system"),
        ({"problem": ["1 + 1?"]}, "question", "problem[0] is not a message", "on_broken: skip"),
        ({"problem": [{"role": "system", "content": "Add."}, ASKED]}, "system", "has a system message", "leave one"),
        ({"problem": "half a \ud800"}, "path", "not valid Unicode", "on_broken: skip"),
        ({"other": "half a \ud800"}, "path", "not valid Unicode", "on_broken: skip"),
    ],
)
def test_a_value_that_is_no_text_is_refused_by_row_and_field_or_skipped(
    tmp_path: Path, row: dict[str, Any], key: str, problem: str, remedy: str
) -> None:
    sound = {"problem": "2 + 2?", "solution": "4"}
    path = jsonl(tmp_path / "rows.jsonl", sound, {"problem": "1 + 1?", "solution": "2", **row})
    system = {"system": "Count."} if key == "system" else {}
    source = config(path, **system).sources[0]
    with pytest.raises(DataError, check=about(f"tasks.sources.0.{key}")) as caught:
        read_source(source, "tasks.sources.0")
    assert "line 2: " in caught.value.problem and problem in caught.value.problem and remedy in caught.value.remedy
    [kept] = read_source(source.model_copy(update={"on_broken": "skip"}), "tasks.sources.0")
    assert kept.question == "2 + 2?"


def test_rows_of_compressed_files_arrays_and_tab_separated_values_are_those_of_lines(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = "".join("\t".join(each) + "\n" for each in [["question", "answer"], *(row.values() for row in rows)])
    files = {
        "a.jsonl": lines,
        "a.json": json.dumps(rows, indent=1),
        "b.jsonl": "\ufeff" + json.dumps(rows),
        "a.tsv": table,
        "folder/a.jsonl.gz": lines,
        "a.csv.gz": table.replace("\t", ","),
        "a.json.gz": json.dumps(rows),
    }
    (tmp_path / "folder").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        path = tmp_path / name.partition("/")[0]
        read = read_source(TaskSourceConfig(source="file", path=path), "tasks.sources.0")
        assert [(task.question, task.answer) for task in read] == [tuple(row.values()) for row in rows], name


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"these are not rows\n", "not JSON"),
        ("a.json", b'[{"question": 1},', "not JSON"),
        ("a.json", b'{\n "rows": []\n}', "one JSON object over several lines"),
        ("a.jsonl", b'[{"question": 1, "question": 2}]', "the key 'question' twice"),
        ("a.jsonl.gz", gzip.compress(b'{"question": 1}\n' * 1000)[:40], "cannot be read: Truncated"),
        ("a.jsonl.gz", b'{"question": 1}\n', "cannot be read: "),
    ],
    ids=["no rows", "part of a list", "one object", "a key twice", "cut off", "not compressed"],
)
def test_a_file_that_cannot_be_read_says_what_it_is(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem, check=about("tasks.sources.0.path")):
        read_source(TaskSourceConfig(source="file", path=tmp_path / name), "tasks.sources.0")


def test_rows_beyond_the_size_are_not_looked_at(tmp_path: Path) -> None:
    rows = [{"problem": str(i), "solution": "a"} for i in range(10)]
    path = jsonl(tmp_path / "tasks.jsonl", *rows, {"problem": "", "solution": "a"})
    assert len(load(config(path, size=10)).train) == 5
    with pytest.raises(DataError, check=about("tasks.sources.0.question", 11)):
        load(config(path))


def test_procedural_tasks_have_difficulties_from_their_metadata_and_no_answer_if_they_give_none() -> None:
    source = TaskSourceConfig(source="reasoning_gym", dataset="spell_backward", size=20, difficulty="word_len")
    for task in read_source(source, "tasks.sources.0"):
        assert task.difficulty == len(task.answer)
    source = TaskSourceConfig(source="reasoning_gym", dataset="rush_hour", size=1)
    assert [task.answer for task in read_source(source, "tasks.sources.0")] == [""]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "spell_backwards"}, r"tasks\.sources\.4\.dataset: .*Did you mean 'spell_backward'"),
        ({"options": {"word_size": 3}}, r"tasks\.sources\.4\.options: reasoning-gym refuses the options.*word_size"),
        ({"difficulty": "word"}, r"tasks\.sources\.4\.difficulty: task 1 of spell_backward has no number in 'word'"),
        ({"difficulty": "wordlen"}, r"task 1 of .* Name one of the fields \['difficulty', .*'word_len'\]"),
    ],
)
def test_a_wrong_key_of_a_procedural_source_is_named(changes: dict[str, Any], message: str) -> None:
    source = {"source": "reasoning_gym", "dataset": "spell_backward", "size": 3, **changes}
    with pytest.raises(DataError, match=message):
        read_source(TaskSourceConfig.model_validate(source), "tasks.sources.4")


def raises(config: TaskSourceConfig, field: str) -> list[Task]:
    raise KeyError("rows")


def texts(config: TaskSourceConfig, field: str) -> list[str]:
    return ["a", "b"]


@pytest.mark.parametrize("source", ["raises", "texts"])
def test_a_source_that_raises_or_gives_no_tasks_is_named(source: str) -> None:
    name = f"{__name__}:{source}"
    with pytest.raises(DataError, check=about("tasks.sources.0.source", name)):
        read_source(TaskSourceConfig(source=name), "tasks.sources.0")


def test_an_unknown_kind_of_source_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, check=about("tasks.sources.0.source", "files")):
        read_source(TaskSourceConfig(source="files", path=Path("x")), "tasks.sources.0")
