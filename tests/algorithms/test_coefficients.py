"""Coefficients that follow a target, over the steps of a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayrft.algorithms import Coefficients, build

PIECES = {"kl": "k3", "kl_coef": 0.1, "kl_target": 0.02, "kl_horizon": 100.0, "entropy": "bonus"}
ALGORITHM = build("grpo", {**PIECES, "entropy_coef": 0.01, "entropy_goal": 0.5, "entropy_step": 0.004})


def test_coefficients_begin_as_configured_and_follow_what_was_measured() -> None:
    start = Coefficients.of(ALGORITHM)
    assert start.applied(ALGORITHM) == ALGORITHM
    # The KL is over its target by more than 20 %: 0.1 (1 + 0.2 * 10 / 100). The entropy is below its goal: + 0.004.
    moved = start.update(kl=0.1, entropy=0.4, sequences=10).applied(ALGORITHM)
    assert (moved.kl_coef, moved.entropy_coef) == (pytest.approx(0.102), pytest.approx(0.014))
    assert replace(moved, kl_coef=0.1, entropy_coef=0.01) == ALGORITHM


def test_the_entropy_counts_only_while_it_is_below_its_goal() -> None:
    above = Coefficients.of(ALGORITHM).update(kl=0.02, entropy=0.6, sequences=10)
    assert above.applied(ALGORITHM).entropy_coef == 0.0 and "entropy" not in above.applied(ALGORITHM).terms
    again = above.update(kl=0.02, entropy=0.3, sequences=10)
    assert again.applied(ALGORITHM).entropy_coef == pytest.approx(0.01 - 0.004 + 0.004)


def test_a_step_without_own_rows_says_nothing() -> None:
    start = Coefficients.of(ALGORITHM)
    assert start.update(kl=0.0, entropy=0.0, sequences=0) == start


def test_fixed_coefficients_stay() -> None:
    fixed = build("grpo", {"kl": "k3", "entropy": "bonus"})
    assert Coefficients.of(fixed).update(kl=9.0, entropy=9.0, sequences=99).applied(fixed) == fixed


@pytest.mark.parametrize("algorithm", [ALGORITHM, build("grpo", PIECES), build("grpo")])
def test_what_a_checkpoint_keeps_is_all_there_is(algorithm: object) -> None:
    start = Coefficients.of(algorithm)  # type: ignore[arg-type]
    now = start.update(kl=0.5, entropy=0.7, sequences=10)
    restored = start.restored(now.state())
    assert restored.applied(ALGORITHM) == now.applied(ALGORITHM)
    follow = {"kl": 0.001, "entropy": 0.1, "sequences": 4}
    assert restored.update(**follow).applied(ALGORITHM) == now.update(**follow).applied(ALGORITHM)  # type: ignore[arg-type]
