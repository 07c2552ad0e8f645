"""GAE over action tokens, rewards of tokens, and the critic's losses."""

from __future__ import annotations

import pytest
import torch

from rayrft.algorithms import Denominators, TokenBatch, build, count
from rayrft.algorithms.values import ActionTokens, clipped, gae, row_value_errors, squared, token_rewards
from tests.algorithms.flat import make_batch, on_mask, tokens, usual


def test_gae_by_hand() -> None:
    # Gamma = lam = 0.5; r = 0, 1 and V = 0.5, 0.25 around an observation; between them lies a row of r = 1, V = 0.3.
    # t = 1: delta = 1 + 0 - 0.25 = 0.75, A = 0.75, R = 1
    # t = 0: delta = 0 + 0.5 * 0.25 - 0.5 = -0.375, A = -0.375 + 0.25 * 0.75 = -0.1875, R = 0.3125
    batch = TokenBatch(
        mask=torch.tensor([True, False, True, True, False]),
        sequence=torch.tensor([0, 0, 1, 0, 0]),
        behaviour_logprobs=torch.zeros(5),
        advantages=torch.zeros(5),
        expert=torch.tensor([False, False]),
        values=torch.tensor([0.5, 9.0, 0.3, 0.25, 0.0]),
    )
    advantages, returns = gae(torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0]), batch, gamma=0.5, lam=0.5)
    assert advantages.tolist() == pytest.approx([-0.1875, 0.0, 0.7, 0.75, 0.0])
    assert returns.tolist() == pytest.approx([0.3125, 0.0, 1.0, 1.0, 0.0])


def test_an_answer_that_was_cut_goes_on_with_the_critics_value_by_hand() -> None:
    # As above, but V after the last token is 2 in the first row: delta = 1 + 0.5 * 2 - 0.25 = 1.75; then
    # -0.375 + 0.25 * 1.75 = 0.0625. The second row, not cut, and the third, without tokens, are as they were.
    final = torch.tensor([2.0, 0.0, 5.0], dtype=torch.float64)
    batch = usual([[0.0, 0.0], [0.0], []], values=[[0.5, 0.25], [0.5], []], final_values=final)
    rewards = tokens([[0.0, 1.0], [1.0], []], prompt=0.0)
    advantages, returns = gae(rewards, batch, gamma=0.5, lam=0.5, bootstrap_truncated=True)
    assert on_mask(advantages, batch) == pytest.approx([0.0625, 1.75, 0.5])
    assert on_mask(returns, batch) == pytest.approx([0.5625, 2.0, 1.0])
    plain, _ = gae(rewards, batch, gamma=0.5, lam=0.5)
    assert on_mask(plain, batch) == pytest.approx([-0.1875, 0.75, 0.5])
    with pytest.raises(ValueError, match="needs the critic's values of the states in which"):
        gae(rewards, usual([[0.0]], values=[[0.5]]), bootstrap_truncated=True)


def test_rewards_of_turns_stand_where_the_turns_end() -> None:
    # Turn rewards 0.5 and 0.25, the row's own 1: with gamma and lambda 1 the rest of them less V.
    fields = {"turn_rewards": [[0.5, 0.0, 0.25]], "values": [[0.125] * 3], "reward": torch.ones(1).double()}
    batch = usual([[0.0] * 3], **fields)
    assert on_mask(token_rewards(batch), batch) == [0.5, 0.0, 1.25]
    filled = build("ppo").token_advantages(batch)
    assert on_mask(filled.advantages, batch) == pytest.approx([1.625, 1.125, 1.125])


def test_token_rewards_stand_on_the_last_action_token_less_a_penalty_on_each() -> None:
    batch = usual([[0.0, 0.0], [0.0]], reward=torch.tensor([1.0, 2.0], dtype=torch.float64))
    found = token_rewards(batch, tokens([[0.1, 0.2], [0.3]]))
    assert on_mask(found, batch) == pytest.approx([-0.1, 0.8, 1.7])
    assert (found[~batch.mask] == 0).all()
    with pytest.raises(ValueError, match="need the rewards of the rows"):
        token_rewards(usual([[0.0]]))


