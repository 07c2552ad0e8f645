"""The weight sync's judgement, with scripted engines: what it accepts, what it stops, and that engines resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayrft.config.trainer import ProbeBounds, WeightSyncConfig
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import WeightSyncError
from rayrft.explorer.engine import EngineWeights
from rayrft.trainer.commands import Describe, Publish, Score
from rayrft.weights.messages import Parcel, TensorMeta
from tests.scripted import remote

TOKENS = 200
EXACT, ROUNDED = ProbeBounds(1e-4, 1e-4, 1.0), ProbeBounds(0.03, 0.2, 0.99)


class ScriptedEngine:
    def __init__(
        self, digest: str = "abc", version_offset: int = 0, scores: list[float] | None = None, hang: bool = False
    ) -> None:
        self.digest, self.version_offset, self.hang = digest, version_offset, hang
        self.scores = scores or [-1.0] * TOKENS
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
        return self.scores


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


def make_sync(*engines: ScriptedEngine, bounds: ProbeBounds = EXACT, **config: Any) -> WeightSync:
    sync = WeightSync(
        WeightSyncConfig(**config),
        "gloo",
        bounds,
        remote(ScriptedTrainer()),
        [remote(engine, f"engine-{index}") for index, engine in enumerate(engines)],
        1,
        [list(range(TOKENS + 1))],
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


def scores(**off: float) -> list[float]:
    """Those of the trainer, but for the first tokens: so many of them, ``few`` or ``many``, are off by that much, and
    ``all`` the others."""
    counts = [("few", 2), ("many", 3), ("all", TOKENS)]
    gaps = [off[name] for name, count in counts if name in off for _ in range(count)]
    return [-1.0 - gap for gap in (gaps + [0.0] * TOKENS)[:TOKENS]]


@pytest.mark.parametrize(
    ("bounds", "off", "largest"),
    [
        (EXACT, {"all": 5e-5}, 5e-5),
        (EXACT, {"few": 2e-4}, None),  # two tokens of 200
        (ROUNDED, {"few": 0.9, "all": 0.01}, 0.9),
        (ROUNDED, {"many": 0.3}, None),  # three, and the mean is 0.0045
        (ROUNDED, {"all": 0.04}, None),  # each a little: the mean says so
        (ROUNDED, {"few": float("nan")}, None),
        (EXACT, {"few": float("nan")}, None),
        (EXACT, {"few": float("inf")}, None),
    ],
)
async def test_log_probs_are_judged_by_mean_and_quantile_and_the_largest_gap_is_told(
    bounds: ProbeBounds, off: dict[str, float], largest: float | None
) -> None:
    sync = make_sync(ScriptedEngine(), ScriptedEngine(scores=scores(**off)), bounds=bounds)
    if largest is None:
        with pytest.raises(WeightSyncError) as refused:
            await sync.publish(3)
        assert refused.value.field == "engine-1"
    else:
        assert (await sync.publish(3)).probe_gap == pytest.approx(largest)


async def test_an_engine_that_hangs_ends_the_run_at_the_deadline_and_the_others_resume() -> None:
    fine, hung = ScriptedEngine(), ScriptedEngine(hang=True)
    with pytest.raises(WeightSyncError, match=r"waited 0\.2 s for weights of version 3 to reach 2 engines"):
        await make_sync(fine, hung, deadline_s=0.2).publish(3)
    assert fine.calls[-1] == "resume"
