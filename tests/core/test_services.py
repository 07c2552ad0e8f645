"""Engines that a pipeline alone asks: placed, asked and gone again, from the command line and before a run."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from typer.testing import CliRunner

from rayrft.cli.main import app
from rayrft.config import PipelineConfig, RunConfig, load_config
from rayrft.config.serve import RewardServiceConfig
from rayrft.core import engine_groups, services
from rayrft.core.bundles import Bundles, check_room
from rayrft.core.services import task_engines
from rayrft.errors import ActorDied, ClusterError, ConfigError, OperatorFailed, PlacementError
from rayrft.experience import Task
from rayrft.explorer.engines.pool import EnginePool
from rayrft.pipelines.tasks import load_processed
from rayrft.runtime.handle import NAMESPACE, Handle, until_dead
from rayrft.runtime.serving.applications import HttpApplication
from tests.config.given import GRPO, base
from tests.e2e.conftest import small_config
from tests.errors import about
from tests.pipelines.small import read, write
from tests.scripted_engine import ScriptedEngine
from tests.weights.written import Written

ENGINE = {"count": 1, "memory_gib": 0.3}
OPTIONS = {"model": "m", "least_words": 1, "max_pass_rate": 1.0, "tries": 2, "hinted_tries": 0}


@pytest.fixture(autouse=True)
def scripted(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_groups, "RolloutEngine", ScriptedEngine)


def given(folder: Path, tiny_model: Path, **more: Any) -> list[str]:
    """The arguments of the command, on three tasks."""
    rows = [{"question": f"Spell this word backward: {word}", "answer": "7"} for word in ("cat", "horse", "bird")]
    pipeline = {
        "operators": [{"name": "hinted_solutions", **OPTIONS}],
        "models": {"m": {"model": str(tiny_model), "engine": ENGINE}, "unused": {"model": "no such model"}},
        "reward": {"name": "tests.core.test_services:anything"},
        **more,
    }
    (folder / "pipeline.json").write_text(json.dumps(pipeline))
    source = write(folder / "in.jsonl", rows)
    return ["data", "process", str(source), str(folder / "out.jsonl"), "--pipeline", str(folder / "pipeline.json")]


def anything(device: str = "cpu") -> Any:
    return lambda task, response: 1.0


WAITS = {"placement": {"wait_s": 60}}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster is full until somebody who waits has looked for room."""
    ray.get((others := placement_group([{"CPU": 4}])).ready())

    def looks_for_room(plan: list[Bundles], *wait: Any) -> None:
        check_room(plan, *wait)  # raises PlacementError unless it may wait
        remove_placement_group(others)

    monkeypatch.setattr(services, "check_room", looks_for_room)


