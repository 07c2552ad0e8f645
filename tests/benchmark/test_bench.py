"""Which weights a bench takes for a model, and which attempts it takes for its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrft.benchmark import bench
from rayrft.benchmark.worker import open_attempts, to_line
from rayrft.config import RunConfig, dump_config, load_config
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.engine_groups import policy_model
from rayrft.core.launch import start
from rayrft.errors import ConfigError, ModelError, PlacementError
from rayrft.experience import Task
from rayrft.explorer.evaluation import Attempt
from tests.config.given import base
from tests.config.given import bench as bench_config
from tests.e2e.conftest import small_config
from tests.errors import about


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a run that made two stages and has two checkpoints, one before its end and one at it."""
    config = load_config(small_config(tmp_path, "run"))
    config.folder.mkdir()
    (config.folder / "config.yaml").write_text(dump_config(config))
    for name in ("model", "checkpoints/warmup", "checkpoints/mix"):
        write_model(config.folder / name)
    checkpoints = Checkpoints(config.folder, config.checkpoint)
    for step in (0, 3, 5):
        checkpoints.begin(step)
        checkpoints.commit(Progress("id", step=step))
    exports: list[int] = []
    monkeypatch.setattr(bench, "export", lambda run, to, step: (write_model(to), exports.append(step)))
    monkeypatch.setattr(bench, "_exports", exports, raising=False)
    return tmp_path


def find(storage: Path, model: str) -> Any:
    return bench.find_weights("m", model, storage, storage / "bench")


def test_a_model_is_a_folder_a_run_or_weights_of_a_run(storage: Path) -> None:
    run = storage / "run"
    assert find(storage, str(run / "model")).path == str(run / "model")
    assert find(storage, "run@start").path == str(run / "model")
    assert find(storage, "run@warmup").path == find(storage, f"{run}@warmup").path == str(run / "checkpoints/warmup")
    early, latest = find(storage, "run@3"), find(storage, "run")
    assert find(storage, "run@3") == early and early.path != latest.path
    assert bench._exports == [3, 5], "each is written once"  # type: ignore[attr-defined]
    write_model(run / "checkpoints" / "final")
    assert find(storage, "run").path == str(run / "checkpoints" / "final")


def test_a_reward_model_is_refused(storage: Path) -> None:
    (storage / "run/checkpoints/mix/config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    with pytest.raises(ModelError, check=about("bench.models.m", "run@mix"), match="reward model"):
        find(storage, "run@mix")


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ("run@4", "start, mix, warmup, 3, 5"),
        ("run@mox", "start, mix, warmup"),
        ("ran@3", "RUN@WHICH"),
        (".", "RUN@WHICH"),
    ],
)
def test_weights_that_there_are_none_of_are_refused_with_those_that_there_are(
    model: str, remedy: str, storage: Path
) -> None:
    with pytest.raises(ModelError, check=about("bench.models.m", model), match=remedy):
        find(storage, model)


def test_a_bench_is_not_started_as_a_run() -> None:
    with pytest.raises(ConfigError, check=about("mode", "bench")):
        start(bench_config())


def test_a_model_that_no_gpu_has_the_memory_for_is_refused_before_any_actor(
    tiny_model: Path, tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "check_gpus", lambda plan, say: 1.0)
    config = load_config(bench_config(), {"explorer.engine.gpus": 1, "storage": str(tmp_path)})
    model, task = bench.BenchModel("one", str(tiny_model), "a"), Task.create("words", "Spell: cat", "tac")
    tasksets = {"words": ([task], config.bench.tasksets["words"].sources)}
    with pytest.raises(PlacementError, check=about("engines")):
        bench.attempt_all(config, "a-bench", tmp_path / "bench", [model], tasksets, lambda line: None)


@pytest.mark.parametrize("section", ["explorer", "auxiliary.judge"])
def test_an_unknown_option_of_an_engine_ends_a_bench(section: str, tiny_model: Path) -> None:
    given = {f"{section}.engine.options.max_num_batch": 8}
    config = load_config(bench_config(), {"auxiliary.judge.model": str(tiny_model), **given})
    with pytest.raises(ConfigError, check=about(f"{section}.engine.options.max_num_batch", 8)):
        bench.check_attempts(config, [], print)


@pytest.mark.parametrize("mode", ["bench", "both"])
def test_engines_of_a_bench_do_not_wait_asleep_for_weights(mode: str) -> None:
    shared = {"explorer.engine": {"count": 1, "gpus": 0.4, "sleep": True}, "trainer": {"ranks": 1, "gpus": 0.5}}
    config = load_config(base(), {**shared, "evaluation.engines": 0, "mode": mode, "bench.models.one": "runs/one"})
    assert policy_model(config, "runs/one").engine.sleep is (mode == "both")


def fingerprint(config: RunConfig, identity: str = "a") -> str:
    return bench.fingerprint(config, identity, config.bench.tasksets["words"].sources)


@pytest.mark.parametrize(
    "override",
    [
        {"bench.temperature": 0.5},
        {"bench.max_tokens": 4},
        {"seed": 1},
        {"reward.name": "math"},
        {"explorer.workflow": "best_of_n"},
        {"explorer.sampling.max_prompt_tokens": 30},
        {"model.max_length": 70},
        {"model.dtype": "bfloat16"},
    ],
)
def test_attempts_under_other_settings_are_others(override: dict[str, Any]) -> None:
    assert fingerprint(load_config(bench_config())) != fingerprint(load_config(bench_config(), override))


def test_attempts_of_other_weights_are_others_and_those_of_more_samples_or_engines_are_not() -> None:
    config = load_config(bench_config())
    assert fingerprint(config) != fingerprint(config, "b")
    more = {"bench.samples": 16, "bench.k": [1, 16], "explorer.engine.count": 4, "bench.models.two": "x"}
    assert fingerprint(config) == fingerprint(load_config(bench_config(), more))


def test_weights_written_over_are_others(tmp_path: Path) -> None:
    first = find(tmp_path, str(write_model(tmp_path / "model")))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"1234")
    assert find(tmp_path, first.path).identity != first.identity


def test_what_is_missing_is_told_by_task_and_what_is_too_much_is_left_out(tmp_path: Path) -> None:
    config = load_config(bench_config(samples=2, k=[1, 2]))
    tasks = [Task.create("test", name, "x") for name in "abc"]
    file = tmp_path / "attempts.jsonl"
    lines, _ = open_attempts(file)
    for task, count in zip(tasks, (3, 1, 0), strict=True):
        lines.append(*(to_line(Attempt(task.id, repeat, 1.0)) for repeat in range(count)))
    lines.append(to_line(Attempt("of another set", 0, 1.0)))
    assert bench.missing_tasks(config, file, tasks) == tasks[1:]
    found = bench.attempts_in(config, file, tasks)
    assert [(attempt.task_id, attempt.repeat) for attempt in found] == [
        (tasks[0].id, 0),
        (tasks[0].id, 1),
        (tasks[1].id, 0),
    ]
