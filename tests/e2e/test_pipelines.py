"""A run whose groups and batches go through operators, until a rank of its trainer dies."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.state import list_actors, list_placement_groups
from typer.testing import CliRunner

import rayrft
from rayrft.buffer.groups import group_key
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import Archive, StateReader
from rayrft.cli.main import app
from rayrft.config import load_config
from rayrft.errors import ActorDied
from rayrft.experience import from_batch
from rayrft.monitor.records import StepRecord, read_records
from rayrft.monitor.summary import read_summary
from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM, small_config

OPERATORS = [
    {"name": "by_length"},
    {"name": "expression", "where": "len(response) < 100"},
    {"name": "expert_rows", "min_reward": -10.0, "max_pass_rate": 1.0, "keep": True},
]


OWN = """
import rayrft

@rayrft.register_operator("by_length", "prioritise")
def by_length(response: str) -> float:
    return len(response)
"""


def pipelines(storage: Path) -> dict[str, Any]:
    """Groups in an actor, expert rows of what is best of them, and batches with as many of those as a fifth."""
    config = small_config(storage, "operated", **WITHOUT_VLLM, max_staleness=1)
    config["pipelines"] = {
        "experiences": OPERATORS,
        "made": "found",
        "actors": {"cpus": 0.1, "memory_gib": 0.5},
        "batch": [{"name": "rebalance", "expert_share": 0.1}, {"name": "truncate", "max_tokens": 40}],
    }
    config["buffer"] = {"sampler": {"name": "priority", "score": "priority"}}
    config["stages"] = [{**config["stages"][1], "demonstrations": "found", "steps": 10_000}]
    config |= {"trainer": {"ranks": 2}, "evaluation": {"enabled": False}, "restarts": {"per_hour": 0}}
    del config["demonstrations"]
    (storage / "own.py").write_text(OWN)
    config["plugins"] = [*config["plugins"], str(storage / "own.py")]
    return config


@pytest.fixture(scope="module")
def shown_and_failed(
    ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[tuple[str, str, str | None]], rayrft.Run]:
    """The actors of the run as the Ray dashboard lists them after the third step, each by class, name and placement
    group; and the run, of which a rank was killed then."""
    run = rayrft.start(pipelines(tmp_path_factory.mktemp("operated")), say=lambda _: None)
    next(record for record in run.records() if isinstance(record, StepRecord) and record.step == 3)
    options: dict[str, Any] = {"address": ray.get_runtime_context().gcs_address, "limit": 1000, "detail": True}
    groups = {each.placement_group_id: each.name for each in list_placement_groups(**options)}
    alive = list_actors(filters=[("state", "=", "ALIVE")], **options)
    shown = [(each.class_name, each.name, groups.get(each.placement_group_id)) for each in alive]
    try:
        os.kill(next(each.pid for each in alive if each.class_name == "RayTrainWorker"), signal.SIGKILL)
        with pytest.raises(ActorDied) as caught:
            run.result()
        assert "trainer" in str(caught.value.field)
    finally:
        run.kill()
    return shown, run


@pytest.fixture
def failed(shown_and_failed: Any) -> rayrft.Run:
    _, run = shown_and_failed
    return run


def test_the_ray_dashboards_pages_of_actors_and_placement_groups_read_like_the_picture(shown_and_failed: Any) -> None:
    shown, _ = shown_and_failed
    of_run = {each for each in shown if "operated:" in f"{each[1]} {each[2]}"}
    assert of_run == {
        ("Explorer", "operated:explorer-0", "operated:explorer"),
        ("ScriptedEngine", "operated:engine-0", "operated:engines"),
        ("EnginePool", "operated:engine_pool", "operated:engine_pool"),
        ("OperatorActor", "operated:operators-0", "operated:operators"),
        ("Buffer", "operated:buffer", "operated:buffer"),
        ("Trainer", "operated:trainer", "operated:trainer"),
        ("Controller", "", "operated:trainer"),
        ("RayTrainWorker", "", "operated:ranks"),
        ("Master", "operated:master", "operated:master"),
        ("Janitor", "operated:janitor", None),
    }
    [picture] = re.findall(r"## How it works\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for noun in ("Explorer", "Buffer", "Trainer", "Master", "engine"):
        assert noun in picture and any(noun in kind.replace("Engine", "engine") for kind, _, _ in of_run)


def test_a_dead_rank_ends_the_run_with_the_trainers_name_and_the_folder_stays_readable(failed: rayrft.Run) -> None:
    summary = read_summary(failed.folder)
    assert summary.status == "failed" and "trainer" in summary.error and summary.checkpoint is None
    assert summary.ledger.closes and summary.ledger.sampled > 0
    assert not (failed.folder / "checkpoints" / "final").exists()


def test_groups_and_batches_go_through_operators_and_what_they_make_is_trained_on(failed: rayrft.Run) -> None:
    run = failed
    steps = [record for record in read_records(run.folder) if isinstance(record, StepRecord)]
    archive = Archive.of_run(run.folder)
    rows = [row for batch in archive.rows() for row in from_batch(batch)]
    found = [row for batch in archive.rows("expert/found") for row in from_batch(batch)]
    assert {row.status for row in rows} == {"verified"}
    sampler = load_config(run.folder / "config.yaml").buffer.sampler
    groups = StateReader(Storage(run.folder / "buffer"), sampler, 0).read().groups
    priorities = {
        name: [row.priority for row in rows if row.group_id == name] for name in {row.group_id for row in rows}
    }
    scores = {name: groups.score[groups.find(group_key(name))] for name in priorities}
    assert scores == pytest.approx({name: np.mean(values) for name, values in priorities.items()})
    assert len({*scores.values()}) > 1
    parents = {row.labels["parents"] for row in found}
    assert found and len(parents) == len(found)
    # What a group makes is stored before the group: those in flight when the rank died have no rows.
    unstored = {parent.rpartition("/")[0] for parent in parents - {row.experience_id for row in rows}}
    assert not unstored & priorities.keys() and len(unstored) < len(priorities)
    told = CliRunner().invoke(app, ["data", "lineage", found[0].experience_id, str(run.folder)], catch_exceptions=False)
    made, parent = told.output.splitlines()
    assert made.startswith(f"{found[0].experience_id} by expert_rows/1: ")
    assert parent.startswith(f"  {found[0].labels['parents']}: ") and "not in these files" not in parent
    assert 0 < sum(record.timings.operators["expert_rows"].made for record in steps) <= len(found)
    assert steps[-1].expert_rows == 1 and steps[-1].usual_rows == 16, "a tenth, of four that the step would take"
    assert steps[-1].timings.operators["batch_rebalance"].left_out == 3
