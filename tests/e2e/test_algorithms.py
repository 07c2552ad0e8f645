"""One run through kinds of stages that each need something else of Explorer, Buffer and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayrft
from rayrft.monitor.records import StepRecord, read_records
from tests.e2e.conftest import small_config

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "kl": "k3", "kl_in": "reward", "kl_coef": 0.01},
    "remax": {"name": "remax"},
    "gigpo": {"name": "gigpo", "correction": "truncated"},
    "reinforce_pp": {"name": "reinforce_pp", "policy_loss": "gspo"},
    "distill": {"name": "jsd", "teacher_candidates": 8},
}


@pytest.mark.usefixtures("ray_cluster")
def test_one_run_goes_through_a_critic_a_greedy_baseline_turns_and_a_teacher(tmp_path: Path) -> None:
    config = small_config(tmp_path, "kinds", evaluation={"enabled": False})
    warmup = config["stages"][0]
    for name, algorithm in ALGORITHMS.items():
        update = {"epochs": 2} if name == "ppo" else {}
        config["stages"].append(
            {
                "name": name,
                "algorithm": algorithm,
                "steps": 2,
                "batch_size": 16,
                "group_size": 4,
                "optimizer": {"lr": 1e-3},
                "update": update,
                **({"teacher": str(tmp_path / "kinds" / "model")} if name == "distill" else {}),
            }
        )
    config["stages"] = [warmup, *config["stages"][2:]]
    said: list[str] = []
    run = rayrft.start(config, say=said.append, **{"trainer.ranks": 2})
    run.watch(said.append)
    summary = run.result()
    assert summary["status"] == "finished"
    counters = summary["counters"]
    assert counters["sampled"] == counters["trained"] + sum(counters["dropped"].values()) + counters["held"]
    assert counters["trained"] == len(ALGORITHMS) * 2 * 16
    steps = [record for record in read_records(run.folder) if isinstance(record, StepRecord)]
    first = {step.stage: step for step in reversed(steps)}
    assert all(first[name].logprob_gap < 1e-4 for name in ALGORITHMS), "engines and ranks computed the same policy"
    assert first["ppo"].value_loss > 0 and first["ppo"].kl == pytest.approx(0.0, abs=1e-6)
    assert first["distill"].distillation_loss > 0, "the teacher is the untrained model, the policy was warmed up"
    assert not [line for line in said if "first step of" in line], said
