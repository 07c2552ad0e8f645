"""A whole run in one process, in simulated time, whose ranks fail on a batch: on its numbers, or for want of memory."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from rayrft.buffer.leases import Lease
from rayrft.core.preflight import PreparedRun
from rayrft.errors import NotFinite, OutOfMemory
from rayrft.monitor.records import NoteRecord, RestartRecord, read_records
from rayrft.trainer.api import RankSetup
from tests.chaos.kills import Outcome, describe, simulate


class Spoiled:
    """The first batches of some steps have no finite loss: so many of them, by step."""

    def __init__(self, batches: dict[int, int]) -> None:
        self._batches, self.rows = batches, defaultdict[int, dict[int, int]](dict)
        """Rows of these batches, by step and draw."""

    def __call__(self, setup: RankSetup, lease: Lease) -> None:
        rows = self.rows[lease.step]
        if lease.draw not in rows and len(rows) < self._batches.get(lease.step, 0):
            rows[lease.draw] = lease.usual_rows
        if lease.draw in rows:
            raise NotFinite("the loss is not finite", "lower lr", field="trainer", value={"draw": lease.draw})


def texts(outcome: Outcome) -> list[str]:
    """Notes and causes of restarts, in their order."""
    records = read_records(outcome.folder)
    return [each.text for each in records if isinstance(each, NoteRecord)] + [
        each.cause for each in records if isinstance(each, RestartRecord)
    ]


ROLLS_BACK = {"trainer.not_finite": "rollback", "trainer.rollbacks": 3}


@pytest.mark.parametrize("seed", [30, 31, 32], ids=["synchronous", "two steps off", "one step off"])
def test_a_run_rolls_back_and_drops_batches_that_are_not_finite(
    seed: int, prepared: PreparedRun, tmp_path: Path
) -> None:
    spoiled = Spoiled({4: 1, 7: 2})
    outcome = simulate(seed, 0, prepared, tmp_path, check=spoiled, **ROLLS_BACK)
    assert not outcome.problems, describe(outcome)
    assert outcome.summary is not None and outcome.summary.ledger is not None
    dropped = outcome.summary.ledger.dropped["not_finite"]
    assert dropped == sum(sum(rows.values()) for rows in spoiled.rows.values()) > 0
    assert outcome.summary.restarts["trainer"].count == 3
    assert sum("rollback 3 of at most 3" in text for text in texts(outcome)) == 2, "a note, and the restart"


def test_one_rollback_more_than_allowed_ends_the_run_with_the_cause(prepared: PreparedRun, tmp_path: Path) -> None:
    outcome = simulate(30, 0, prepared, tmp_path, check=Spoiled({4: 9}), **ROLLS_BACK)
    assert isinstance(outcome.error, NotFinite) and "draw" in outcome.error.value and outcome.error.remedy
    assert sum("rollback" in text for text in texts(outcome)) == 6


def test_by_default_the_first_loss_that_is_not_finite_ends_the_run(prepared: PreparedRun, tmp_path: Path) -> None:
    outcome = simulate(30, 0, prepared, tmp_path, check=Spoiled({4: 1}))
    assert isinstance(outcome.error, NotFinite) and not any("rollback" in text for text in texts(outcome))


class Crowded:
    """A batch needs more memory than there is, with more tokens in a micro-batch than ``fits``."""

    def __init__(self, fits: int) -> None:
        self._fits = fits

    def __call__(self, setup: RankSetup, lease: Lease) -> None:
        if lease.step == 5 and setup.config.micro_batch_tokens > self._fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_ranks_that_run_out_of_memory_continue_with_half_the_tokens_in_a_micro_batch(
    prepared: PreparedRun, tmp_path: Path
) -> None:
    outcome = simulate(30, 0, prepared, tmp_path, check=Crowded(4096))
    assert not outcome.problems, describe(outcome)
    assert sum("micro_batch_tokens is 4096 from now on, not 8192" in text for text in texts(outcome)) == 2


def test_ranks_that_run_out_of_memory_again_end_the_run_with_the_remedy(prepared: PreparedRun, tmp_path: Path) -> None:
    outcome = simulate(30, 0, prepared, tmp_path, check=Crowded(1024))
    assert isinstance(outcome.error, OutOfMemory) and outcome.error.value == "the node"
    assert "lower trainer.micro_batch_tokens (4096)" in outcome.error.remedy
