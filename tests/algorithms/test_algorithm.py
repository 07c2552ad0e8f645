"""How the terms of a loss come together: streams, their weights and denominators, and the sums for the metrics."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch

from rayrft.algorithms import Denominators, GroupFacts, TokenBatch, aggregations, build, count, policy_losses, presets
from rayrft.algorithms.batch import keep
from rayrft.algorithms.sft import SFTLoss, chord_phi, constant_mu, cosine_mu, nll, nll_by_probability
from tests.algorithms.flat import LOG2, gradient, leaf, make_batch, on_mask, output, tokens, usual


def over(policy: float = 0, expert: float = 0) -> Denominators:
    """Rows of one token each."""
    return Denominators(policy, policy, expert, expert)


def test_grpo_by_hand() -> None:
    # Ratios 1, 2 and 1/2 with advantages 1, 1 and -1; bounds 0.8 and 1.28.
    # min(1, 1) = 1; min(2, 1.28) = 1.28; min(-0.5, -0.8) = -0.8. Loss = -(1 + 1.28 - 0.8) / 3.
    batch = make_batch([[-1.0]] * 3, [[1.0], [1.0], [-1.0]])
    logprobs = leaf([[-1.0], [-1.0 + LOG2], [-1.0 - LOG2]])
    parts = build("grpo").loss(output(logprobs), batch, over(policy=3))
    assert parts.loss.item() == pytest.approx(-(1 + 1.28 - 0.8) / 3)
    assert parts.policy.item() == pytest.approx(parts.loss.item())
    assert (parts.sft.item(), parts.kl.item(), parts.preference.item()) == (0.0, 0.0, 0.0)
    assert parts.clipped.item() == 2
    assert parts.ratio.item() == pytest.approx(3.5)
    assert parts.logprob_gap.item() == pytest.approx(2 * LOG2)


@pytest.mark.parametrize(("name", "mu", "same"), [("mix", 0.0, "grpo"), ("chord", 0.0, "grpo"), ("mix", 1.0, "sft")])
def test_the_ends_of_mix_are_grpo_and_sft_exactly(name: str, mu: float, same: str) -> None:
    batch = make_batch([[-1.1], [0.0], [-0.4]], [[1.0], [0.0], [-0.7]], expert=[False, True, False])
    results = []
    for algorithm in (build(name, {"mu": mu}), build(same)):
        logprobs = leaf([[-1.0], [-0.3], [-0.9]])
        loss = algorithm.loss(output(logprobs), batch, over(2, 1)).loss
        loss.backward()
        assert logprobs.grad is not None
        results.append((loss.item(), logprobs.grad))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_mix_weighs_each_stream_over_its_own_denominator_and_kl_and_entropy_with_the_policy_by_hand() -> None:
    # Own tokens: policy -2, k2 of log 2, mean entropy 0.6; expert rows: 0.5 and 1.5, whose reference is not looked at.
    # mu = 1/4: 3/4 (-2 + 0.5 (log 2)^2 / 2 - 0.1 * 0.6) + 1/4 * 1
    fields = {"reference_logprobs": [[-1.0 - LOG2] * 2, [math.nan], [math.nan]]}
    rows, advantages = [[-1.0] * 2, [0.0], [0.0]], [[2.0] * 2, [0.0], [0.0]]
    batch = make_batch(rows, advantages, expert=[False, True, True], **fields)
    pieces = {"mu": 0.25, "kl": "k2", "kl_coef": 0.5, "entropy": "bonus", "entropy_coef": 0.1}
    entropy = tokens([[0.4, 0.8], [9.0], [9.0]]).requires_grad_()
    found = output(leaf([[-1.0] * 2, [-0.5], [-1.5]]), entropy)
    parts = build("mix", pieces).loss(found, batch, Denominators(2, 1, 2, 2))
    assert parts.loss.item() == pytest.approx(0.75 * (-2.0 + 0.25 * LOG2**2 - 0.06) + 0.25)
    assert (parts.policy.item(), parts.sft.item(), parts.entropy.item()) == pytest.approx((-2.0, 1.0, 1.2))
    assert (parts.kl.item(), parts.entropy_term.item()) == pytest.approx((LOG2**2 / 2, -0.6))
    [slope] = torch.autograd.grad(parts.loss, entropy)
    assert slope.tolist() == pytest.approx([0.0, -0.0375, -0.0375, 0.0, 0.0, 0.0, 0.0])


def test_the_weight_of_a_row_multiplies_every_loss_of_its_own() -> None:
    # Kimi's loss is not proportional to the advantage: (1 - 0)^2 / 0.2 = 5 for either row, weighed 1 and 3. Of the
    # second row the others are 0, so that they count once where the policy loss counts four times.
    fields = {"reference_logprobs": [[-1.0 - LOG2], [-1.0]], "teacher_logprobs": [[-1.0 - LOG2], [-1.0]]}
    batch = make_batch([[-1.0], [-1.0]], [[1.0], [1.0]], weight=torch.tensor([1.0, 3.0]), **fields)
    entropy = torch.tensor([9.0, 0.6, 9.0, 0.0], dtype=torch.float64)
    pieces = {"kl": "k2", "kl_coef": 0.5, "entropy": "bonus", "entropy_coef": 0.1, "distillation": "reverse_kl"}
    losses = []
    for weights in ([1.0, 3.0], [0.5, 3.0]):
        weighed = replace(batch, weight=torch.tensor(weights))
        parts = build("kimi", pieces).loss(output(leaf([[-1.0], [-1.0]]), entropy), weighed, over(policy=2))
        losses.append(parts.loss.item())
        assert parts.kl.item() == pytest.approx(LOG2**2 / 4), "what steers its coefficient is not weighed"
    rest = 0.5 * LOG2**2 / 2 - 0.1 * 0.6 + LOG2
    assert losses == pytest.approx([(5.0 * 4 + rest) / 2, (5.0 * 3.5 + 0.5 * rest) / 2])


@pytest.mark.parametrize("correction", ["none", "truncated"])
def test_the_first_update_of_gspo_clips_nothing_however_the_engine_rounds(correction: str) -> None:
    # The engine's log-probs are off by 0.01, beyond gspo's bounds; the gradient of the answer is that of its mean.
    batch, logprobs = make_batch([[-1.01, -1.01]], [[1.0, 1.0]]), leaf([[-1.0, -1.0]])
    parts = build("gspo", {"correction": correction}).loss(output(logprobs), batch, Denominators(2, 1))
    weight = 1.0 if correction == "none" else math.exp(0.01)
    assert parts.clipped.item() == 0 and parts.loss.item() == pytest.approx(-weight)
    [found] = torch.autograd.grad(parts.loss, logprobs)
    assert found[batch.mask].tolist() == pytest.approx([-weight / 2] * 2)


def test_a_rank_without_rows_takes_part_with_a_zero() -> None:
    logprobs = torch.tensor([-math.inf], requires_grad=True)
    batch = make_batch([[]])
    for name in ("grpo", "sft", "mix", "kimi", "gspo"):
        loss = build(name).loss(output(logprobs), batch, over()).loss
        assert loss.item() == 0.0
        assert torch.autograd.grad(loss, logprobs)[0].item() == 0.0


@pytest.mark.parametrize("name", presets)
def test_algorithms_travel_between_processes(name: str) -> None:
    assert pickle.loads(pickle.dumps(build(name))) == build(name)


def test_advantages_of_a_group_are_those_of_the_chosen_piece() -> None:
    rewards = torch.tensor([1.0, 0.0])
    assert build("grpo", {"advantage": "rloo"}).group_advantages(rewards, GroupFacts()).tolist() == [1.0, -1.0]
    assert build("asymre", {"baseline_shift": -0.5}).group_advantages(rewards, GroupFacts()).tolist() == [1.0, 0.0]
    assert build("sft").group_advantages(rewards, GroupFacts()).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="advantage 'gae' is computed by the trainer"):
        build("ppo").group_advantages(rewards, GroupFacts())


def test_groups_without_advantages_are_idle_only_where_nothing_else_is_learnt_from_them() -> None:
    assert build("grpo").zero_advantage_is_noop and build("mix").zero_advantage_is_noop
    assert not build("reinforce_pp").zero_advantage_is_noop, "a reward of 0 may be below the batch's mean"
    assert not build("ppo").zero_advantage_is_noop, "its advantages are not known yet"
    assert not build("distill").zero_advantage_is_noop
    for term in ({"kl": "k3"}, {"entropy": "bonus"}):
        assert not build("grpo", term).zero_advantage_is_noop
    assert build("grpo", {"kl": "k3", "kl_coef": 0}).zero_advantage_is_noop


@pytest.mark.parametrize("name", policy_losses)
def test_what_is_idle_has_no_gradient_at_advantage_0(name: str) -> None:
    algorithm = build("grpo", {"policy_loss": name})
    logprobs = leaf([[-1.0, -0.5], [-0.7]])
    loss = algorithm.loss(output(logprobs), make_batch([[-1.2, -0.6], [-0.6]]), Denominators(3, 2)).loss
    [found] = torch.autograd.grad(loss, logprobs)
    assert algorithm.zero_advantage_is_noop == (not found.any())


ROWS = usual([[0.0, 0.0, 0.0], [0.0]])
VALUES = tokens([[1.0, 2.0, 3.0], [4.0]])
OVER = Denominators(policy_tokens=8, policy_sequences=4).policy


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 10 / 8),  # (1 + 2 + 3 + 4) / 8 tokens of the whole step
        ("sequence_mean_token_mean", (2 + 4) / 4),  # means 2 and 4, over 4 rows
        ("sequence_mean_token_sum", (6 + 4) / 4),
        ("constant", 10 / (4 * 100)),
    ],
)
def test_aggregations_by_hand(name: str, expected: float) -> None:
    aggregate = aggregations.get(name).bind({"constant_length": 100.0})
    assert aggregate(VALUES, ROWS, OVER).item() == pytest.approx(expected)


def test_denominators_count_what_each_stream_holds_and_are_1_for_an_empty_one() -> None:
    batch = make_batch(
        [[0.0, 0.0], [0.0], [], [0.0, 0.0, 0.0], [0.0], [0.0]],
        expert=[False, False, False, True, False, False],
        pairs=torch.tensor([[4], [5]]),
        chosen=torch.tensor([False, False, False, False, True, False]),
    )
    over = Denominators(*count([batch, batch]).tolist())
    assert (over.policy_tokens, over.policy_sequences) == (6, 4), "a row without an action token is none"
    assert (over.expert_tokens, over.expert_sequences) == (6, 2)
    assert over.pairs == 2
    none = Denominators(*count([]).tolist())
    assert (none.policy.tokens, none.policy.sequences, none.expert.tokens, none.expert.sequences) == (1, 1, 1, 1)


def test_row_sums_and_means_take_rows_in_any_order() -> None:
    mask = torch.tensor([True, True, False, True])
    zeros = torch.zeros(4)
    batch = TokenBatch(mask, torch.tensor([1, 0, 1, 1]), zeros, zeros, torch.tensor([False, False]))
    values = torch.tensor([1.0, 5.0, torch.nan, 2.0])
    assert batch.sum(values).tolist() == [5.0, 3.0]
    assert batch.mean(values).tolist() == [5.0, 1.5]
    assert batch.lengths.tolist() == [1.0, 2.0]
    assert batch.spread(torch.tensor([7.0, 8.0])).tolist() == [8.0, 7.0, 8.0, 8.0]


def test_nothing_off_the_mask_comes_through_nor_its_gradient() -> None:
    values = torch.tensor([1.0, torch.inf, torch.nan], requires_grad=True)
    kept = keep(values * 2, torch.tensor([True, False, False]))
    assert kept.tolist() == [2.0, 0.0, 0.0]
    kept.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [2.0, 0.0, 0.0]


EXPERT = make_batch([[0.0, 0.0]], expert=[True]).demonstrated()
QUARTER = [math.log(0.5), math.log(0.25)]


@pytest.mark.parametrize(
    ("loss", "logprobs", "values", "slopes"),
    [
        (nll, [-0.5, -1.5], [0.5, 1.5], [-1.0, -1.0]),
        # Weights 0.5 * 0.5 and 0.25 * 0.75, without gradient of their own; none where the policy is sure either way.
        (chord_phi, QUARTER, [0.25 * math.log(2), 0.1875 * math.log(4)], [-0.25, -0.1875]),
        (chord_phi, [-1e-9, -50.0], [0.0, 0.0], [0.0, 0.0]),
        (nll_by_probability, QUARTER, [0.5 * math.log(2), 0.25 * math.log(4)], [-0.5, -0.25]),
    ],
)
def test_losses_by_hand(loss: SFTLoss, logprobs: list[float], values: list[float], slopes: list[float]) -> None:
    now = leaf([logprobs])
    found = loss(now, EXPERT)
    assert on_mask(found, EXPERT) == pytest.approx(values, abs=1e-8)
    assert gradient(found, now, EXPERT) == pytest.approx(slopes, abs=1e-8)


@pytest.mark.parametrize(
    ("step", "mu"),
    [(0, 0.0), (5, 0.45), (10, 0.9), (60, 0.5), (110, 0.1), (500, 0.1)],  # half way down: (0.9 + 0.1) / 2
)
def test_the_cosine_schedule_by_hand(step: int, mu: float) -> None:
    found = cosine_mu(step, mu_peak=0.9, mu_valley=0.1, mu_warmup_steps=10, mu_decay_steps=100)
    assert found == pytest.approx(mu)
    assert cosine_mu(step, mu_decay_steps=0) == 0.05, "without decay it stands at its valley"


def test_the_schedule_follows_the_steps_of_the_stage() -> None:
    assert constant_mu(7, mu=0.3) == 0.3
    batch = make_batch([[-1.0], [0.0]], [[2.0], [0.0]], expert=[False, True])
    algorithm = build("chord_mu", {"mu_peak": 0.5, "mu_valley": 0.1, "mu_decay_steps": 10})
    over = Denominators(1, 1, 1, 1)
    for step, mu in ((0, 0.5), (5, 0.3), (10, 0.1)):
        loss = algorithm.loss(output(leaf([[-1.0], [-0.5]])), batch, over, step=step).loss
        assert loss.item() == pytest.approx((1 - mu) * -2.0 + mu * 0.5)


def test_a_row_counts_by_its_weight_and_the_number_of_tokens_stays_what_it_is() -> None:
    batch = replace(make_batch([[0.0, 0.0], [0.0]], expert=[True, True]), weight=torch.tensor([0.5, 2.0]))
    loss = build("sft").loss(output(leaf([[-1.0, -3.0], [-2.0]])), batch, Denominators(0, 0, 3, 2)).loss
    assert loss.item() == pytest.approx((0.5 * 4.0 + 2.0 * 2.0) / 3)
