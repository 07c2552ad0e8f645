"""One run that trains an adapter, through stages that each need something else of Explorer, Buffer and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rayrft
from rayrft.core.checkpoints import export
from rayrft.monitor.records import StepRecord, read_records
from tests.e2e.conftest import small_config

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "kl": "k3", "kl_in": "reward", "kl_coef": 0.01},
    "remax": {"name": "remax", "policy_loss": "gspo"},
    "gigpo": {"name": "gigpo", "correction": "truncated"},
    "distill": {"name": "jsd", "teacher_candidates": 8},
}


@pytest.fixture(scope="module")
def finished(
    ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[rayrft.Run, dict[str, Any], dict[str, list[StepRecord]], list[str]]:
    """The run, its summary, its steps by stage, and what it lines."""
    folder = tmp_path_factory.mktemp("runs")
    config = small_config(folder, "kinds", evaluation={"enabled": False})
    warmup, mix = config["stages"]
    warmup["optimizer"]["lr"] = mix["optimizer"]["lr"] = 1e-2
    mix["algorithm"]["kl"], mix["steps"] = "k3", 3
    config["demonstrations"]["labelled"] = {"path": str(_labelled(folder / "labelled.jsonl"))}
    kto = {"name": "kto", "algorithm": {"name": "kto"}, "demonstrations": "labelled", "steps": 2, "batch_size": 16}
    config["stages"].append({**kto, "optimizer": {"lr": 1e-3}})
    for name, algorithm in ALGORITHMS.items():
        config["stages"].append(
            {
                "name": name,
                "algorithm": algorithm,
                "steps": 2,
                "batch_size": 16,
                "group_size": 4,
                "optimizer": {"lr": 1e-2 if name == "distill" else 1e-3},
                "update": {"epochs": 2} if name == "ppo" else {},
                **({"teacher": str(folder / "kinds" / "model")} if name == "distill" else {}),
            }
        )
    lines: list[str] = []
    overrides = {"trainer.ranks": 2, "trainer.lora": {"rank": 4, "frozen": "nf4"}, "weight_sync.probe_every": 1}
    run = rayrft.start(config, say=lines.append, **overrides)
    run.watch(lines.append)
    summary = run.result()
    steps: dict[str, list[StepRecord]] = {}
    for record in read_records(run.folder):
        if isinstance(record, StepRecord):
            steps.setdefault(record.stage, []).append(record)
    return run, summary, steps, lines


def _labelled(path: Path) -> Path:
    words = ("cat", "dog", "cow", "pig", "hen", "ant", "bee", "owl")
    prompts = [f"Spell this word backward: {word}" for word in words]
    rows = [{"prompt": p, "response": word[::-1], "label": True} for p, word in zip(prompts, words, strict=True)]
    rows += [{"prompt": p, "response": word, "label": False} for p, word in zip(prompts, words, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_run_goes_through_a_critic_a_greedy_baseline_turns_and_a_teacher(finished: Any) -> None:
    _, summary, steps, lines = finished
    assert summary.status == "finished"
    ledger = summary.ledger
    assert ledger.closes
    assert ledger.trained == (3 + len(ALGORITHMS) * 2) * 16
    first = {stage: taken[0].metrics for stage, taken in steps.items()}
    assert all(first[name].logprob_gap < 1e-4 for name in ALGORITHMS), "engines and ranks computed the same policy"
    assert first["ppo"].value_loss > 0 and first["ppo"].kl == pytest.approx(0.0, abs=1e-6)
    # At the start policy and reference are one: sigmoid(0) = 1/2 of each row, whatever its label.
    assert (
        first["kto"].preference_loss == pytest.approx(0.5, abs=1e-4) and steps["kto"][1].metrics.preference_loss < 0.5
    )
    assert first["distill"].distillation_loss > 0, "the teacher is the untrained model, the policy was warmed up"
    assert not [line for line in lines if "step 1 of" in line], lines


def test_engines_follow_an_adapter_through_every_stage(finished: Any) -> None:
    _, _, steps, _ = finished
    warmup, mix = steps["warmup"], steps["mix"]
    assert warmup[-1].metrics.sft_loss < warmup[0].metrics.sft_loss
    sampled = [step for taken in steps.values() for step in taken if step.usual_rows]
    assert all(step.probe_gap is not None and step.probe_gap <= 1e-4 for step in sampled)
    assert mix[0].metrics.logprob_gap < 1e-4
    assert mix[0].metrics.kl == pytest.approx(0.0, abs=1e-9), "the reference is not the policy as the stage began"
    assert mix[-1].metrics.kl > 1e-6


def test_what_an_adapter_leaves_is_a_model_like_any_other(finished: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, summary, _, _ = finished
    export(run.folder, tmp_path / "whole")
    export(run.folder, tmp_path / "adapter", merged=False)
    base = AutoModelForCausalLM.from_pretrained(run.folder / "checkpoints" / "gigpo")
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        start = base(ids).logits
        ends = [
            AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (summary.checkpoint, tmp_path / "whole")
        ]
        ends.append(PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], atol=1e-4, rtol=1e-4)
    assert (ends[0] - start).abs().max() > 1e-2
