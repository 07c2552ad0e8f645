"""On real vLLM: of a policy with an adapter only the adapter is sent, and the engine computes with the whole."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

from rayrft.config.trainer import LoraConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.trainer.learner import Learner
from rayrft.trainer.lora import Lora
from rayrft.trainer.model import load_hf, load_policy, named_weights, write_hf
from rayrft.trainer.policy import Policy
from rayrft.weights.messages import Adapter
from tests.explorer.conftest import EngineUnderTest

ROWS = [[5, 40, 41, 42, 43, 3, 50, 51, 12], [5, 60, 3, 44]]


def moved(policy: Policy, seed: int) -> Policy:
    """The policy with an adapter that changes what it says."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, factor in named_weights(policy):
            factor.add_(torch.randn(factor.shape, generator=chance) * 0.3)
    return policy


def update(engine: EngineUnderTest, policy: Policy, version: int) -> tuple[int, float]:
    """One round as the weight sync does it, after which the engine must say what the policy says.

    Gives the bytes that were sent, and by how much the log-probs differ.
    """
    assert policy.lora is not None
    factors = dict(named_weights(policy))
    sent, held, nbytes = engine.update(factors, version, Adapter(policy.lora.base, policy.lora.scale))
    assert (held.version, held.digests) == (version, (sent,))
    ours = Learner(policy, micro_batch_tokens=64, temperature=1.0, device=torch.device("cpu")).score(ROWS)
    theirs = ray.get([engine.actor.score.remote(row) for row in ROWS])
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]
    return nbytes, max(abs(a - b) for a, b in pairs)


@pytest.fixture
def policy(engine: EngineUnderTest) -> Policy:
    policy = load_policy(str(engine.folder))
    config = LoraConfig(rank=2, alpha=3, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    policy.lora = Lora(policy.model, config, origin=str(engine.folder), compute=torch.float32, seed=0)
    return policy


def test_only_the_adapter_is_sent_and_the_engine_computes_with_the_whole(
    engine: EngineUnderTest, policy: Policy
) -> None:
    before = Learner(policy, micro_batch_tokens=64, temperature=1.0, device=torch.device("cpu")).score(ROWS)
    # Twice: the second adapter is added to the model's own weights, not to those with the first in them.
    for version in (40, 41):
        nbytes, gap = update(engine, moved(policy, seed=version), version)
        assert gap < 1e-4
    after = ray.get([engine.actor.score.remote(row) for row in ROWS])
    assert max(abs(a - b) for a, b in zip(before[0], after[0], strict=True)) > 0.1, "the adapter has no effect"
    assert nbytes == 4 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert nbytes < 0.1 * 4 * sum(p.numel() for p in policy.parameters())


def test_an_adapter_on_the_weights_of_an_earlier_stage_is_added_to_those(
    engine: EngineUnderTest, policy: Policy, tmp_path: Any
) -> None:
    stage = tmp_path / "stage"
    write_hf(moved(policy, seed=1), policy.state_dict(), ChatTokenizer(engine.folder), stage)
    load_hf(policy, str(stage))
    assert update(engine, policy, 50)[1] < 1e-4
    assert update(engine, moved(policy, seed=2), 51)[1] < 1e-4
