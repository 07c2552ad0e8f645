"""PPO, DPO and a reward model learn, from whatever seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.forks import FORKS
from tests.trainer import learned_reward
from tests.trainer.learning import lesson


@pytest.mark.parametrize(("seeds", "steps", "prompts"), [(1, 15, 16), pytest.param(3, 20, 24, marks=pytest.mark.slow)])
def test_ppo_and_dpo_better_a_small_model_by_a_margin(tmp_path: Path, seeds: int, steps: int, prompts: int) -> None:
    given = [(seed, tmp_path / str(seed), steps, prompts) for seed in range(seeds)]
    with FORKS.Pool(seeds) as pool:
        scores = pool.starmap(lesson, given, chunksize=1)
    assert all(each["start"] < 0.4 for each in scores), scores
    assert all(each["ppo"] > each["start"] + 0.15 for each in scores), scores
    # What DPO gains differs by 0.05 and more with the pairs that happen to be sampled: the mean of the seeds counts.
    gains = [each["dpo"] - each["start"] for each in scores]
    assert min(gains) > 0 and sum(gains) / seeds > 0.15, scores


@pytest.mark.slow
def test_a_policy_gets_better_by_a_learned_reward_until_it_is_over_optimised(tmp_path: Path) -> None:
    folders = [(seed, tmp_path / str(seed), 20) for seed in range(3)]
    with FORKS.Pool(2) as pool:
        found = pool.starmap(learned_reward.lesson, folders, chunksize=1)
    for accuracy, curves in found:
        learned, true, untrained = (curves[name] for name in ("learned", "true", "untrained"))
        assert accuracy > 0.75, accuracy
        assert max(learned.true) > learned.true[0] + 1.0, learned
        assert true.true[-1] > true.true[0] + 1.0, true
        assert max(untrained.true) < untrained.true[0] + 0.5, untrained
        # The scores rise still, and what they stand for does no more.
        assert learned.reward[-1] > learned.reward[2] and learned.true[-1] < max(learned.true) - 0.2, learned
        assert true.true[-1] > max(true.true) - 0.3, true
