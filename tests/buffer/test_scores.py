"""What groups are worth, against the definition written as a loop, and with everything that can be missing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrft.buffer.scores import check_scores, scores
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Experience, to_batch
from tests.buffer.rows import group
from tests.errors import about


def row(reward: float | None = None, priority: float | None = None) -> Experience:
    return group(1, 1)[0].with_fields(reward=reward, priority=priority)


def score(name: str, *groups: list[Experience]) -> list[float]:
    starts = np.cumsum([0, *(len(group) for group in groups[:-1])])
    values = scores.get(name)(to_batch([each for group in groups for each in group]), starts)
    assert values.dtype == np.float64
    return values.tolist()


def rewarded(*rewards: float | None) -> list[Experience]:
    return [row(reward=reward) for reward in rewards]


def test_a_priority_is_the_mean_of_what_operators_gave_and_0_where_they_gave_none() -> None:
    groups = [row(priority=0.25), row(priority=None), row(priority=0.75)], rewarded(1, 0), [row(priority=3.0)]
    assert score("priority", *groups) == [0.5, 0.0, 3.0]


def test_a_group_that_no_critic_looked_at_has_a_td_error_of_1() -> None:
    assert score("td_error", rewarded(0, 5), rewarded(None)) == [1.0, 1.0]


@settings(deadline=None, max_examples=50)
@given(
    groups=st.lists(
        st.lists(st.one_of(st.none(), st.floats(-2, 2, width=32)), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    cut=st.integers(0, 3),
)
def test_vectorised_scores_equal_loops_also_on_a_slice(groups: list, cut: int) -> None:
    rows, expected = [], {"reward_deviation": [], "failure": []}
    for each in groups:
        rewards = [reward for reward in each if reward is not None]
        rows += rewarded(*each)
        expected["reward_deviation"].append(np.std(rewards) if rewards else 0.0)
        expected["failure"].append(np.clip(1 - np.mean(rewards), 0, 1) if rewards else 0.0)
    batch = to_batch([row(reward=5.0)] * cut + rows).slice(cut)
    starts = np.cumsum([0, *(len(each) for each in groups[:-1])])
    for name, values in expected.items():
        np.testing.assert_allclose(scores.get(name)(batch, starts), values, atol=1e-6)


def by_row(batch: pa.RecordBatch, starts: np.ndarray) -> np.ndarray:
    return np.ones(batch.num_rows)


def infinite(batch: pa.RecordBatch, starts: np.ndarray) -> np.ndarray:
    return np.full(len(starts), np.inf)


def whole(batch: pa.RecordBatch, starts: np.ndarray) -> np.ndarray:
    return np.diff(starts, append=batch.num_rows)


def test_an_own_function_is_found_by_its_path() -> None:
    assert score(f"{__name__}:whole", rewarded(1, 2), rewarded(1)) == [2.0, 1.0]


@pytest.mark.parametrize(("name", "found"), [("infinite", "inf"), ("by_row", r"\(3,\)")])
def test_what_is_wrong_with_an_own_function_is_said_with_its_name(name: str, found: str) -> None:
    with pytest.raises(DataError, match=f"buffer.sampler.score: .*{__name__}:{name}.*found {found}"):
        score(f"{__name__}:{name}", rewarded(1, 2), rewarded(1))


@pytest.mark.parametrize("bad", [-1e-9, np.nan, np.inf, -np.inf])
def test_one_bad_score_among_good_ones_is_refused(bad: float) -> None:
    check_scores(np.zeros(0), "nobody")
    check_scores(np.array([0.0, 1e308]), "somebody")
    with pytest.raises(DataError, match="somebody", check=about("buffer.sampler.score")):
        check_scores(np.array([1.0, bad, 2.0]), "somebody")


def test_an_unknown_score_names_the_nearest() -> None:
    with pytest.raises(ConfigError, check=about("buffer.sampler.score", "reward_deviations")):
        scores.get("reward_deviations", "buffer.sampler.score")
