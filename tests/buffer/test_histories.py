"""Histories in which calls are repeated, late and out of order, and processes die at any moment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.leases import Leasing
from tests.buffer.simulation import run_history


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 10_000), marks=pytest.mark.slow)], ids=len)
def test_whoever_waits_gets_an_answer_and_no_group_is_lost_or_trained_twice(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        with monkeypatch.context() as patch:
            try:
                run_history(seed, tmp_path / "log", patch)
            except Exception as error:
                raise AssertionError(f"history of seed {seed}") from error
        shutil.rmtree(tmp_path / "log")


def forget_requests(patch: pytest.MonkeyPatch) -> None:
    """A request for tickets that comes after a later one is taken for a new one."""

    async def admit(self: Buffer, producer: str, call: int, count: int, real: Any = Buffer.admit) -> Any:
        calls = self.state.feeds[""].calls
        if producer in calls and calls[producer][0] > call:
            del calls[producer]
        return await real(self, producer, call, count)

    patch.setattr(Buffer, "admit", admit)


def take_back_any_lease(patch: pytest.MonkeyPatch) -> None:
    """A lease is given back whichever of its step was meant."""

    async def requeue(self: Buffer, step: int, draw: int, real: Any = Buffer.requeue) -> None:
        record = self.state.training.leases.get(step)
        await real(self, step, draw if record is None else record.draw)

    patch.setattr(Buffer, "requeue", requeue)


def wait_for_repeated_weights(patch: pytest.MonkeyPatch) -> None:
    """A new step does not say that those before it were repeated."""

    async def following(self: Leasing, step: int, deadline_s: float, real: Any = Leasing._next) -> Any:
        training = self._store.state.training
        if training.replaying:
            await self._store.wait_for(lambda: not training.replaying, deadline_s)
        return await real(self, step, deadline_s)

    patch.setattr(Leasing, "_next", following)


def open_any_stage(patch: pytest.MonkeyPatch) -> None:
    """A stage that was opened and closed is opened again."""

    async def open_stage(self: Buffer, plan: Any, real: Any = Buffer.open_stage) -> None:
        self.state.stage.opened.clear()
        await real(self, plan)

    patch.setattr(Buffer, "open_stage", open_stage)


@pytest.mark.parametrize(
    ("fault", "first"),
    [(forget_requests, 0), (take_back_any_lease, 5), (open_any_stage, 22), (wait_for_repeated_weights, 52)],
)
def test_the_histories_find_what_they_are_there_for(
    fault: Callable[[pytest.MonkeyPatch], None], first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault makes an actor wait without end, or loses or doubles a group. A history at or after number
    ``first`` finds it."""
    fault(monkeypatch)

    def found(seed: int) -> bool:
        with monkeypatch.context() as patch:
            try:
                run_history(seed, tmp_path / str(seed), patch)
            except (AssertionError, RayTaskError):
                return True
        return False

    assert any(map(found, range(first, first + 100)))
