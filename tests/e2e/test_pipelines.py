"""A run whose groups and batches go through operators, until a rank of its trainer dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.state import list_actors
from typer.testing import CliRunner

import rayrft
from rayrft.buffer.groups import group_key
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import Archive, read_state
from rayrft.cli.main import app
from rayrft.config import load_config
from rayrft.errors import ActorDied
from rayrft.experience import from_batch
from rayrft.monitor.records import StepRecord, read_records
from rayrft.monitor.summary import read_summary
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
def failed(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> rayrft.Run:
    """The run, of which a rank was killed after its third step."""
    run = rayrft.start(pipelines(tmp_path_factory.mktemp("operated")), say=lambda _: None)
    next(record for record in run.records() if isinstance(record, StepRecord) and record.step == 3)
    alive = [("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]
    [rank, *_] = list_actors(address=ray.get_runtime_context().gcs_address, filters=alive)
    try:
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(ActorDied) as caught:
            run.result()
        assert "trainer" in str(caught.value.field)
    finally:
        run.kill()
    return run


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
    groups = read_state(Storage(run.folder / "buffer"), sampler, 0).state.groups
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
