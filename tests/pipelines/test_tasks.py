"""Pipelines of the tasks of a run: the same again on a resume, and nothing that is evaluated on is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrft.config import RunConfig, load_config
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from rayrft.pipelines.report import summary
from rayrft.pipelines.run.process import Pipeline
from rayrft.pipelines.tasks import load_processed, load_splits, process_added
from tests.e2e.conftest import small_config
from tests.errors import about
from tests.pipelines.small import OWN, write

pytestmark = pytest.mark.usefixtures("forked_templates")

LEAK = "Ann bakes muffins for all of her friends every single day with four of the eggs that her ducks lay."


def read(config: Any, field: str) -> list[Task]:
    """A reader of tasks that stand in the config, each with a picture if that is asked for."""
    rows, pictured = config.options["rows"], config.options.get("pictured")
    images = [(f"{number}.png",) if pictured else () for number in range(len(rows))]
    return [
        Task.create(field, *row, metadata={"level": 3}, images=each) for row, each in zip(rows, images, strict=True)
    ]


def source(rows: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    return {"source": f"{__name__}:read", "options": {"rows": rows}, **more}


def config(
    tmp_path: Path, *sources: dict[str, Any], eval_size: int = 1, sampler: str = "shuffled", **more: Any
) -> RunConfig:
    tasks = {"sources": list(sources), "eval_size": eval_size, "sampler": sampler}
    stage = {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 1, "batch_size": 4, "group_size": 2}
    more |= {"tasks": tasks, "demonstrations": {}, "plugins": [str(OWN)], "stages": [stage]}
    return load_config(small_config(tmp_path, "tasks", **more))


def numbered(count: int) -> list[tuple[str, str]]:
    return [(f"question {number}", str(number)) for number in range(count)]


def test_episodes_of_one_question_are_tasks_of_their_own(tmp_path: Path) -> None:
    rows = [{"question": "Play. " * 30, "answer": "", "environment": {"seed": i}} for i in range(100)]
    path = write(tmp_path / "episodes.jsonl", [*rows, rows[0]])
    found = load_processed(config(tmp_path, {"source": "file", "path": str(path)}, eval_size=5))
    assert (len(found.splits.train), len(found.splits.evaluation)) == (95, 5)
    assert len({task.id for task in (*found.splits.train, *found.splits.evaluation)}) == 100
    read, repeated = found.reports[:2]
    assert list(read.layouts) == ["question and answer: question → question, answer → answer"]
    assert repeated.reasons == {"the same task again": 1}


def test_operators_work_on_the_tasks_of_all_sources(tmp_path: Path) -> None:
    operators = [
        {"name": "strip_markup"},
        {"name": "exact_duplicates", "columns": ["question"]},
        {"name": "expression", "where": "metadata->>'level' = '3' and source in ('one', '1')"},
        {"name": "shout"},
        {"name": "mirror"},
    ]
    given = config(
        tmp_path,
        source([("<b>question 3</b>", "x"), ("<i>new</i>", "y")], name="one"),
        source(numbered(5), workflow="math_qa", weight=2),
        pipelines={"tasks": operators},
    )
    found = load_processed(given)
    tasks = {task.question: task for task in (*found.splits.train, *found.splits.evaluation)}
    assert len(tasks) == 12
    new = Task.create("tasks.sources.0", "<i>new</i>", "y", metadata={"level": 3})
    assert (tasks["NEW!"].answer, tasks["NEW!"].id) == ("y", new.id)
    assert tasks["QUESTION 3!"].answer == "x", "the first one stays"
    assert tasks["!0 NOITSEUQ"].workflow == "math_qa" and tasks["!0 NOITSEUQ"].metadata == {"level": 3}
    assert len({task.id for task in tasks.values()}) == 12
    lines = summary(found.reports)
    assert lines[0].startswith("strip_markup: 2 changed (of 7")
    assert lines[1].startswith("exact_duplicates: 1 left out as duplicate (of 7")
    again, _ = load_splits(given, [])
    assert again == found.splits


def test_what_is_made_of_a_row_that_is_left_out_is_still_a_task_of_its_source(tmp_path: Path) -> None:
    where = "question not in ('0 noitseuq', '1 noitseuq')"
    operators = [{"name": "mirror"}, {"name": "echo"}, {"name": "expression", "where": where}]
    given = config(tmp_path, source(numbered(2), workflow="math_qa"), pipelines={"tasks": operators})
    found = load_splits(given, [])[0]
    tasks = [*found.train, *found.evaluation]
    assert {task.question for task in tasks} == {
        *(text for number in range(2) for text in (f"question {number}", f"question {number} question {number}")),
        *(f"{number} noitseuq {number} noitseuq" for number in range(2)),
    }
    assert all(task.workflow == "math_qa" and task.metadata == {"level": 3} for task in tasks)


def test_operators_are_checked_with_the_config_key_and_keep_ids_and_sources(tmp_path: Path) -> None:
    wrong = {"pipelines": {"tasks": [{"name": "normalise"}, {"name": "expression", "where": "reward > 1"}]}}
    with pytest.raises(ConfigError, check=about("pipelines.tasks.1.where")):
        load_processed(config(tmp_path, source(numbered(3)), **wrong))
    idle = {"pipelines": {"tasks": [{"name": "novelty", "ngram": 1}]}}
    with pytest.raises(ConfigError, check=about("pipelines.tasks.0", "novelty")):
        load_processed(config(tmp_path, source(numbered(3)), **idle))
    found = load_processed(config(tmp_path, source(numbered(3)), sampler="priority", **idle))
    assert all(task.priority == 0.5 for task in found.splits.train), "of two words, one is in no other task"
    with pytest.raises(ConfigError, match="Did you mean 'decontaminate'"):
        config(tmp_path, source(numbered(3)), pipelines={"decontaminat": False})
    given = config(tmp_path, source(numbered(2)), pipelines={"tasks": [{"name": "other_ids"}]})
    with pytest.raises(DataError, check=about("column id")):
        load_splits(given, [])
    nothing = {"pipelines": {"tasks": [{"name": "expression", "where": "source = '0'"}]}}
    with pytest.raises(DataError, check=about("tasks.eval_size")):
        other = source([("other", "1")], weight=5)
        load_processed(config(tmp_path, source(numbered(3)), other, eval_size=2, **nothing))
    nothing["pipelines"]["tasks"].append({"name": "expression", "where": "source = '1'"})
    with pytest.raises(DataError, match="expression left out 3 of 3", check=about("pipelines.tasks")):
        load_processed(config(tmp_path, source(numbered(3)), other, **nothing))


def test_what_is_evaluated_on_is_not_trained_on_unless_asked_for(tmp_path: Path) -> None:
    rows = [*numbered(30), (f"Think about this one: {LEAK} What does she earn?", "9")]
    taskset = {"tasksets": {"bench": source([(f"{LEAK} How many?", "4")])}, "samples": 1, "k": [1]}
    clean = load_processed(config(tmp_path, source(rows), bench=taskset))
    assert len(clean.splits.train) + len(clean.splits.evaluation) == 30
    assert clean.reports[-1].reasons == {"shares 13 words with an evaluation task": 1}
    assert "Ann bakes" in clean.reports[-1].left_out[0].reason
    assert clean.splits.sources == [0] * len(clean.splits.train)
    off = load_processed(config(tmp_path, source(rows), bench=taskset, pipelines={"decontaminate": False}))
    assert len(off.splits.train) == 30 and off.reports == []
    with pytest.raises(DataError, check=about("tasks.sources.1")):
        load_processed(
            config(tmp_path, source(numbered(30)), source([(f"{LEAK} And?", "1")], weight=0.001), bench=taskset)
        )


def test_tasks_that_differ_in_their_images_alone_are_not_the_same(tmp_path: Path) -> None:
    rows = [("What colour is the square?", "red"), ("What colour is the square?", "blue")]
    few, many = (source([], options={"rows": rows * times, "pictured": True}) for times in (1, 20))
    found = load_processed(config(tmp_path, many))
    assert len(found.splits.train) == 39
    found = load_processed(config(tmp_path, many, bench={"tasksets": {"bench": few}, "samples": 1, "k": [1]}))
    assert len(found.splits.train) + len(found.splits.evaluation) in (38, 39), "the held-out one may be one of the two"
    assert {task.images for task in found.splits.train}.isdisjoint({("0.png",), ("1.png",)})


def new(*questions: str) -> list[Task]:
    return [Task.create("new", question, str(number)) for number, question in enumerate(questions)]


def test_added_tasks_go_through_the_operators_as_if_they_stood_at_the_end_of_their_source(tmp_path: Path) -> None:
    operators = [
        {"name": "strip_markup"},
        {"name": "expression", "where": "question <> 'bad'"},
        {"name": "exact_duplicates", "columns": ["question"]},
        {"name": "mirror"},
    ]
    given = config(tmp_path, source(numbered(6)), source([("other", "1")]), pipelines={"tasks": operators})
    tasks = new("<b>fresh</b>", "<i>question 3</i>", "bad", "question 5", "<b>earlier</b>", "<b>fresh</b>")
    found = process_added(given, tasks, 1, earlier=new("earlier"))
    fresh, made = found.tasks
    third = Task.create("tasks.sources.0", "question 3", "3", metadata={"level": 3})
    assert (fresh.id, fresh.question, made.question) == (tasks[0].id, "fresh", "hserf")
    assert found.left_out == {
        tasks[1].id: f"exact_duplicates: duplicate: of {third.id}",
        tasks[2].id: "expression: not question <> 'bad'",
        tasks[3].id: "another task: the same question",
        tasks[4].id: f"exact_duplicates: duplicate: of {new('earlier')[0].id}",
        tasks[5].id: "another task: the same question",
    }


def test_operators_of_single_rows_see_the_added_tasks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(tmp_path, source(numbered(40)), pipelines={"tasks": [{"name": "shout"}]})
    seen = list[int]()
    run = Pipeline.run

    def counted(self: Pipeline, batches: Any, *rest: Any, **more: Any) -> Any:
        batches = list(batches)
        seen.append(sum(batch.num_rows for batch in batches))
        return run(self, batches, *rest, **more)

    monkeypatch.setattr(Pipeline, "run", counted)
    assert [task.question for task in process_added(given, new("fresh"), 0).tasks] == ["FRESH!"]
    assert seen == [40, 1], "the sources, of which the evaluation tasks are, and the new ones"


def test_an_added_task_that_shows_an_evaluation_task_is_left_out(tmp_path: Path) -> None:
    taskset = {"tasksets": {"bench": source([(f"{LEAK} How many?", "4")])}, "samples": 1, "k": [1]}
    given = config(tmp_path, source(numbered(9)), bench=taskset)
    tasks = new(f"Well: {LEAK} What then?", "harmless", f"{LEAK} How many?")
    found = process_added(given, tasks, 0)
    assert [task.question for task in found.tasks] == ["harmless"]
    assert found.left_out[tasks[0].id].startswith("decontaminate: shares 13 words with an evaluation task")
    assert found.left_out[tasks[2].id] == "another task: the same question"
    off = config(tmp_path, source(numbered(9)), bench=taskset, pipelines={"decontaminate": False})
    assert len(process_added(off, tasks, 0).tasks) == 2
