"""The weight sync's judgement, with scripted engines: what it accepts, what it stops, and that engines resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayrft.config.trainer import WeightSyncConfig
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import WeightSyncError
from rayrft.explorer.engine import EngineWeights
from rayrft.trainer.commands import Describe, Publish, Score
from rayrft.weights.parcel import Parcel, TensorMeta
from tests.scripted import Remote


class ScriptedEngine:
    def __init__(self, digest: str = "abc", version_offset: int = 0, scores: float = -1.0, hang: bool = False) -> None:
        self.digest, self.version_offset, self.scores, self.hang = digest, version_offset, scores, hang
        self.calls: list[str] = []

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def receive(self, parcel: Any, size: int, version: int, handles: Any) -> EngineWeights:
        self.calls.append("receive")
        if self.hang:
            await asyncio.Event().wait()
        return EngineWeights(version + self.version_offset, (self.digest,))

    async def score(self, sequence: list[int], images: tuple[str, ...]) -> list[float]:
        self.calls.append("score")
        return [self.scores] * (len(sequence) - 1)


class ScriptedTrainer:
    async def command(self, command: Any) -> list[Any]:
        match command:
            case Describe():
                return [Parcel([TensorMeta("w", "float32", (4,))])]
            case Publish():
                return ["abc"]
            case Score(sequences):
                return [[[-1.0] * (len(s) - 1) for s in sequences]]
        raise AssertionError(command)


def make_sync(*engines: ScriptedEngine, **config: Any) -> WeightSync:
    sync = WeightSync(
        WeightSyncConfig(**config),
        "gloo",
        Remote(ScriptedTrainer()),
        [Remote(engine) for engine in engines],
        1,
        [[1, 2, 3]],
    )
    sync._parcel = Parcel([TensorMeta("w", "float32", (4,))])
    return sync


async def test_a_round_pauses_receives_and_resumes_every_engine() -> None:
    engines = ScriptedEngine(), ScriptedEngine()
    report = await make_sync(*engines).publish(3)
    assert (report.version, report.digest, report.nbytes) == (3, "abc", 16)
    for engine in engines:
        assert engine.calls == ["pause", "receive", "resume", "score"]


async def test_the_probe_runs_at_the_first_round_and_at_every_nth() -> None:
    sync = make_sync(ScriptedEngine(), probe_every=3)
    gaps = [(await sync.publish(version)).probe_gap for version in range(7)]
    assert [gap is not None for gap in gaps] == [True, False, False, True, False, False, True]


async def test_another_digest_stops_the_run_and_engines_resume() -> None:
    engines = ScriptedEngine(), ScriptedEngine(digest="xyz")
    with pytest.raises(
        WeightSyncError, match=r"engine-1: the trainer sent version 3 with digest abc.*version 3 with xyz"
    ):
        await make_sync(*engines).publish(3)
    assert all(engine.calls[-1] == "resume" for engine in engines)


async def test_another_version_stops_the_run() -> None:
    with pytest.raises(WeightSyncError, match=r"sent version 3 .* reports version 2"):
        await make_sync(ScriptedEngine(version_offset=-1)).publish(3)


async def test_log_probs_that_differ_stop_the_run_with_both_numbers() -> None:
    with pytest.raises(
        WeightSyncError, match=r"log-prob -1\.500000, the trainer -1\.000000: 0\.5 apart, more than 0\.0001"
    ):
        await make_sync(ScriptedEngine(scores=-1.5)).publish(3)


async def test_log_probs_that_are_not_numbers_stop_the_run() -> None:
    with pytest.raises(WeightSyncError, match="log-prob nan"):
        await make_sync(ScriptedEngine(scores=float("nan"))).publish(3)


async def test_an_engine_that_hangs_ends_the_run_at_the_deadline_and_the_others_resume() -> None:
    fine, hung = ScriptedEngine(), ScriptedEngine(hang=True)
    with pytest.raises(WeightSyncError, match=r"waited 0\.2 s for weights of version 3 to reach 2 engines"):
        await make_sync(fine, hung, deadline_s=0.2).publish(3)
    assert fine.calls[-1] == "resume"
