"""KTO: the KL that labelled answers are compared with is that of the step, however the step is divided."""

from __future__ import annotations

import numpy as np
import pytest

from rayrft.trainer.batches import TrainRow, mismatched
from rayrft.trainer.learner import Learner
from tests.trainer.learners import labelled, make_learner, move


def moved() -> Learner:
    """A learner whose policy has moved away from its reference."""
    learner = make_learner("kto", {"beta": 1.0, "undesirable_weight": 1.5})
    move(learner.policy.model.model.layers, 0.05)
    return learner


def test_the_kl_is_the_mean_over_prompts_with_the_answers_of_others_and_at_least_0() -> None:
    learner, rows = moved(), labelled()
    [batch] = learner._compute_old_logprobs(learner._make_micro_batches([rows]), [rows])
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
    [first] = start._compute_old_logprobs(start._make_micro_batches([rows]), [rows])
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
    assert moved().step([rows]).metrics.reference_kl == 0.0


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
