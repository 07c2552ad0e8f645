"""Learning from a teacher, from the model on disk to the policy that has come nearer to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rayrft.config.stage import StageConfig
from rayrft.config.trainer import OptimizerConfig, TrainerConfig
from rayrft.trainer.api import RankSetup
from rayrft.trainer.batches import TrainRow, micro_batches
from rayrft.trainer.learner import Learner
from rayrft.trainer.policy import Policy
from rayrft.trainer.rank import Rank
from tests.scripted import handle
from tests.trainer.learners import CPU, make_learner, on_policy, own_rows


@pytest.fixture(scope="module")
def rank(tiny_model: Path) -> Iterator[Callable[[str], Rank]]:
    """A rank by itself, in this process, for a precision of the compute."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda dtype: Rank(
        RankSetup(handle(None), TrainerConfig(ranks=1), str(tiny_model), dtype, 1.0, []), 0, torch.device("cpu")
    )
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("algorithm", "dtype", "tolerance"),
    [
        ({"name": "distill"}, "float32", 1e-5),
        ({"name": "jsd", "teacher_candidates": 5}, "float32", 1e-5),
        ({"name": "jsd"}, "bfloat16", 1e-2),
    ],
    ids=["sampled tokens", "candidates", "half precision"],
)
def test_a_teacher_that_is_the_policy_teaches_nothing(
    algorithm: dict[str, Any], dtype: str, tolerance: float, rank: Callable[[str], Rank], tiny_model: Path
) -> None:
    one, whole = rank(dtype), {"name": "s", "steps": 2, "batch_size": 8, "group_size": 8}
    stage = StageConfig.model_validate({**whole, "algorithm": algorithm, "teacher": str(tiny_model)})
    one.open_stage(stage.algorithm.build(), stage, None)
    learner = one.learner
    assert learner.teacher is not None
    assert {each.dtype for each in learner.teacher.parameters()} == {getattr(torch, dtype)}
    result = learner.step([on_policy(learner, own_rows())])
    assert result.metrics.distillation_loss == pytest.approx(0.0, abs=tolerance)
    assert result.metrics.policy_tokens > 0 and not any(each.requires_grad for each in learner.teacher.parameters())


CHANCE = np.random.default_rng(0)
PROMPTS = CHANCE.integers(0, 50, (8, 5)).astype(np.int32)


def whole(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """``[prompts, vocabulary]``: log-probs of these tokens after each of the prompts."""
    rows = [TrainRow(np.append(each, 0), *[np.eye(6)[5]] * 3, expert=False) for each in PROMPTS]
    [micro] = micro_batches(rows, 1000, CPU)
    order = [PROMPTS.tolist().index(each[:5].tolist()) for each in micro.token_ids.view(8, 6)]
    found = policy.output(replace(micro, candidates=ids.expand(8, -1)), temperature=1.0).candidates
    assert found is not None
    return found[micro.predicted][np.argsort(order)].detach()


def sampled(learner: Learner, each: int = 32) -> list[TrainRow]:
    """Answers of one token to the prompts, drawn from the policy."""
    logprobs, mask, rows = whole(learner.policy, torch.arange(50)), np.eye(6, dtype=np.uint8)[5], []
    for prompt, known in zip(PROMPTS, logprobs.numpy(), strict=True):
        for token in CHANCE.choice(50, each, p=np.exp(known) / np.exp(known).sum()):
            behaviour = (mask * known[token]).astype(np.float32)
            rows.append(TrainRow(np.append(prompt, token), mask, behaviour, np.zeros(6, np.float32), expert=False))
    return rows


def divergence(learner: Learner) -> float:
    """``KL(pi || teacher)``, the mean over the prompts."""
    assert learner.teacher is not None
    ours, theirs = (whole(policy, torch.arange(50)) for policy in (learner.policy, learner.teacher))
    return (ours.exp() * (ours - theirs)).sum(-1).mean().item()


@pytest.mark.parametrize(("name", "pieces"), [("distill", {}), ("jsd", {}), ("jsd", {"teacher_candidates": 8})])
def test_the_policy_comes_nearer_to_its_teacher(name: str, pieces: dict[str, Any]) -> None:
    learner = make_learner(name, pieces, tokens=10_000, optimizer=OptimizerConfig(lr=3e-3))
    before = divergence(learner)
    for _ in range(10):
        learner.step([sampled(learner)])
    assert 0 < divergence(learner) < 0.7 * before