@pytest.mark.usefixtures("full")
def test_the_command_waits_for_room_starts_what_is_asked_alone_and_ends_it(tiny_model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, given(tmp_path, tiny_model, **WAITS), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = read(tmp_path / "out.jsonl")
    assert len(found) == 3 and all(row["response"] and row["made_by"] == "hinted_solutions/1" for row in found)
    assert "auxiliary-m" in result.output and "auxiliary-unused" not in result.output
    assert not (tmp_path / "out.jsonl.answers.jsonl").exists()
    groups = [group for group in placement_group_table().values() if "pipeline-" in group["name"]]
    assert groups and {group["state"] for group in groups} == {"REMOVED"}


def test_answers_outlive_an_engine_that_dies(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(ScriptedEngine):
        count = 0

        async def generate(self, request: Any, stream: Any = None) -> Any:
            Dying.count += 1
            if Dying.count > 2:
                os._exit(1)
            return await super().generate(request, stream)

    monkeypatch.setattr(engine_groups, "RolloutEngine", Dying)
    arguments = given(tmp_path, tiny_model, batch_rows=1)
    with pytest.raises(OperatorFailed, check=about("operators.0.hinted_solutions", "auxiliary-m-0")):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not (tmp_path / "out.jsonl").exists()
    kept = read(tmp_path / "out.jsonl.answers.jsonl")
    assert len(kept) == 2
    monkeypatch.setattr(engine_groups, "RolloutEngine", ScriptedEngine)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and len(read(tmp_path / "out.jsonl")) == 3


def followed(tiny_model: Path, folder: Path, **more: Any) -> RunConfig:
    """The config of a run that trains elsewhere and writes its weights to a folder."""
    sections: dict[str, Any] = {
        "name": "followed",
        "storage": str(folder / "runs"),
        "model": {"path": str(tiny_model), "max_length": 64},
        "weight_sync": {"backend": "files", "files": {"address": str(folder / "weights")}},
    }
    return load_config({**base(), **sections}, {"explorer.engine.count": 2, "explorer.engine.memory_gib": 0.3, **more})


async def test_engines_elsewhere_follow_the_weights_that_a_run_writes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[HttpApplication] = []
    monkeypatch.setattr(HttpApplication, "open", lambda self: opened.append(self) or "http://here/followed")
    written, corrupt = Written(tmp_path / "weights"), False
    write = written.folder.write

    def damaged(serial: int, name: str, data: Any) -> str:
        return write(serial, name, b"x") if corrupt and name == "0.bin" and serial == 3 else write(serial, name, data)

    written.folder.write = damaged  # type: ignore[method-assign]
    written.step()
    config = followed(tiny_model, tmp_path, **{"restarts.per_hour": 2, "restarts.backoff_s": 0})
    service = await asyncio.to_thread(services.serve_weights, config, lambda _: None)
    try:
        pool_name = opened[0].arguments[2]
        pool: Handle[EnginePool] = Handle("pool", ray.get_actor(pool_name, namespace=NAMESPACE))
        seen = await pool.call(EnginePool.members)

        async def until(versions: list[int]) -> None:
            nonlocal seen
            while [member.version for member in seen.members] != versions:
                seen = await pool.call(EnginePool.members, seen.generation)

        await until([1, 1])
        written.step(1)
        await until([2, 2])
        corrupt = True
        ref = written.step(2)
        assert ref[0] == 3
        await until([])
        written.step(3, 2)  # a difference to what is damaged, and a full version
        await until([5, 5])
        generation = seen.generation
        for member in seen.members:
            member.handle.kill()
        while seen.generation < generation + 4:  # both leave, and their successors join
            seen = await pool.call(EnginePool.members, seen.generation)
        assert [member.version for member in seen.members] == [5, 5] and seen.replaced
        seen.members[0].handle.kill()
        with pytest.raises(ActorDied, match=r"3 deaths within an hour; restarts\.per_hour is 2"):
            await asyncio.to_thread(until_dead, service.anchor)
    finally:
        await asyncio.to_thread(service.stop)
    groups = [group for group in placement_group_table().values() if "followed-follower" in group["name"]]
    assert groups and {group["state"] for group in groups} == {"REMOVED"}


@pytest.mark.parametrize("more", [{"trainer.lora.rank": 4}, {"weight_sync.backend": "auto", "weight_sync.files": {}}])
def test_a_run_that_cannot_be_followed_is_refused(tiny_model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, check=about("weight_sync.backend")):
        services.serve_weights(followed(tiny_model, tmp_path, **more))


def test_what_does_not_fit_on_the_cluster_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    models = {"m": {"model": str(tiny_model), "engine": {"count": 100, "cpus": 3}}}
    with pytest.raises(PlacementError):
        CliRunner().invoke(app, given(tmp_path, tiny_model, models=models), catch_exceptions=False)


@pytest.mark.parametrize(("what", "field"), [("engines", "m.engine"), ("weights", "explorer.engine")])
def test_an_unknown_option_of_an_engine_ends_a_service_before_any_actor(
    what: str, field: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, check=about(f"{field}.options.max_num_batch", 8)):
        _opens(what, tiny_model, tmp_path, {"max_num_batch": 8})


def _opens(what: str, tiny_model: Path, folder: Path, options: Any = None) -> None:
    """Open a service whose actors need GPUs."""
    if what == "engines":
        models = {"m": {"model": str(tiny_model), "engine": {**ENGINE, "gpus": 1, "options": options or {}}}}
        CliRunner().invoke(app, given(folder, tiny_model, models=models), catch_exceptions=False)
    elif what == "rewards":
        scored = {"name": f"{__name__}:anything", "options": {"device": "cuda"}, "replicas": {"gpus": 1}}
        services.serve_rewards(RewardServiceConfig.model_validate({"reward": scored}))
    else:
        gpus = {"explorer.engine.gpus": 1, "trainer.gpus": 1, "explorer.engine.options": options or {}}
        services.serve_weights(followed(tiny_model, folder, **gpus))


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are there")
@pytest.mark.parametrize("what", ["engines", "rewards", "weights"])
def test_gpus_that_torch_cannot_use_end_a_service_before_any_actor(what: str, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no NVIDIA driver answers"):
        _opens(what, tiny_model, tmp_path)


def test_an_engine_that_no_gpu_has_the_memory_for_ends_a_service_before_any_actor(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "check_gpus", lambda plan, say: 1.0)
    with pytest.raises(PlacementError, check=about("engines")):
        _opens("weights", tiny_model, tmp_path)


class Deployed(Exception):
    """The end of the test: there is room for what is deployed."""


@pytest.mark.usefixtures("full")
def test_rewards_wait_for_room_on_a_full_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.rewards.service.rewards_open", mock.Mock(side_effect=Deployed))
    with pytest.raises(Deployed):
        services.serve_rewards(RewardServiceConfig.model_validate({"reward": {"name": "math"}, **WAITS}))


def source(config: Any, field: str) -> list[Task]:
    """A reader of tasks."""
    return [Task.create(field, f"Spell this word backward: {word}", "7") for word in ("cat", "horse", "bird")]


def test_auxiliary_models_work_on_the_tasks_of_a_run_and_alike_again(tiny_model: Path, tmp_path: Path) -> None:
    auxiliary = {"m": {"model": str(tiny_model), "engine": ENGINE}}
    sections: dict[str, Any] = {
        "tasks": {"sources": [{"source": f"{__name__}:source"}], "eval_size": 1},
        "reward": {"name": f"{__name__}:anything"},
        "pipelines": {"tasks": [{"name": "hinted_solutions", **OPTIONS, "keep": True}]},
    }
    raw = small_config(tmp_path, "asks", demonstrations={}, auxiliary=auxiliary, stages=[GRPO], **sections)
    config = load_config(raw)
    with pytest.raises(ConfigError, check=about("pipelines.tasks.0.model", "m")):
        load_processed(config)
    said: list[str] = []
    found = load_processed(config, task_engines(config, said.append))
    assert sum(report.made for report in found.reports) == 3 and "asks-tasks:auxiliary-m" in said[0]
    answers = config.storage / "answers.asks.jsonl"
    before = answers.read_bytes()
    again = load_processed(config, task_engines(config, said.append))
    assert again.splits == found.splits and answers.read_bytes() == before and before.count(b"\n") == 6


def test_names_of_models_and_endpoints_are_told_apart() -> None:
    models = {"models": {"m": {"model": "a"}}, "endpoints": {"m": {"url": "http://a/v1", "model": "m"}}}
    with pytest.raises(ValueError, match="is also the name of one of 'models'"):
        PipelineConfig.model_validate({"operators": [{"name": "judged"}], **models})
