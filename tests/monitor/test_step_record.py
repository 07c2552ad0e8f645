"""At a stage's first step the policy is the one that sampled, and the reference; what says otherwise is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayrft.buffer.events import GroupReport
from rayrft.buffer.ledger import Ledger
from rayrft.errors import WeightSyncError
from rayrft.explorer.explorer import Timings
from rayrft.monitor.records import StepRecord
from rayrft.monitor.verdict import check_gap, check_on_policy_step
from rayrft.trainer.result import FirstUpdate
from tests.errors import about
from tests.monitor.made import lease, result


@pytest.mark.parametrize(("explores", "reward", "rate"), [(True, 0.75, 50.0), (False, 0.25, 5.0)])
def test_the_reward_of_a_run_that_does_not_explore_is_that_of_the_rows_it_trained(
    explores: bool, reward: float, rate: float
) -> None:
    results = [replace(result(), reward_sum=1.5, scored=5), replace(result(), reward_sum=0.5, scored=3)]
    seconds = {"step_s": 2.0, "wait_s": 1.0, "train_s": 1.0}
    for rollouts in (GroupReport(4, 3.0, 4, 100, 0), GroupReport()):
        leased = lease(0, rollouts=rollouts)
        record = StepRecord.of("s", 1, leased, results, None, Timings(), {}, **seconds, explores=explores)
        assert record.reward == (reward if rollouts.rows or not explores else None)
        assert record.tokens_per_s == (rate if rollouts.rows else 5.0)


@pytest.mark.parametrize(
    ("changes", "staleness", "message"),
    [
        ({}, (0, 0), None),
        ({"first_update": FirstUpdate(0.0, 0.06)}, (0, 0), "clips the ratio on 6% of the tokens"),
        ({"first_update": FirstUpdate(0.0, 0.06)}, (0, 1), None),
        ({"clip_fraction": 0.5}, (0, 0), None),  # in later updates the policy has moved
        ({"first_update": FirstUpdate(0.3, 0.0)}, (0, 1), "KL to the reference is 0.3 and not 0"),
        ({"first_update": FirstUpdate(-0.3, 0.0)}, (), "KL to the reference is -0.3"),
        ({"kl": 0.3}, (0, 0), None),
    ],
)
def test_a_first_step_is_doubted_where_policies_differ_that_must_not(
    changes: dict[str, Any], staleness: tuple[int, ...], message: str | None
) -> None:
    doubt = check_on_policy_step(lease(*staleness), result(**changes), 1e-4)
    assert doubt is None if message is None else doubt is not None and message in doubt


@pytest.mark.parametrize(
    ("gap", "staleness", "ends", "found"),
    [
        (1e-4, (0, 0), True, None),
        (2e-4, (0, 0), True, "warns"),
        (4e-4, (0, 0), True, "ends"),
        (float("nan"), (0, 0), True, "ends"),
        (4e-4, (0, 0), False, "warns"),
        (4e-4, (0, 1), True, None),  # sampled by an earlier policy
        (4e-4, (), True, None),  # no usual rows
    ],
)
def test_engines_whose_fresh_rows_the_trainer_does_not_recognise_end_the_run(
    gap: float, staleness: tuple[int, ...], ends: bool, found: str | None
) -> None:
    if found == "ends":
        with pytest.raises(WeightSyncError, match=f"disagree by {gap:.2g} nats", check=about("weight_sync.tolerance")):
            check_gap(lease(*staleness), result(logprob_gap=gap), 1e-4, ends=ends)
    else:
        warning = check_gap(lease(*staleness), result(logprob_gap=gap), 1e-4, ends=ends)
        assert (warning is not None) == (found == "warns")


def test_what_is_lost_is_counted_from_one_state_of_the_ledger_to_the_next() -> None:
    before = Ledger(dropped={"late": 2, "timeout": 1}, dropped_tasks={"prompt_too_long": 1})
    dropped_tasks = {"prompt_too_long": 1, "workflow_error": 2}
    after = Ledger(dropped={"late": 5, "timeout": 1}, dropped_tasks=dropped_tasks)
    assert after.lost_since(before) == {"late": 3, "workflow_error": 2}
    assert before.lost_since(Ledger()) == {"late": 2, "timeout": 1, "prompt_too_long": 1}
