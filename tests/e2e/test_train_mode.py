"""Training without engines: on files, and on groups that another job puts into the run's Buffer, by ranks that run out
of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.config import load_config
from rayrft.errors import ConfigError
from rayrft.experience import from_batch
from rayrft.monitor.records import NoteRecord, PairsRecord, RestartRecord, StepRecord, read_records
from tests.conftest import ROOT
from tests.errors import about

FILLER = """
import dataclasses
import numpy as np
import rayrft
from rayrft.experience import VersionSpan
from rayrft.errors import DataError

run = rayrft.attach("offline")
rows = []
for group in range(6):
    for answer in range(4):
        ids = np.random.default_rng([group, answer]).integers(1, 20, 8).astype(np.int32)
        mask = np.array([0, 0, 1, 1, 1, 1, 1, 1], np.uint8)
        name = f"other/{group}"
        rows.append(
            rayrft.Experience(
                f"{name}/{answer}", name, "task", ids, 2, mask, -3.0 * mask.astype(np.float32),
                weight_versions=(VersionSpan(2, 8, 0),), reward=float(answer % 2),
            )
        )
run.put(rows)
run.put(rows)  # what was put before is passed over
try:
    changes = {"group_id": "bad", "token_ids": np.full(8, 10**6, np.int32)}
    run.put([dataclasses.replace(row, experience_id=f"bad/{i}", **changes) for i, row in enumerate(rows[:4])])
    raise AssertionError("tokens that the model does not have were taken")
except DataError as error:
    assert error.field == "rows" and len(error.value) == 4, error
run.finish()
"""


def make_config(folder: Path, **overrides: Any) -> dict[str, Any]:
    words = ["red", "green", "blue", "black", "white", "grey", "pink", "brown"]
    chats = [{"prompt": f"Spell {word}.", "response": " ".join(word)} for word in words]
    pairs = [
        {"prompt": f"Spell {word}.", "chosen": " ".join(word), "rejected": word} for word in [*words, "gold", "teal"]
    ]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dpo = {"name": "prefer", "algorithm": {"name": "dpo", "beta": 0.5}, "demonstrations": "pairs", "batch_size": 8}
    dpo |= {"steps": 12, "evaluate_every": 6}
    return {
        "name": "offline",
        "storage": str(folder / "runs"),
        "mode": "train",
        "model": {"tiny": {"layers": 2, "hidden_size": 64, "heads": 2}, "max_length": 64},
        "demonstrations": {
            "chats": {"path": str(folder / "chats.jsonl")},
            "pairs": {"path": str(folder / "pairs.jsonl"), "held_out": 2},
        },
        "trainer": {"ranks": 2},
        "stages": [
            {
                "name": "imitate",
                "algorithm": {"name": "sft"},
                "demonstrations": "chats",
                "steps": 6,
                "batch_size": 8,
                "optimizer": {"lr": 1e-3},
            },
            {**dpo, "optimizer": {"lr": 1e-3}},
            {"name": "live", "algorithm": {"name": "grpo"}, "steps": 10, "batch_size": 8, "group_size": 4},
        ],
        **overrides,
    }


@pytest.fixture(scope="module")
def finished(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[rayrft.Run, dict[str, Any]]:
    crowded = {"plugins": [str(ROOT / "tests" / "crowded.py")], "stages.imitate.algorithm.sft": "crowded"}
    config = make_config(tmp_path_factory.mktemp("offline"))
    run = rayrft.start(config, **crowded, **{"trainer.micro_batch_tokens": 80, "checkpoint.every": 2})
    for record in run.records():
        if isinstance(record, StepRecord) and record.step == 1:
            break
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address_info["gcs_address"], "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", FILLER], check=True, cwd=ROOT, env=environment)
    return run, run.result()


def stage(run: rayrft.Run, name: str) -> list[StepRecord]:
    return [r for r in read_records(run.folder) if isinstance(r, StepRecord) and r.stage == name]


def test_chats_are_imitated_and_pairs_preferred(finished: tuple[rayrft.Run, dict[str, Any]]) -> None:
    run, _ = finished
    sft, dpo = stage(run, "imitate"), stage(run, "prefer")
    assert sft[-1].metrics.sft_loss < sft[0].metrics.sft_loss
    assert dpo[0].metrics.preference_loss == pytest.approx(0.6931, abs=1e-4) and dpo[-1].metrics.preference_loss < 0.3
    assert dpo[0].expert_rows == 8 and dpo[0].usual_rows == 0
    ranked = [record for record in read_records(run.folder) if isinstance(record, PairsRecord)]
    assert [(record.stage_step, record.count) for record in ranked] == [(6, 2), (12, 2)]


def test_groups_of_another_job_are_trained_once_each_until_it_has_no_more(
    finished: tuple[rayrft.Run, dict[str, Any]],
) -> None:
    run, summary = finished
    steps = stage(run, "live")
    assert [(step.usual_rows, step.reward) for step in steps] == [(8, 0.5)] * 3
    ledger = summary.ledger
    assert summary.status == "finished" and (ledger.sampled, ledger.trained) == (28, 24)
    assert ledger.dropped == {"rejected: token outside the vocabulary": 4}
    notes = [record.text for record in read_records(run.folder) if isinstance(record, NoteRecord)]
    assert any("stage ends after 3 steps" in note and "end_of_data" in note for note in notes)
    assert all(step.metrics.policy_tokens == 8 * 6 for step in steps)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"mode": "both"}, "tasks"),
        ({"stages.imitate.evaluate_every": 2}, "stages.imitate.evaluate_every"),
        ({"demonstrations.chats": {"size": 5}}, "demonstrations.chats.path"),
        ({"stages.prefer.batch_size": 7}, "stages.prefer.batch_size"),
        ({"stages.prefer.update": {"mini_batches": 4}}, "stages.prefer.batch_size"),
        ({"trainer.cpu_offload": True}, "trainer.cpu_offload"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(overrides: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        load_config(make_config(tmp_path), overrides)


def test_ranks_that_ran_out_of_memory_took_smaller_micro_batches_to_the_same_weights(
    finished: tuple[rayrft.Run, dict[str, Any]],
) -> None:
    run, summary = finished
    assert summary.restarts["trainer"].count == 1
    [restart] = [record for record in read_records(run.folder) if isinstance(record, RestartRecord)]
    assert "out of memory" in restart.cause and "micro_batch_tokens is 40 from now on, not 80" in restart.cause
    begin, end = (load_file(run.folder / each / "model.safetensors") for each in ("model", "checkpoints/imitate"))
    imitated = imitate(run)
    for name, weight in end.items():
        away = (weight - imitated[name]).abs()
        # Adam turns rounding of a gradient near 0 into a step: a loop in float32 is up to 2.6e-5 away.
        assert away.max() < 5e-5 and away.mean() < 2e-7
        assert (weight - begin[name]).abs().max() > 3e-3


def imitate(run: rayrft.Run) -> dict[str, torch.Tensor]:
    """The weights after the first stage, each of whose steps takes all chats, by a plain loop in double precision."""
    stage = load_config(run.folder / "config.yaml").stages[0]
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float64)
    adam = stage.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), adam.lr, adam.betas, weight_decay=adam.weight_decay)
    rows = [row for batch in Archive.of_run(run.folder).rows("expert/chats") for row in from_batch(batch)]
    for _ in range(stage.steps):
        for row in rows:
            ids, mask = torch.tensor(row.token_ids.tolist()), torch.tensor(row.action_mask.tolist())
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            (-(logprobs * mask[1:]).sum() / sum(int(each.action_mask.sum()) for each in rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), adam.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
