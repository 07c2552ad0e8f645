"""From leased rows to micro-batches: who stands with whom, how much of it at a time, and with which KL (KTO)."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrft.algorithms import build
from rayrft.buffer.events import Extent
from rayrft.buffer.expert_cursor import ExpertCursor
from rayrft.buffer.leases import BlockRows, Unit, deal
from rayrft.errors import DataError
from rayrft.experience import Experience, from_batch, to_batch
from rayrft.trainer.batches import TrainRow, micro_batches, mismatched, read_rows
from rayrft.trainer.learner import Learner
from tests.buffer.rows import expert_rows, pairs
from tests.trainer.learners import CPU, labelled, make_learner, move

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def row(length: int, token: int = 0, pair: int | None = None, chosen: bool = False) -> TrainRow:
    zeros = np.zeros(length, np.float32)
    mask = (np.arange(length) > 0).astype(np.uint8)
    return TrainRow(np.full(length, token, np.int32), mask, zeros, zeros, expert=True, pair=pair, chosen=chosen)


def preference_pairs(count: int) -> pa.RecordBatch:
    """Pair p is of the tokens 2p + 1 (chosen) and 2p + 2."""
    return to_batch([replace(each, token_ids=each.token_ids - 899) for each in pairs(count)])


@pytest.mark.parametrize("cursor", [0, 4], ids=["larger than the data set", "across an epoch"])
def test_a_pair_that_is_in_a_batch_twice_counts_twice(cursor: int) -> None:
    batch = preference_pairs(3)
    drawn = ExpertCursor(Extent(0, 6, 0, 0), seed=0, unit=2, cursor=cursor).peek(8)
    units = [Unit(None, first, 2, 8) for first in drawn[::2]]  # type: ignore[arg-type]
    [share] = deal([units], 1)
    rows = [each for part in share.parts for each in read_rows(batch, part, build("dpo"))]
    assert len({int(each.token_ids[0]) for each in rows}) < len(rows), "no pair is there twice"
    assert [each.pair for each in rows] == [0, 0, 2, 2, 4, 4, 6, 6]
    [micro] = micro_batches(rows, 1000, CPU)
    assert micro.tokens.pairs is not None and micro.tokens.pairs.T.tolist() == [[n, n + 1] for n in (0, 2, 4, 6)]
    result = make_learner("dpo").step([rows])
    assert result.metrics.preference_loss == pytest.approx(np.log(2), abs=1e-6)


def test_pairs_are_numbered_on_from_where_their_part_of_the_share_begins() -> None:
    part = BlockRows(None, np.array([2, 3, 2, 3]), np.zeros((4, 2), int), np.ones(4, np.float32), np.zeros(4, bool))
    rows = read_rows(preference_pairs(2), part, build("dpo"), start=10)
    assert [each.pair for each in rows] == [10, 10, 12, 12]


def shapes(rows: list[TrainRow], budget: int, **how: Any) -> list[list[int]]:
    return [sorted(each.lengths) for each in micro_batches(rows, budget, CPU, **how)]


def test_a_long_row_stands_alone_and_the_others_keep_to_the_budget() -> None:
    assert shapes([row(n) for n in (5, 100, 5, 5, 5)], 10, padded=False) == [[100], [5, 5], [5, 5]]


@pytest.mark.parametrize("padded", [True, False])
def test_a_row_that_is_to_stand_alone_does(padded: bool) -> None:
    batch = to_batch(expert_rows(4))
    units = [Unit(None, place, 1, 4, alone=place == 2) for place in range(4)]  # type: ignore[arg-type]
    [share] = deal([units], 1)
    rows = [each for part in share.parts for each in read_rows(batch, part, build("dpo"))]
    found = {micro.experiences for micro in micro_batches(rows, 1000, CPU, padded=padded)}
    assert found == {("90/2",), ("90/0", "90/1", "90/3")}


def test_padding_counts_and_rows_of_a_length_stand_together() -> None:
    # 2 x 9 = 18, then 3 x 6 = 18, then 2 x 1. By tokens alone, 38 in all, 9 and 6 would stand together.
    assert shapes([row(n) for n in (1, 9, 6, 6, 1, 9, 6)], 18, padded=True) == [[9, 9], [6, 6, 6], [1, 1]]


@given(lengths, st.integers(1, 60), st.booleans())
def test_micro_batches_keep_to_the_budget_and_hold_every_row_once(sizes: list[int], budget: int, padded: bool) -> None:
    found = shapes([row(n) for n in sizes], budget, padded=padded)
    assert sorted(n for each in found for n in each) == sorted(sizes)
    for each in found:
        assert (len(each) * max(each) if padded else sum(each)) <= budget or len(each) == 1
    assert found == shapes([row(n) for n in sizes[::-1]], budget, padded=padded)


@given(lengths, st.integers(1, 60), st.floats(0, 1))
def test_no_cost_of_attention_lets_a_micro_batch_exceed_its_budget(sizes: list[int], budget: int, cost: float) -> None:
    found = shapes([row(n) for n in sizes], budget, attention=cost)
    assert sorted(n for each in found for n in each) == sorted(sizes)
    assert all(sum(each) <= budget or len(each) == 1 for each in found)
    costs = [sum(n + cost * n**2 for n in each) for each in found]
    assert costs == sorted(costs, reverse=True), "ranks, which wait for each other, work on unequal ones"


def test_micro_batches_are_of_equal_cost_and_tokens_that_rows_share_attend_once() -> None:
    rows = [row(n) for n in (9, 3, 3, 3, 3, 3)]
    assert shapes(rows, 20) == [[3, 9], [3, 3, 3, 3]]
    # 9 + 81 / 2 = 49.5 costs more than five times 3 + 9 / 2 = 7.5.
    assert shapes(rows, 20, attention=0.5) == [[9], [3, 3, 3, 3, 3]]
    # Of 61 tokens 60 are shared: 61^2 + 7 (61^2 - 60^2) = 4568 is less than 90^2.
    group = [replace(row(61), token_ids=np.repeat([0, n], [60, 1]).astype("int32"), group="a") for n in range(8)]
    assert shapes([*group, row(90)], 120, attention=1.0) == [[90], [61] * 8]


@given(
    groups=st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 10), min_size=1, max_size=6)), max_size=6),
    budget=st.integers(8, 80),
)
def test_the_rows_of_a_group_stay_together_as_far_as_they_fit(groups: list[tuple[int, list[int]]], budget: int) -> None:
    rows = [
        replace(row(prompt + answer), group=str(g), token_ids=np.repeat([g, 100 + n], [prompt, answer]).astype("int32"))
        for g, (prompt, answers) in enumerate(groups)
        for n, answer in enumerate(answers)
    ]
    found = micro_batches(rows, budget, CPU)
    assert sorted(name for micro in found for name in micro.groups) == sorted(each.group for each in rows)
    for micro in found:
        assert len(micro.packing.computed) <= budget or len(micro.lengths) == 1
    for g, (prompt, answers) in enumerate(groups):
        if prompt + sum(answers) + len(answers) * prompt // 16 <= budget:
            assert sum(str(g) in micro.groups for micro in found) == 1


@given(lengths, st.integers(1, 60), st.booleans())
def test_the_sides_of_a_pair_stay_together(sizes: list[int], budget: int, padded: bool) -> None:
    rows = [row(n, pair=number, chosen=side) for number, n in enumerate(sizes) for side in (True, False)]
    for micro in micro_batches(rows, budget, CPU, padded=padded):
        assert micro.tokens.pairs is not None and 2 * micro.tokens.pairs.shape[1] == len(micro.lengths)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(9, 20))
def test_no_other_grouping_of_padded_rows_needs_fewer_passes(sizes: list[int], budget: int) -> None:
    def passes(order: tuple[int, ...]) -> int:
        """Filling one after the other in this order: over all orders, the fewest there can be."""
        count, held = 1, [order[0]]
        for size in order[1:]:
            if (len(held) + 1) * max(*held, size) > budget:
                count, held = count + 1, []
            held.append(size)
        return count

    best = min(passes(order) for order in permutations(sizes))
    assert len(shapes([row(n) for n in sizes], budget, padded=True)) == best


def group_of_two() -> tuple[pa.RecordBatch, BlockRows]:
    """A group of two answers in two turns, the second cut for its length."""
    mask = np.array([0, 1, 0, 1, 1], np.uint8)
    base = Experience("g/0", "g", "t", np.arange(5, dtype=np.int32), 1, mask, np.zeros(5, np.float32), reward=1.0)
    right, wrong = ({"right": value, "form": 0.0} for value in (1.0, 0.0))
    rewards = {"turn_reward_0": 0.5, "token_reward_3": 0.25}
    rows = [
        replace(base, reward_components=right, metrics=rewards, stop_reason="stop"),
        replace(base, experience_id="g/1", reward_components=wrong, stop_reason="length"),
    ]
    groups = np.array([[0, 2], [0, 2]])
    return to_batch(rows), BlockRows(None, np.array([1, 0]), groups, np.ones(2, np.float32), np.zeros(2, bool))  # type: ignore[arg-type]


def test_components_of_rewards_come_from_the_lease_to_the_advantages() -> None:
    rows = read_rows(*group_of_two(), build("gdpo"))
    assert [float(each.advantages[1]) for each in rows] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    with pytest.raises(DataError, match="has no speed"):
        read_rows(*group_of_two(), build("gdpo", {"reward_components": {"speed": 1.0}}))


def test_every_row_of_a_block_has_the_advantage_of_its_place_in_its_group() -> None:
    base, _ = group_of_two()
    [row, _] = from_batch(base)
    given = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    rows = [
        replace(row, experience_id=f"{place // 3}/{place % 3}", group_id=str(place // 3), reward=reward)
        for place, reward in enumerate(given)
    ]
    indices, groups = np.array([5, 0, 4, 1, 3, 2]), np.array([[3, 3], [0, 3], [3, 3], [0, 3], [3, 3], [0, 3]])
    part = BlockRows(None, indices, groups, np.ones(6, np.float32), np.zeros(6, bool))  # type: ignore[arg-type]
    found = read_rows(to_batch(rows), part, build("dr_grpo"))
    expected = [given[place] - 1 / 3 for place in indices]
    for token in (1, 3, 4):
        assert [float(each.advantages[token]) for each in found] == pytest.approx(expected)


def test_what_a_critics_advantages_need_comes_from_the_lease_to_the_micro_batch() -> None:
    cut, whole = read_rows(*group_of_two(), build("ppo"))
    assert (cut.truncated, whole.truncated) == (True, False) and cut.turn_rewards is None
    assert whole.turn_rewards is not None and whole.turn_rewards.tolist() == [0, 0.5, 0, 0.25, 0]
    for each in ([cut, whole], [whole, cut]):
        [micro] = micro_batches(each, 100, CPU)
        assert micro.tokens.turn_rewards is not None and micro.tokens.truncated is not None
        first = micro.tokens.truncated.tolist().index(True)
        by_row = micro.tokens.turn_rewards.view(2, 5).tolist()
        assert (by_row[first], by_row[1 - first]) == ([0.0] * 5, [0, 0.5, 0, 0.25, 0])
        # gamma and lambda 1, without values: what is still to come, the row's own reward of 1 at its end.
        filled = build("ppo").token_advantages(replace(micro.tokens, values=torch.zeros(10)))
        to_go = filled.advantages.view(2, 5).tolist()
        assert to_go[1 - first] == [0, 1.75, 0, 1.25, 1.0] and to_go[first] == [0, 1, 0, 1, 1]
    [micro] = micro_batches([cut], 100, CPU)
    assert micro.tokens.turn_rewards is None
    assert all(each.turn_rewards is None for each in read_rows(*group_of_two(), build("grpo"))), "it needs none"


def moved_kto() -> Learner:
    """A learner whose policy has moved away from its reference."""
    learner = make_learner("kto", {"beta": 1.0, "undesirable_weight": 1.5})
    move(learner.policy.model.model.layers, 0.05)
    return learner


def test_the_kl_is_the_mean_over_prompts_with_the_answers_of_others_and_at_least_0() -> None:
    learner, rows = moved_kto(), labelled()
    [batch] = learner.compute_old_logprobs(learner.make_micro_batches([rows]), [rows])
    [found] = {float(point) for micro in batch for point in micro.tokens.reference_kl.tolist()}  # type: ignore[union-attr]
    assert learner.reference is not None
    gains = []
    for other in mismatched(rows, rows):
        ids, actions = other.token_ids.tolist(), other.mask[1:].astype(bool)
        [ours] = learner.score([ids])
        with learner.reference.active():
            [theirs] = learner.score([ids])
        gains.append(float((np.array(ours) - np.array(theirs))[actions].sum()))
    assert found == pytest.approx(max(0.0, float(np.mean(gains))), abs=1e-5)
    assert np.mean(gains) != 0.0
    start = make_learner("kto")
    [first] = start.compute_old_logprobs(start.make_micro_batches([rows]), [rows])
    assert all(float(micro.tokens.reference_kl.abs().max()) < 1e-9 for micro in first)  # type: ignore[union-attr]


def test_every_prompt_gets_the_answer_of_another_row_whatever_the_order() -> None:
    rows = labelled()
    found = mismatched(rows, rows)
    answers = {row.token_ids[int(row.mask.argmax()) :].tobytes(): number for number, row in enumerate(rows)}
    given = [answers[row.token_ids[int(row.mask.argmax()) :].tobytes()] for row in found]
    assert sorted(given) == list(range(len(rows))) and all(other != number for number, other in enumerate(given))
    for row, other in zip(rows, found, strict=True):
        start = int(row.mask.argmax())
        assert other.token_ids[:start].tolist() == row.token_ids[:start].tolist() and not other.mask[:start].any()
    again = mismatched(rows[5:], rows[::-1])
    assert [row.token_ids.tolist() for row in again] == [row.token_ids.tolist() for row in found[5:]]


@pytest.mark.parametrize(
    ("counts", "left"), [((4, 4), 8), ((1,) * 5, 5), ((3, 2, 1), 6), ((5, 2, 1), 6), ((6,), 0), ((1,), 0)]
)
def test_no_prompt_gets_an_answer_of_its_own(counts: tuple[int, ...], left: int) -> None:
    prompts = [prompt for prompt, count in enumerate(counts) for _ in range(count)]
    zeros, mask = np.zeros(4, np.float32), np.array([0, 0, 1, 1], np.uint8)
    rows = [
        TrainRow(np.array([9, prompt, prompt, answer], np.int32), mask, zeros, zeros, expert=True)
        for answer, prompt in enumerate(prompts)
    ]
    found = mismatched(rows, rows[::-1])
    assert len(found) == left and all(prompt != own for _, prompt, own, _ in (row.token_ids for row in found))


def test_answers_to_one_prompt_are_compared_with_a_kl_of_0() -> None:
    zeros, mask = np.zeros(4, np.float32), np.array([0, 0, 1, 1], np.uint8)
    rows = [TrainRow(np.array([3, 4, 5, answer], np.int32), mask, zeros, zeros, expert=True) for answer in range(3)]
    assert moved_kto().step([rows]).metrics.reference_kl == 0.0


def test_good_answers_become_likelier_and_bad_ones_less() -> None:
    learner, rows = make_learner("kto", {"beta": 1.0}), labelled()

    def likelihood(good: bool) -> float:
        scores = learner.score([row.token_ids.tolist() for row in rows if row.chosen == good])
        masks = [row.mask[1:] for row in rows if row.chosen == good]
        return float(np.mean([np.dot(score, mask) for score, mask in zip(scores, masks, strict=True)]))

    before = likelihood(True), likelihood(False)
    first = learner.step([rows]).metrics
    assert first.loss == first.preference_loss == pytest.approx(0.5, abs=1e-6)
    # The policy is its reference before the first step.
    assert [first.good_score, first.bad_score, first.reference_kl] == pytest.approx([0.0] * 3, abs=1e-6)
    assert (first.good_logprob, first.bad_logprob) == pytest.approx(before, abs=1e-4)
    for _ in range(3):
        learner.step([rows])
    earlier = likelihood(True), likelihood(False)
    last = learner.step([rows]).metrics
    assert (last.good_logprob, last.bad_logprob) == pytest.approx(earlier, abs=1e-4)
    assert last.good_score == pytest.approx(earlier[0] - before[0], abs=1e-4) and last.good_score > 0
    assert last.bad_score == pytest.approx(earlier[1] - before[1], abs=1e-4) and last.bad_score < 0
    assert last.label_margin == pytest.approx(last.good_score - last.bad_score)
    only_good = learner.step([[row for row in rows if row.chosen]]).metrics
    assert only_good.bad_score == only_good.bad_logprob == only_good.label_margin == 0.0 < only_good.good_score
    assert last.loss < 0.45 and likelihood(True) > before[0] and likelihood(False) < before[1]
