"""The weight sync's judgement, with scripted engines: who is sent weights, what it accepts, and that engines resume."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from rayrft.config import load_config
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import WeightSyncError
from rayrft.experience import Experience
from rayrft.explorer.engines.engine import EngineWeights
from rayrft.explorer.engines.pool import EnginePool
from rayrft.runtime.handle import Handle, TrackedHandle
from rayrft.runtime.waits import Waits
from rayrft.trainer.api import RankCall
from rayrft.weights.messages import Link, SendReport
from tests.config.given import base
from tests.errors import about
from tests.scripted import remote

TOKENS = 200
EXACT, ROUNDED = "float32", "bfloat16"


class ScriptedEngine:
    """``fail`` names the call that fails, and ``hang`` a receive that never ends."""

    def __init__(self) -> None:
        self.digest, self.version_offset, self.fail, self.paused = "abc", 0, "", False
        self.kept_cache, self.version = False, 0
        self.scores = [-1.0] * TOKENS
        self.dies: Any = None
        """What happens when it dies."""
        self.links: list[tuple[int, int]] = []
        """Number of receivers and its own index, of the links that it got."""
        self.calls: list[str] = []

    async def connect(self, link: Link, first: int) -> None:
        self.links.append((link.receivers, first))

    async def respond(self) -> int:
        if self.fail == "hang":
            await asyncio.Event().wait()
        return self.version

    async def pause(self, keep_cache: bool = False) -> None:
        self.calls.append("pause")
        self.paused, self.kept_cache = True, keep_cache
        if self.fail == "pause":
            raise RuntimeError("no pause")

    async def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def receive(self, number: int, version: int) -> EngineWeights:
        self.calls.append("receive")
        assert self.paused
        if self.fail == "hang":
            await asyncio.Event().wait()
        if self.fail == "receive":
            raise RuntimeError("no weights")
        if self.fail == "death":
            await self.dies()
            raise ActorDiedError()
        self.paused, self.version = False, version
        return EngineWeights(version + self.version_offset, (self.digest,))

    async def score(self, sequence: list[int], images: tuple[str, ...]) -> list[float]:
        self.calls.append("score")
        return self.scores


class ScriptedTrainer:
    logprob = -1.0
    """Of every token under the present weights."""
    problem: str | None = None
    """Of the next transfer."""

    async def call_ranks(self, call: RankCall) -> list[Any]:
        if call.method == "score":
            return [[[self.logprob] * (len(s) - 1) for s in call.args[0]]]
        answers: dict[str, list[Any]] = {"locate": [("host", 1), None], "connect": [None, None]}
        problem, self.problem = self.problem, None
        return {**answers, "send": [SendReport("abc", 16, problem), SendReport("", 16)]}[call.method]


class Subject:
    """A weight sync and the pool, with engines by name."""

    def __init__(self, dtype: str = "float32", leave_s: float = 10.0, **settings: Any) -> None:
        config = load_config(base(), {"model.dtype": dtype, "weight_sync": settings})
        self.pool, waits = EnginePool(), Waits("master")
        self.trainer = ScriptedTrainer()
        trainer = TrackedHandle(remote(self.trainer, "trainer"), waits)
        tokens = np.arange(TOKENS + 1)
        probe = Experience("p", "p", "p", tokens, 1, np.ones_like(tokens), np.zeros(len(tokens)))
        pool = TrackedHandle(remote(self.pool, "engine_pool"), waits)
        self.sync = WeightSync(config, trainer, pool, self.handles, [probe], waits, leave_s=leave_s)
        self.engines: dict[str, ScriptedEngine] = {}

    async def admit(self, *names: str, version: int = 0, **faults: Any) -> None:
        """Engines of these names with, if given, faults: attributes of a `ScriptedEngine`."""
        for name in names:
            self.engines[name] = ScriptedEngine()
            vars(self.engines[name]).update(faults)
        await self.sync.admit([remote(self.engines[name], name) for name in names], version)

    def handles(self) -> list[Handle[Any]]:
        return [remote(engine, name) for name, engine in self.engines.items()]

    async def leave(self, name: str) -> None:
        [handle] = [member.handle for member in (await self.pool.members()).members if member.name == name]
        await self.pool.leave(handle, "died")

    async def members(self) -> dict[str, int]:
        """Names and versions."""
        return {member.name: member.version for member in (await self.pool.members()).members}


async def subject(count: int = 2, **settings: Any) -> Subject:
    """With ``count`` engines that are members."""
    made = Subject(**settings)
    await made.admit(*(f"engine-{index}" for index in range(count)))
    for engine in made.engines.values():
        engine.calls.clear()
    return made


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
async def test_a_round_pauses_receives_and_resumes_every_member(kv_cache: str) -> None:
    made = await subject(kv_cache=kv_cache)
    report = await made.sync.publish(3)
    assert (report.version, report.digest, report.nbytes) == (3, "abc", 16)
    for engine in made.engines.values():
        assert engine.calls == ["pause", "receive", "score"] and not engine.paused
        assert engine.kept_cache == (kv_cache == "keep")
    assert await made.members() == {"engine-0": 3, "engine-1": 3}


async def test_the_probe_runs_after_an_update_after_a_new_link_and_at_every_nth_round_from_there() -> None:
    made = await subject(probe_every=3)

    async def probed(*versions: int) -> list[int]:
        return [version for version in versions if (await made.sync.publish(version)).probe_gap is not None]

    assert await probed(0) == [0] and await probed(*range(1, 9)) == [1, 4, 7], "version 0 was not updated yet"
    await made.admit("engine-2", version=8)
    assert made.engines["engine-2"].calls[-1] == "score"
    assert await probed(*range(9, 13)) == [9, 12]
    await made.leave("engine-0")
    assert await probed(13, 14) == [13]


FAULTS: list[dict[str, Any]] = [{"digest": "xyz"}, {"version_offset": -1}, {"fail": "receive"}, {"fail": "pause"}]


@pytest.mark.parametrize("faults", [*FAULTS, {"scores": [-1.1] * TOKENS}], ids=lambda faults: next(iter(faults)))
async def test_a_new_engine_with_other_weights_is_never_a_member(faults: dict[str, Any]) -> None:
    made = await subject()
    membership = await made.pool.members()
    with pytest.raises((WeightSyncError, RuntimeError)):
        await made.admit("engine-2", version=1, **faults)
    assert await made.pool.members() == membership
    await made.sync.publish(2)
    assert made.engines["engine-2"].calls.count("receive") <= 1, "what is no member is sent no more weights"


async def test_the_group_is_formed_again_when_the_members_have_changed_and_only_then() -> None:
    made = await subject()
    first, second = made.engines["engine-0"], made.engines["engine-1"]
    await made.sync.publish(1)
    await made.sync.publish(2)
    assert (first.links, second.links) == ([(2, 0)], [(2, 1)]), "that of the admission serves all rounds"
    await made.admit("engine-2", version=2)
    third = made.engines["engine-2"]
    assert third.links == [(1, 0)] and first.links == [(2, 0)], "admitted alone, while the others answer requests"
    await made.sync.publish(3)
    assert [engine.links[-1] for engine in (first, second, third)] == [(3, 0), (3, 1), (3, 2)]
    assert await made.members() == {"engine-0": 3, "engine-1": 3, "engine-2": 3}
    await made.leave("engine-0")
    await made.sync.publish(4)
    assert [engine.links[-1] for engine in (first, second, third)] == [(3, 0), (2, 0), (2, 1)]
    assert first.calls.count("receive") == 3 and await made.members() == {"engine-1": 4, "engine-2": 4}
    # One under the name of an engine that left is a change of members, too.
    await made.leave("engine-1")
    await made.admit("engine-1", version=4)
    await made.sync.publish(5)
    assert made.engines["engine-1"].links == [(1, 0), (2, 1)] and second.calls.count("receive") == 4


async def test_without_members_nothing_is_sent_and_whoever_joins_then_gets_everything() -> None:
    made = await subject(1)
    await made.leave("engine-0")
    assert (await made.sync.publish(1)).digest is None
    await made.admit("engine-1", version=1)
    assert await made.members() == {"engine-1": 1}


@pytest.mark.parametrize("faults", FAULTS, ids=str)
async def test_an_engine_is_paused_after_a_round_that_failed_only_if_it_has_received_a_part(
    faults: dict[str, Any],
) -> None:
    made = await subject(leave_s=0.1)
    vars(made.engines["engine-1"]).update(faults)
    with pytest.raises(RuntimeError if "fail" in faults else WeightSyncError) as failed:
        await made.sync.publish(3)
    assert getattr(failed.value, "field", "engine-1") == "engine-1"
    assert [engine.paused for engine in made.engines.values()] == [False, faults == {"fail": "receive"}]
    moved = "receive" in made.engines["engine-0"].calls
    assert not moved or faults != {"fail": "pause"}, "no weights move before all engines are paused"
    assert set((await made.members()).values()) == {0}
    vars(made.engines["engine-1"]).update(vars(ScriptedEngine()), links=[(2, 1)])
    await made.sync.publish(4)
    assert [engine.links for engine in made.engines.values()] == [[(2, 0)] * 2, [(2, 1)] * 2], "linked again"
    assert set((await made.members()).values()) == {4}


@pytest.mark.parametrize("left", [2, 0])
async def test_a_round_in_which_engines_die_is_repeated_with_those_that_are_left(left: int) -> None:
    made = await subject(left + 1)
    dead = made.engines[f"engine-{left}"]
    dead.fail, dead.dies = "death", lambda: made.leave(f"engine-{left}")
    made.trainer.problem = "connection closed by peer" if left else None
    report = await made.sync.publish(3)
    assert await made.members() == {f"engine-{index}": 3 for index in range(left)}
    assert report.digest == ("abc" if left else None)
    for index in range(left):
        assert made.engines[f"engine-{index}"].links == [(3, index), (2, index)], "under a new link"
        assert not made.engines[f"engine-{index}"].paused
    await made.admit("engine-9", version=3)
    await made.sync.publish(4)
    assert set((await made.members()).values()) == {4}, "its successor takes part in the next"


async def test_a_link_that_fails_with_all_engines_alive_ends_the_run() -> None:
    made = await subject(leave_s=0.1)
    made.trainer.problem = "connection reset"
    with pytest.raises(WeightSyncError, match="connection reset"):
        await made.sync.publish(3)


async def test_steps_that_are_repeated_publish_nothing_older_than_what_engines_hold() -> None:
    made = await subject()
    await made.sync.publish(5)
    made.sync.rewind(3)
    assert not made.sync.caught_up.is_set(), "no engine is admitted"
    assert (await made.sync.publish(4)).digest is None and set((await made.members()).values()) == {5}
    assert not made.sync.caught_up.is_set()
    assert (await made.sync.publish(5)).digest == "abc", "the version that they hold is proven again"
    assert made.sync.caught_up.is_set()


async def test_a_master_that_takes_over_publishes_nothing_older_than_what_an_engine_holds() -> None:
    made = await subject()
    await made.sync.publish(5)
    made.engines["engine-1"].version = 4  # the former Master died within the round
    made.sync.newest = 0  # the new one does not know
    await made.sync.take_over([member.handle for member in (await made.pool.members()).members])
    made.sync.rewind(3)
    assert not made.sync.caught_up.is_set(), "no engine is admitted"
    assert (await made.sync.publish(4)).nbytes == 0 and (await made.sync.publish(5)).nbytes == 16
    assert made.sync.caught_up.is_set()


async def test_a_call_that_hangs_after_another_has_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.core.weight_sync._SETTLE_S", 0.1)
    made = await subject(leave_s=0.1)
    made.engines["engine-0"].fail, made.engines["engine-1"].fail = "receive", "hang"
    with pytest.raises(RuntimeError, match="no weights"):
        await made.sync.publish(3)


async def test_an_engine_that_hangs_is_killed_at_the_deadline_and_the_round_repeated_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, killed = await subject(deadline_s=0.2, leave_s=0.2), dict[str, Any]()

    def kill(engine: Handle[Any]) -> None:
        killed[engine.name] = asyncio.ensure_future(made.leave(engine.name))  # as the Master does

    monkeypatch.setattr(Handle, "kill", kill)
    made.engines["engine-1"].fail = "hang"
    assert (await made.sync.publish(3)).digest == "abc"
    assert [*killed] == ["engine-1"] and await made.members() == {"engine-0": 3}


async def test_a_deadline_that_is_missed_while_all_engines_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = await subject(deadline_s=0.2, leave_s=0.1)
    monkeypatch.setattr(made.engines["engine-1"], "receive", lambda *_: asyncio.Event().wait())
    with pytest.raises(WeightSyncError, check=about("weight_sync")):
        await made.sync.publish(3)


def scores(**off: float) -> list[float]:
    """Those of the trainer, but for the first tokens: so many of them, ``few`` or ``many``, are off by that much, and
    ``all`` the others."""
    counts = [("few", 2), ("many", 3), ("all", TOKENS)]
    gaps = [off[name] for name, count in counts if name in off for _ in range(count)]
    return [-1.0 - gap for gap in (gaps + [0.0] * TOKENS)[:TOKENS]]


@pytest.mark.parametrize(
    ("dtype", "off", "largest"),
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
async def test_log_probs_are_judged_by_mean_and_share(dtype: str, off: dict[str, float], largest: float | None) -> None:
    made = await subject(dtype=dtype, probe_every=1, leave_s=0.1)
    made.engines["engine-1"].scores = scores(**off)
    if largest is None:
        with pytest.raises(WeightSyncError, check=about("engine-1")):
            await made.sync.publish(3)
    else:
        assert (await made.sync.publish(3)).probe_gap == pytest.approx(largest)


async def test_all_engines_score_the_probe_at_once() -> None:
    made = await subject(probe_every=1)
    both = asyncio.Barrier(2)

    async def score(sequence: list[int], images: tuple[str, ...]) -> list[float]:
        await both.wait()
        return scores()

    for engine in made.engines.values():
        vars(engine)["score"] = score
    assert (await asyncio.wait_for(made.sync.publish(3), 20)).probe_gap == 0.0


async def test_an_engine_that_only_evaluates_gets_verified_weights_and_no_broadcast_after() -> None:
    made = await subject(1)
    own = ScriptedEngine()
    report = await made.sync.load([remote(own, "evaluation-0")], 5)
    assert (report.version, report.digest, report.probe_gap) == (5, "abc", 0.0)
    assert await made.members() == {"engine-0": 0} and made.engines["engine-0"].calls == []
    await made.sync.publish(6)
    assert own.calls == ["pause", "receive", "score"] and await made.members() == {"engine-0": 6}
    own.digest = "xyz"
    with pytest.raises(WeightSyncError):
        await made.sync.load([remote(own, "evaluation-0")], 6)
