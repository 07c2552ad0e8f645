"""Coefficients that follow a target, over the steps of a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayrft.algorithms import Coefficients, build

PIECES = {"kl": "k3", "kl_coef": 0.1, "kl_target": 0.02, "kl_horizon": 100.0, "entropy": "bonus"}
ALGORITHM = build("grpo", {**PIECES, "entropy_coef": 0.01, "entropy_goal": 0.5, "entropy_step": 0.004})


def test_coefficients_begin_as_configured_and_follow_what_was_measured() -> None:
    start = Coefficients.of(ALGORITHM)
    assert start.applied == ALGORITHM
    moved = start.update(kl=0.1, entropy=0.4, sequences=10).applied
    assert (moved.kl_coef, moved.entropy_coef) == (pytest.approx(0.102), pytest.approx(0.014))
    assert replace(moved, kl_coef=0.1, entropy_coef=0.01) == ALGORITHM


@pytest.mark.parametrize(
    ("kl", "sequences", "factor"),
    # 10 % over the target: 1 + 0.1 * 10 / 100. The error is cut at 20 %, and a step at most halves the coefficient.
    [(0.022, 10, 1.01), (0.2, 10, 1.02), (0.0, 10, 0.98), (0.0, 240, 0.52), (0.0, 250, 0.5), (0.0, 10_000, 0.5)],
)
def test_the_coefficient_of_the_kl_by_hand(kl: float, sequences: int, factor: float) -> None:
    found = Coefficients.of(ALGORITHM).update(kl=kl, entropy=0.4, sequences=sequences)
    assert found.applied.kl_coef == pytest.approx(0.1 * factor)


def test_the_entropy_counts_only_while_it_is_at_or_below_its_goal() -> None:
    state = Coefficients.of(ALGORITHM)
    # It shrinks by 0.004 at each step over the goal, not below 0, and grows again below it.
    for entropy, coef in ((0.6, 0.0), (0.5, 0.002), (0.6, 0.0), (0.6, 0.0), (0.3, 0.004)):
        state = state.update(kl=0.02, entropy=entropy, sequences=10)
        assert state.applied.entropy_coef == pytest.approx(coef)
        assert ("entropy" in state.applied.terms) == (coef > 0)


def test_a_step_without_own_rows_says_nothing() -> None:
    start = Coefficients.of(ALGORITHM)
    assert start.update(kl=0.0, entropy=0.0, sequences=0) == start


def test_fixed_coefficients_stay() -> None:
    fixed = build("grpo", {"kl": "k3", "entropy": "bonus"})
    assert Coefficients.of(fixed).update(kl=9.0, entropy=9.0, sequences=99).applied == fixed


@pytest.mark.parametrize("algorithm", [ALGORITHM, build("grpo", PIECES), build("grpo")])
def test_what_a_checkpoint_keeps_is_all_there_is(algorithm: object) -> None:
    start = Coefficients.of(algorithm)  # type: ignore[arg-type]
    now = start.update(kl=0.5, entropy=0.7, sequences=10)
    restored = start.restored(now.state())
    assert restored.applied == now.applied
    follow = {"kl": 0.001, "entropy": 0.1, "sequences": 4}
    assert restored.update(**follow).applied == now.update(**follow).applied  # type: ignore[arg-type]
