"""Numbers and units mean the same to all rewards that read them."""

from __future__ import annotations

import pytest

from tests.rewards.scored import pairs, result, right_and_wrong

COUNTS = """
5000000  5 million  5百万
500000   5 hundred thousand
30000    3万个
60       5 dozen
5        5千克  5 kg
500      5百米
"""


@pytest.mark.parametrize(("number", "said"), pairs(COUNTS))
def test_a_magnitude_is_the_same_in_math_school_and_pictures(number: str, said: str) -> None:
    for reward, kind in (("math", ""), ("k12", "number"), ("vision", "count")):
        assert result(reward, number, said, kind=kind).value == 1.0, reward
        assert result(reward, str(2 * int(number)), said, kind=kind).value == 0.0, reward


QUANTITIES = """
25 °C      77 °F  25 degrees Celsius
5元        50角
5 dollars  5美元
£5         5 pounds  ≠  5 dollars
1 nm       1e-12 km
-5         minus 5
1.5        1又1/2
5 kg       ≠  5百 g
"""


@pytest.mark.parametrize(("answer", "said", "right"), right_and_wrong(QUANTITIES))
def test_units_and_forms_of_numbers_are_the_same_in_math_and_school(answer: str, said: str, right: bool) -> None:
    for reward, kind in (("math", ""), ("k12", "number")):
        assert result(reward, answer, said, kind=kind).value == float(right), reward
