"""PPO and DPO learn, from whatever seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import FORKS
from tests.trainer.learning import lesson


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ppo_and_dpo_better_a_small_model_by_a_margin(tmp_path: Path, seeds: int) -> None:
    folders = [tmp_path / str(seed) for seed in range(seeds)]
    with FORKS.Pool(seeds) as pool:
        scores = pool.starmap(lesson, enumerate(folders), chunksize=1)
    assert all(each["start"] < 0.4 for each in scores), scores
    assert all(each["ppo"] > each["start"] + 0.15 for each in scores), scores
    # What DPO gains differs by 0.05 and more with the pairs that happen to be sampled: the mean of the seeds counts.
    gains = [each["dpo"] - each["start"] for each in scores]
    assert min(gains) > 0 and sum(gains) / seeds > 0.15, scores
