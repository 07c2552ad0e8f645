"""Numbers and units mean the same to all rewards that read them."""

from __future__ import annotations

import pytest

from rayrft.experience import Task
from rayrft.rewards import build_reward
from tests.rewards.scored import score


def value(reward: str, kind: str, answer: str, said: str) -> float | None:
    return score(build_reward(reward, {}), Task.create("test", "question", answer, metadata={"kind": kind}), said).value


@pytest.mark.parametrize(
    ("number", "said"),
    [
        *((5_000_000, "5 million"), (5_000_000, "5百万"), (500_000, "5 hundred thousand"), (30_000, "3万个")),
        *((60, "5 dozen"), (5, "5千克"), (500, "5百米"), (5, "5 kg")),
    ],
)
def test_a_magnitude_is_the_same_in_math_school_and_pictures(number: int, said: str) -> None:
    for reward, kind in (("math", ""), ("k12", "number"), ("vision", "count")):
        assert value(reward, kind, str(number), said) == 1.0, reward
        assert value(reward, kind, str(2 * number), said) == 0.0, reward


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        *(("25 °C", "77 °F", True), ("25 °C", "25 degrees Celsius", True), ("5元", "50角", True)),
        *(
            ("5 dollars", "5美元", True),
            ("£5", "5 pounds", True),
            ("£5", "5 dollars", False),
            ("1 nm", "1e-12 km", True),
        ),
        *(("-5", "minus 5", True), ("1.5", "1又1/2", True), ("5 kg", "5百 g", False)),
    ],
)
def test_units_and_forms_of_numbers_are_the_same_in_math_and_school(answer: str, said: str, right: bool) -> None:
    for reward, kind in (("math", ""), ("k12", "number")):
        assert value(reward, kind, answer, said) == float(right), reward
