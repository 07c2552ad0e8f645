"""A run trains a reward model on pairs, and then a policy against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.config import load_config
from rayrft.core.checkpoints import export
from rayrft.errors import ConfigError
from rayrft.experience import SCHEMA, from_batch
from rayrft.monitor.records import EvaluationRecord, NoteRecord, PairsRecord, StepRecord, read_records
from rayrft.monitor.report import accuracy_table
from tests.e2e.conftest import WITHOUT_VLLM, small_config
from tests.errors import about


def make_config(folder: Path, **overrides: Any) -> dict[str, Any]:
    words = ["red", "tan", "sky", "ash", "oak", "ink", "gem", "fog", "cup", "bee", "map", "sun"]
    pairs = [
        {"prompt": f"Spell {word}.", "chosen": word, "rejected": word[::-1], "margin": 0.5 * (number % 2)}
        for number, word in enumerate(words)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    sgd = {"lr": 3e-3, "schedule": "constant"}
    rm = {"name": "rm", "algorithm": {"name": "reward_model"}, "demonstrations": "pairs", "batch_size": 8}
    rm |= {"steps": 12, "optimizer": sgd, "evaluate_every": 8}
    grpo = {"name": "grpo", "algorithm": {"name": "grpo"}, "batch_size": 16, "group_size": 4, "steps": 3}
    config = small_config(folder, "learned", **WITHOUT_VLLM)
    config["demonstrations"]["pairs"] = {"path": str(folder / "pairs.jsonl"), "chat": True, "held_out": 0.25}
    config["stages"] = [config["stages"][0], rm, {**grpo, "evaluate_every": 2}]
    model = {"name": "model", "options": {"stage": "rm"}, "deadline_s": 60, "spare_workers": 0, "truncated": "score"}
    config["reward"] = model
    config["trainer"] = {"ranks": 2, "lora": overrides.pop("lora", None)}
    config["checkpoint"] = {"every": 4, "keep_last": 20}
    config["tasks"]["eval_size"] = 8
    return {**config, **overrides}


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="full"), pytest.param(True, id="lora", marks=pytest.mark.slow)]
)
def finished(request: Any, ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> rayrft.Run:
    """Once without an adapter, and once with one, stopped in the stage of the reward model and resumed."""
    lora = {"rank": 4} if request.param else None
    run = rayrft.start(make_config(tmp_path_factory.mktemp("learned"), lora=lora), say=lambda _: None)
    if lora:
        next(record for record in run.records() if isinstance(record, StepRecord) and record.step == 6)
        run.stop()
        run.result()
        run = rayrft.resume(run.folder, say=lambda _: None)
    run.result()
    return run


def test_pairs_are_learnt_and_the_policy_waits(finished: rayrft.Run) -> None:
    records = read_records(finished.folder)
    stops = [r.text for r in records if isinstance(r, NoteRecord) and r.text.startswith("stage 'rm': resumes after")]
    assert len(stops) == (load_config(finished.folder / "config.yaml").trainer.lora is not None)
    steps = [r for r in records if isinstance(r, StepRecord) and r.stage == "rm"]
    first, last = steps[0].metrics, steps[-1].metrics
    assert len(steps) == 12 and first.pair_accuracy == 0.0 and first.pair_score == 0.0
    assert last.preference_loss < first.preference_loss - 0.1 and last.pair_accuracy > 0.8
    assert all(step.usual_rows == 0 and step.expert_rows == 8 for step in steps)
    # What grpo begins with is what the warm-up ended with.
    evaluations = [r for r in records if isinstance(r, EvaluationRecord)]
    assert [(r.stage, r.step) for r in evaluations if r.temperature == 0] == [("rm", 15), ("grpo", 17), ("grpo", 18)]
    assert all(r.count == 8 and r.unknown == 0 for r in evaluations)


def test_held_out_pairs_are_ranked_by_the_reward_model_and_never_trained(finished: rayrft.Run) -> None:
    records = read_records(finished.folder)
    ranked = [record for record in records if isinstance(record, PairsRecord)]
    assert [(record.stage, record.stage_step, record.count) for record in ranked] == [("rm", 8, 3), ("rm", 12, 3)]
    archive = Archive.of_run(finished.folder)
    held = [row for batch in archive.rows("expert/pairs.held_out") for row in from_batch(batch)]
    trained = [row for batch in archive.rows("expert/pairs") for row in from_batch(batch)]
    assert len(held) == 6 and len(trained) == 18
    assert not {row.pair_id for row in held} & {row.pair_id for row in trained}
    # As the exported classifier ranks them.
    classifier = AutoModelForSequenceClassification.from_pretrained(finished.folder / "checkpoints" / "rm").eval()
    with torch.no_grad():
        scores = [float(classifier(torch.tensor([row.token_ids.tolist()])).logits) for row in held]
    gaps = [good - bad for good, bad in zip(scores[::2], scores[1::2], strict=True)]
    last = ranked[-1]
    assert last.right == sum(gap > 0 for gap in gaps) and last.margin == pytest.approx(sum(gaps) / 3, abs=1e-4)
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary["pairs"]["rm"]["right"] == last.right and summary["pairs"]["rm"]["count"] == 3
    assert summary["expert"]["pairs"]["drawn"] == 96 and summary["expert"]["pairs.held_out"]["drawn"] == 0
    assert f"held-out pairs after rm: {last.accuracy:.3f} ({last.right}/3" in accuracy_table(records)


def test_the_stage_leaves_a_classifier_that_scores_the_groups_of_the_next(finished: rayrft.Run) -> None:
    folder = finished.folder / "checkpoints" / "rm"
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    batches = Archive.of_run(finished.folder).rows("usual", where="group_status = 'trained'", columns=SCHEMA.names)
    rows = [row for batch in batches for row in from_batch(batch)]
    assert len(rows) == 48 and len({row.reward for row in rows}) > 4
    for row in rows:
        ids = tokenizer.apply_chat_template(list(row.turns), return_dict=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert row.reward == pytest.approx(float(classifier(ids).logits), abs=1e-4)


def test_a_checkpoint_of_the_stage_is_exported_as_a_classifier_and_others_as_policies(
    finished: rayrft.Run, tmp_path: Path
) -> None:
    whole = AutoModelForSequenceClassification.from_pretrained(finished.folder / "checkpoints" / "rm")
    assert export(finished.folder, tmp_path / "end", 15) == 15
    end = AutoModelForSequenceClassification.from_pretrained(tmp_path / "end").state_dict()
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(weight, end[name], atol=1e-6, rtol=0)
    export(finished.folder, tmp_path / "earlier", 7)
    earlier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "earlier").state_dict()
    assert not torch.equal(earlier["score.weight"], end["score.weight"])
    export(finished.folder, tmp_path / "policy")
    final = AutoModelForCausalLM.from_pretrained(finished.folder / "checkpoints" / "final").state_dict()
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    assert all(torch.allclose(weight, policy[name], atol=1e-6) for name, weight in final.items())
    if load_config(finished.folder / "config.yaml").trainer.lora is not None:
        with pytest.raises(ConfigError, check=about("merge")):
            export(finished.folder, tmp_path / "adapter", 15, merged=False)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("option", "field"), [({"sigmod": True}, "reward.options"), ({"model": "some/model"}, "reward.options")]
)
def test_options_that_the_reward_does_not_take_are_refused_before_it_is_trained(
    option: dict[str, Any], field: str, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    config["reward"]["options"] |= option
    with pytest.raises(ConfigError, check=about(field)):
        rayrft.start(config, say=lambda _: None)
