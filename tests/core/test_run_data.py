"""Experiences through the handle of a run, on a real Buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from rayrft.buffer.dataset import dataset
from rayrft.config import dump_config, load_config
from rayrft.core.launch import attach
from rayrft.core.run import Run
from rayrft.errors import ActorDied, ConfigError, DataError, FeedbackRefused, RayrftError, RunNotFound
from rayrft.experience import Task
from tests.buffer.live import live_run
from tests.buffer.rows import group
from tests.e2e.conftest import small_config
from tests.errors import about
from tests.scripted import handle


@pytest.fixture(scope="module")
def live(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with live_run(tmp_path_factory.mktemp("runs"), "handled") as folder:
        yield folder


@pytest.fixture
def run(live: Path) -> Run:
    return attach("handled")


def test_experiences_are_a_frame_that_people_read(run: Run) -> None:
    frame = run.experiences(3)
    assert list(frame.columns) == ["id", "reward", "question", "answer", "labels", "versions"]
    row = frame.set_index("id").loc["7/0"]
    assert (row["question"], row["answer"], row["versions"]) == ("1 + 1?", "It is\n2.", [0])
    assert len(frame) == 3 and len(run.experiences(100)) == 7, "what was trained or dropped is not held"


def test_a_dataset_goes_out_and_comes_back(run: Run) -> None:
    assert run.dataset(columns=["reward"]).count() == 7
    assert run.load(run.dataset(), "again") == 7
    assert run.dataset("expert/again").count() == 7
    assert run.load(group(3), "mine") == 2


def test_feedback_reaches_the_row_or_says_why_not(run: Run) -> None:
    run.feedback("7/0", labels={"quality": "fine"})
    assert run.experiences(100).set_index("id").loc["7/0", "labels"] == {"quality": "fine"}
    with pytest.raises(FeedbackRefused, check=about("0/0", 0)):
        run.feedback("0/0", reward=1.0)
    with pytest.raises(DataError, check=about("experience_id")):
        run.feedback("8/0", reward=1.0)


def test_groups_are_not_put_into_a_run_that_samples_its_own(run: Run) -> None:
    with pytest.raises(ConfigError, check=about("mode", "both")):
        run.put([])


def test_a_task_that_no_reward_scores_is_not_added(tmp_path: Path) -> None:
    settings = small_config(tmp_path, "domains", reward={"domains": {"math": {"name": "exact"}}})
    (tmp_path / "config.yaml").write_text(dump_config(load_config(settings)))
    with pytest.raises(ConfigError, check=about("reward.domains", "code")):
        Run("domains", tmp_path, None).add_tasks([Task.create("test", "question", "x", domain="code")])


def test_what_becomes_of_tasks_that_are_added_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operators = [{"name": "format", "column": "question", "pattern": "^Spell"}]
    settings = small_config(tmp_path, "grows", pipelines={"tasks": operators})
    settings["tasks"]["sources"][0]["size"] = 200
    (tmp_path / "config.yaml").write_text(dump_config(load_config(settings)))
    earlier, good, bad = (Task.create("new", text, "x") for text in ("Spell earlier", "Spell: new", "Say: new"))
    called: list[tuple[Any, ...]] = []

    class Calls:
        def call(self, method: Any, *arguments: Any) -> Any:
            called.append((method.__name__, *arguments))
            return [earlier] if method.__name__ == "added_tasks" else len(arguments[0])

    monkeypatch.setattr(Run, "_buffer", lambda self: Calls())
    monkeypatch.setattr("rayrft.core.run.answer", lambda value, who: value)
    added = Run("grows", tmp_path, None).add_tasks([earlier, good, bad])
    assert added.tasks == [good] and called[-1] == ("add_tasks", [good], 0)
    assert added.left_out.keys() == {earlier.id, bad.id} and added.left_out[bad.id].startswith("format: ")


def test_a_run_that_ended_says_where_its_data_is(live: Path) -> None:
    (live.parent / "half-gone").mkdir()
    (live.parent / "half-gone" / "summary.json").touch()
    for ended in (Run("ended", live.parent / "ended", None), Run("handled", live.parent / "half-gone", None)):
        asked: list[Callable[[], Any]] = [ended.experiences, ended.dataset, partial(ended.load, group(1), "x")]
        for ask in asked:
            with pytest.raises(RunNotFound, match=f"rayrft data head {ended.folder}"):
                ask()


def test_a_buffer_that_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def partition(self, store: str) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("rayrft.runtime.handle._ANSWER_S", 0.1)
    silent = ray.remote(Silent).options(num_cpus=0).remote()
    with pytest.raises(RayrftError, match=r"buffer: no answer for 0\.1 s"):
        dataset(handle(silent))
    monkeypatch.undo()
    ray.kill(silent)
    with pytest.raises(ActorDied, check=about("buffer")):
        dataset(handle(silent))
