"""From token losses to the loss of a step, and what it is divided by."""

from __future__ import annotations

import pytest
import torch

from rayrft.algorithms import Denominators, TokenBatch, aggregations, count
from rayrft.algorithms.batch import keep
from tests.algorithms.flat import make_batch, tokens, usual

BATCH = usual([[0.0, 0.0, 0.0], [0.0]])
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
    assert aggregate(VALUES, BATCH, OVER).item() == pytest.approx(expected)


def test_denominators_count_what_each_stream_holds() -> None:
    batch = make_batch(
        [[0.0, 0.0], [0.0], [], [0.0, 0.0, 0.0], [0.0], [0.0]],
        expert=[False, False, False, True, False, False],
        pair=torch.tensor([-1, -1, -1, -1, 0, 0]),
        chosen=torch.tensor([False, False, False, False, True, False]),
    )
    over = Denominators.of(count([batch, batch]))
    assert (over.policy_tokens, over.policy_sequences) == (6, 4), "a row without an action token is none"
    assert (over.expert_tokens, over.expert_sequences) == (6, 2)
    assert over.pairs == 2


def test_an_empty_stream_divides_by_one() -> None:
    over = Denominators.of(count([]))
    assert (over.policy.tokens, over.policy.sequences, over.expert.tokens, over.expert.sequences) == (1, 1, 1, 1)


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
