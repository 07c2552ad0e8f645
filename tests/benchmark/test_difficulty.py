"""Files of tasks with their pass rates, measured with engines or by a run, which are sources of tasks again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayrft.benchmark.difficulty import measure_difficulty, write_solved
from rayrft.buffer.events import GroupReport
from rayrft.cli.main import app
from rayrft.config import TaskSourceConfig, dump_config, load_config
from rayrft.core import engine_groups
from rayrft.data.inputs import task_set_spec
from rayrft.data.task_sources import read_source
from rayrft.errors import ConfigError, DataError, StorageError
from rayrft.experience import Task
from rayrft.pipelines.tasks import load_processed
from tests.buffer.in_process import LocalBuffer, small
from tests.buffer.rows import plan
from tests.e2e.conftest import small_config
from tests.errors import about
from tests.scripted_engine import ScriptedEngine


def tasks_in(path: Path) -> list[Task]:
    return read_source(TaskSourceConfig(source="tasks", path=path), "tasks.sources.0")


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run on words of three letters, whose engine draws letters of the question."""
    monkeypatch.setattr(engine_groups, "RolloutEngine", ScriptedEngine)
    given = small_config(tmp_path, "words", demonstrations={}, reward={"name": "reasoning_gym"})
    given["model"] = {"path": str(tiny_model), "max_length": 64}
    given["tasks"]["sources"][0].update(size=12, name="spell")
    given["tasks"]["eval_size"] = 2
    given["explorer"]["sampling"] = {"max_tokens": 4, "max_prompt_tokens": 50, "temperature": 0.7}
    given["stages"] = [{"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 1, "batch_size": 4, "group_size": 2}]
    return given


@pytest.mark.usefixtures("ray_cluster")
def test_the_difficulty_of_every_task_is_measured_once_and_is_a_source_of_tasks(
    config: dict[str, Any], tmp_path: Path
) -> None:
    said: list[str] = []

    class Interrupted(Exception):
        pass

    def interrupt(line: str) -> None:
        said.append(line)
        if line.endswith("of 10") and "tasks" not in line.split(":")[-1]:
            raise Interrupted

    with pytest.raises(Interrupted):
        measure_difficulty(config, tries=2, say=interrupt)
    [attempts] = (tmp_path / "words-difficulty" / "attempts").glob("*/*.jsonl")
    done = attempts.read_bytes()
    assert done and not (tmp_path / "words-difficulty" / "tasks.parquet").exists()
    said.clear()
    found = measure_difficulty(config, tries=2, say=said.append)
    first = next((line for line in said if "to attempt" in line), "0 of 10")
    assert "10 of 10" not in first and attempts.read_bytes().startswith(done), "what was measured is not measured again"
    assert found.path == tmp_path / "words-difficulty" / "tasks.parquet" and (found.tasks, found.tried) == (10, 10)
    tasks = tasks_in(found.path)
    trained = load_processed(load_config(config)).splits.train
    assert [(task.id, task.question) for task in tasks] == [(task.id, task.question) for task in trained]
    rewards: dict[str, list[float]] = {}
    for line in attempts.read_text().splitlines():
        attempt = json.loads(line)
        rewards.setdefault(attempt["task_id"], []).append(attempt["reward"])
    for task in tasks:
        assert task.tries == 2 and task.pass_rate == pytest.approx(sum(rewards[task.id]) / 2)
        assert task.difficulty == pytest.approx(1 - task.pass_rate)
    said.clear()
    assert measure_difficulty(config, tmp_path / "again.jsonl", tries=2, say=said.append).tasks == 10
    assert not [line for line in said if "to attempt" in line] and tasks_in(tmp_path / "again.jsonl") == tasks
    again = {**config, "tasks": {"sources": [{"source": "tasks", "path": str(found.path)}], "eval_size": 1}}
    again["tasks"]["sampler"] = "easy_to_hard"
    spec = task_set_spec(load_config(again), load_processed(load_config(again)).splits)
    assert spec is not None and all(tries == 2 for _, tries, _ in spec.tried) and len(spec.tried) == 9


def test_a_model_that_is_made_by_the_run_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=about("model.path"), match="RUN@start"):
        measure_difficulty(small_config(tmp_path, "words"))
    with pytest.raises(DataError, check=about("file"), match="jsonl"):
        measure_difficulty(small_config(tmp_path, "words"), tmp_path / "out.txt", model="x")


def test_what_a_run_solved_is_read_from_its_log_with_what_was_dropped(tmp_path: Path) -> None:
    config = load_config(small_config(tmp_path, "solved", demonstrations={}, stages=[STAGE]))
    splits = load_processed(config).splits
    config.folder.mkdir()
    (config.folder / "config.yaml").write_text(dump_config(config))
    buffer = LocalBuffer(config.folder / "buffer", small(**config.buffer.model_dump()), task_set_spec(config, splits))
    buffer.do("open_stage", plan(4))
    more = Task.create("new", "Spell this backward: new", "wen", tries=4, pass_rate=0.5)
    assert buffer.do("add_tasks", [more], 0) == 1
    one, two = buffer.do("admit", "producer", 1, 2)
    buffer.do("drop", one, {"zero_variance": 4}, GroupReport(rows=4, reward_sum=4.0, scored=4))
    buffer.do("drop", two, {"zero_variance": 4}, GroupReport(rows=4, reward_sum=0.0, scored=3))
    buffer.kill()
    out = tmp_path / "out" / "tasks.parquet"
    result = CliRunner().invoke(
        app, ["data", "tasks", "solved", str(out), "--storage", str(tmp_path)], catch_exceptions=False
    )
    known = len(splits.train) + 1
    assert result.stdout == f"{known} tasks in {out}: 3 tried, 2 solved at least once, mean pass rate 0.500\n"
    tasks = {task.id: task for task in tasks_in(out)}
    assert len(tasks) == known
    assert (tasks[one.task].tries, tasks[one.task].pass_rate, tasks[one.task].difficulty) == (4, 1.0, 0.0)
    assert (tasks[two.task].tries, tasks[two.task].pass_rate) == (3, 0.0)
    assert (tasks[more.id].tries, tasks[more.id].pass_rate) == (4, 0.5)
    assert sum(task.tries for task in tasks.values()) == 11
    changed = config.model_copy(update={"seed": 1})
    (config.folder / "config.yaml").write_text(dump_config(changed))
    with pytest.raises(StorageError, check=about("tasks"), match="original tasks"):
        write_solved(config.folder, out)


STAGE = {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 1, "batch_size": 4, "group_size": 2}
