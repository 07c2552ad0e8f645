"""PPO and DPO learn, from three seeds."""

from __future__ import annotations

from pathlib import Path

from tests.forks import FORKS
from tests.trainer.learning import lesson


def test_ppo_and_dpo_better_a_small_model_by_a_margin_from_three_seeds(tmp_path: Path) -> None:
    folders = [tmp_path / str(seed) for seed in range(3)]
    with FORKS.Pool(3) as pool:
        scores = pool.starmap(lesson, enumerate(folders), chunksize=1)
    assert all(each["start"] < 0.4 for each in scores), scores
    assert all(each["ppo"] > each["start"] + 0.15 for each in scores), scores
    assert all(each["dpo"] > each["start"] + 0.1 for each in scores), scores
