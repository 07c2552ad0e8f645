"""Every preset trains."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from rayrft.algorithms import build, presets
from rayrft.trainer.batches import TrainRow
from tests.trainer.test_learner import make_rows
from tests.trainer.test_updates import make_learner, on_policy, own_rows, pairs, weights


@pytest.mark.parametrize("name", presets)
def test_two_steps_of_every_preset_move_the_policy_and_stay_finite(name: str) -> None:
    algorithm, learner = build(name), make_learner(name)
    rows: list[TrainRow] = pairs() if "pairs" in algorithm.needs else []
    if "expert" in algorithm.needs:
        rows += [row for row in make_rows() if row.expert]
    if "rollouts" in algorithm.needs:
        rows += [replace(row, reward=number / 10) for number, row in enumerate(on_policy(learner, own_rows()))]
    before = weights(learner)
    results = [learner.step([rows]).metrics for _ in range(2)]
    numbers = [value for result in results for value in asdict(result).values()]
    assert all(map(math.isfinite, numbers))
    assert results[0].grad_norm > 0 and results[0].loss != results[1].loss
    assert not torch.equal(before, weights(learner))
