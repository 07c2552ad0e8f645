"""Every term of a step against the model's plain logits, with own rows sampled at another temperature than 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rayrft.config.stage import UpdateConfig
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.learner import Learner
from rayrft.trainer.policy import Policy
from tests.trainer.learners import make_learner, make_model, make_rows, make_teacher, move

TEMPERATURE = 0.7


def plain(policy: Policy, rows: list[TrainRow], temperature: float) -> list[torch.Tensor]:
    """Log-probs of each row's action tokens."""
    found, own = [], policy.model.config._attn_implementation
    policy.model.set_attn_implementation("sdpa")
    for row in rows:
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        with torch.no_grad():
            logprobs = (policy.model(ids[None, :-1]).logits[0] / temperature).log_softmax(-1)
        found.append(logprobs.gather(1, ids[1:, None])[:, 0][torch.tensor(row.mask[1:]).bool()])
    policy.model.set_attn_implementation(own)
    return found


def on_mask(rows: list[TrainRow], name: str) -> list[torch.Tensor]:
    return [torch.tensor(getattr(row, name)[row.mask.astype(bool)], dtype=torch.float64) for row in rows]


def moved(name: str, pieces: dict[str, Any], update: UpdateConfig | None = None) -> tuple[Learner, Policy]:
    """A learner whose policy has moved since the stage began, and the reference that it had then."""
    learner = make_learner(name, pieces, update=update, temperature=TEMPERATURE)
    move(learner.policy, 0.05)
    return learner, make_model()


def test_own_rows_are_seen_at_the_samplers_temperature_and_expert_rows_at_1() -> None:
    pieces = {"mu": 0.25, "kl": "k2", "kl_coef": 0.5, "correction": "decoupled", "distillation": "reverse_kl"}
    learner, reference = moved("mix", pieces, UpdateConfig(epochs=2))
    learner.teacher = make_teacher()
    rows = [replace(row, weight=1.0) for row in make_rows()]
    own, expert = [row for row in rows if not row.expert], [row for row in rows if row.expert]
    parts, _ = learner.gradient(rows)

    now, behaviour = torch.cat(plain(learner.policy, own, TEMPERATURE)), torch.cat(on_mask(own, "logprobs"))
    then, teacher = (torch.cat(plain(model, own, TEMPERATURE)) for model in (reference, learner.teacher))
    imitated = torch.cat(plain(learner.policy, expert, 1.0))
    weight = (now - behaviour).exp()
    expected = {
        "policy": -(weight * torch.cat(on_mask(own, "advantages"))).mean(),
        "kl": ((now - then).square() / 2).mean(),
        "distillation": (weight.clamp(max=2.0) * (now - teacher)).mean(),
        "sft": -imitated.mean(),
    }
    assert then.sub(now).abs().mean() > 0.05 and weight.min() < 0.8, "the policies differ"
    for name, value in expected.items():
        assert getattr(parts, name).item() == pytest.approx(value.item(), abs=1e-5), name
    total = 0.75 * (expected["policy"] + 0.5 * expected["kl"] + expected["distillation"]) + 0.25 * expected["sft"]
    assert parts.loss.item() == pytest.approx(total.item(), abs=1e-5)
    assert (parts.ratio / len(now)).item() == pytest.approx(1.0), "to the proximal policy, at the same temperature"


def test_a_penalty_in_the_reward_is_of_the_proximal_policy_also_where_a_batch_has_one_update() -> None:
    learner, reference = moved("rloo", {"kl": "k1", "kl_in": "reward", "kl_coef": 0.5, "correction": "decoupled"})
    rows = [replace(row, expert=False, weight=1.0) for row in make_rows()]
    parts, over = learner.gradient(rows)
    now, then = (plain(model, rows, TEMPERATURE) for model in (learner.policy, reference))
    loss = torch.zeros((), dtype=torch.float64)
    for ours, theirs, sampled, advantages in zip(
        now, then, on_mask(rows, "logprobs"), on_mask(rows, "advantages"), strict=True
    ):
        to_go = (ours - theirs).flip(0).cumsum(0).flip(0)
        loss -= ((ours - sampled).exp() * (advantages - 0.5 * to_go)).sum() / over.policy_tokens
    assert parts.policy.item() == pytest.approx(loss.item(), abs=1e-5)