def test_advantages_are_filled_in_for_own_rows_only_and_say_how_far_the_critic_missed() -> None:
    # |1 - 0.25| and |1 - 1.5|, mean 0.625; |0 - 0.5|; nothing of the expert's row, nor of one without tokens.
    batch = make_batch(
        [[0.0, 0.0], [0.0], [0.0], []],
        expert=[False, False, True, False],
        values=[[0.25, 1.5], [0.5], [9.0], []],
        reward=torch.tensor([1.0, 0.0, 1.0, 3.0]).double(),
    )
    filled = build("ppo").token_advantages(batch)
    assert filled.advantages.tolist() == [0.0, 0.75, -0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    assert filled.returns is not None and filled.returns.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert row_value_errors(filled).tolist() == pytest.approx([0.625, 0.5, 0.0, 0.0])
    with pytest.raises(ValueError, match="need the critic's values"):
        row_value_errors(usual([[0.0]]))


def test_a_kl_in_the_reward_by_hand() -> None:
    # k1 of the behaviour policy: log pi - log pi_ref = -1 + 2 = 1 on the only token; reward 1 - 0.5 * 1 - V 0.25
    algorithm = build("ppo", {"kl": "k1", "kl_in": "reward", "kl_coef": 0.5})
    fields = {"values": [[0.25]], "reference_logprobs": [[-2.0]], "reward": torch.ones(1).double()}
    filled = algorithm.token_advantages(make_batch([[-1.0]], **fields))
    assert filled.advantages.tolist() == pytest.approx([0.0, 0.25])
    with pytest.raises(ValueError, match="kl 'k1' needs reference_logprobs, which the batch does not hold"):
        algorithm.token_advantages(make_batch([[-1.0]], values=[[0.25]], reward=torch.ones(1)))


def test_a_kl_in_the_reward_of_a_group_by_hand() -> None:
    # k1 on the action tokens: 1, 2 and 4. With 0.5 times what is to come, the advantage 3 becomes 3 - 3.5, 3 - 3 and
    # 3 - 2; the expert's row keeps its zeros.
    fields = {"reference_logprobs": [[-2.0, -3.0, -5.0], [-9.0]]}
    batch = make_batch([[-1.0] * 3, [0.0]], [[3.0] * 3, [0.0]], expert=[False, True], **fields)
    for name in ("reinforce_pp", "grpo", "rloo"):
        algorithm = build(name, {"kl": "k1", "kl_in": "reward", "kl_coef": 0.5})
        assert on_mask(algorithm.token_advantages(batch).advantages, batch) == pytest.approx([-0.5, 0.0, 1.0, 0.0])
    assert build("grpo", {"kl": "k2", "kl_coef": 0.5}).token_advantages(batch) is batch, "a KL in the loss is not there"


@pytest.mark.parametrize("width", [0, 1, 2, 7, 64, 300])
def test_sums_to_go_are_those_of_the_recursion(width: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, width, dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64)
    expected = torch.zeros_like(values)
    for t in reversed(range(width)):
        total = expected[:, t] = values[:, t] + 0.97 * total
    batch = make_batch(values.tolist())
    actions = ActionTokens.of(batch)
    found = actions.scatter(actions.to_go(actions.gather(batch.behaviour_logprobs), 0.97))
    assert on_mask(found, batch) == pytest.approx(expected.flatten().tolist(), abs=1e-12)


def test_value_losses_by_hand() -> None:
    # V 1.0, R 0.0: 0.5. Old value 0.5 and bound 0.2: clipped to 0.7, (0.7)^2 / 2 < 0.5, so the greater stays.
    batch = usual([[0.0, 0.0]], values=[[0.5, 0.5]], returns=[[0.0, 2.0]])
    values = tokens([[1.0, 1.0]], prompt=0.0)
    assert on_mask(squared(values, batch), batch) == [0.5, 0.5]
    # Towards its return 2 the second may go to 0.7 only: (2 - 0.7)^2 / 2 = 0.845, without gradient.
    assert on_mask(clipped(values, batch), batch) == pytest.approx([0.5, 0.845])


def test_the_critics_loss_is_a_mean_over_own_tokens_by_the_weights_of_their_rows() -> None:
    # Misses of 1 and 2, weighed 1/2 and 1/4: (1/2 * 1/2 + 1/4 * 2) / 2 tokens.
    weight, rows = torch.tensor([0.5, 0.25, 1.0]), [[0.0], [0.0], [0.0]]
    returns, expert = [[1.0], [2.0], [9.0]], [False, False, True]
    batch = make_batch(rows, expert=expert, values=rows, returns=returns, weight=weight)
    over = Denominators(*count([batch]).tolist())
    found = build("ppo", {"value_loss": "squared"}).value_loss_of(tokens(rows), batch, over)
    assert found.item() == pytest.approx(0.375)


@pytest.mark.parametrize("missing", [lambda b: gae(b.advantages, b), lambda b: squared(b.advantages, b)])
def test_what_is_missing_is_named(missing) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"needs (the critic's values|returns)"):
        missing(usual([[0.0]]))
