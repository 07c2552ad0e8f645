"""The table of the kinds of actors: a kind is one class, and nothing else names it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayrft.config import RunConfig, load_config
from rayrft.core.bundles import Bundles
from rayrft.core.parts.base import Part, RunParts
from rayrft.core.parts.table import KINDS, plan_placement
from rayrft.runtime.handle import Handle, TrackedHandle, Watched
from rayrft.runtime.waits import Waits
from tests.config.given import GRPO, base
from tests.scripted import remote


class Silent(Watched):
    """Any actor: it answers what `Watched` does, and reports its waits by its name."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    async def waiting(self) -> str:
        return self.name


class ScriptedPlacement:
    """Creates actors that are in this process; remembers their names by placement group."""

    ranks = None

    def __init__(self) -> None:
        self.created: dict[str, list[str]] = {}

    def count(self, part: str) -> int:
        return {"engines": 2}.get(part, 1)

    def actor(self, cls: type, part: str, *, name: str, bundle: int = -1, restarts: int = 0) -> Any:
        def create(*_: Any, **__: Any) -> Handle[Any]:
            self.created.setdefault(part, []).append(name)
            return remote(Silent(name), name)

        return create


Make = Callable[..., RunParts]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr("ray.put", lambda value: value)

    def parts(**overrides: Any) -> RunParts:
        config = load_config({**base(), "stages": [GRPO], "storage": str(tmp_path), **overrides})
        nothing: dict[str, Any] = {"tasks": [], "task_set": None, "held_out": [], "limits": None}
        prepared: Any = SimpleNamespace(run_id="id", model="m", tokenizer=None, engine_share=None, **nothing)
        placement: Any = ScriptedPlacement()
        shared = remote(Silent("buffer"), "buffer") if config.buffer.name else None
        return RunParts(list(KINDS), config, prepared, placement, Waits("master"), [0, 0], shared)

    return parts


OPERATORS = {"experiences": [{"name": "reward_deviation"}], "actors": {}}
ENGINES = ["engine_pool", "engine-0", "engine-1"]


@pytest.mark.parametrize(
    ("overrides", "supervised"),
    [
        ({}, ["explorer-0", *ENGINES, "buffer", "trainer"]),
        (
            {"evaluation": {"engines": 1}, "auxiliary": {"judge": {"model": "m"}}},
            [
                *("explorer-0", *ENGINES, "evaluation_pool", "evaluation-0"),
                *("engine_pool-judge", "auxiliary-judge-0", "buffer", "trainer"),
            ],
        ),
        (
            {"reward": {"name": "exact", "placement": "pool"}, "pipelines": OPERATORS},
            ["explorer-0", "reward-0", "operators-0", *ENGINES, "buffer", "trainer"],
        ),
        ({"mode": "train"}, ["buffer", "trainer"]),
        ({"mode": "explore", "buffer": {"name": "lake"}}, ["explorer-0", *ENGINES, "buffer"]),
        ({"mode": "serve", "max_staleness": 2}, [*ENGINES, "buffer", "trainer", "keeper"]),
    ],
)
async def test_every_actor_is_watched_restarted_and_has_a_heartbeat(
    make: Make, overrides: dict[str, Any], supervised: list[str]
) -> None:
    parts = make(**overrides)
    assert sorted(actor.name for actor in parts.actors()) == sorted(supervised)
    assert sorted(parts.supervised()) == sorted(parts.heartbeats()) == sorted(supervised)
    answers = await asyncio.gather(*(heartbeat() for heartbeat in parts.heartbeats().values()))
    elsewhere = set() if parts.config.trains else {"buffer"}
    assert {answer for answer in answers if isinstance(answer, str)} == {*supervised} - elsewhere
    assert not parts.waits.report().waits, "a heartbeat is no wait of the Master"
    assert all(part.on_death in ("restart", "replace") for part, _ in parts.supervised().values())
    groups = {bundles.name for bundles in plan_placement(parts.config)}
    assert parts.placement.created.keys() <= groups  # type: ignore[attr-defined]


def test_a_tracked_handle_is_a_plain_one_in_another_process() -> None:
    tracked: TrackedHandle[Any] = TrackedHandle(Handle("buffer", "actor"), Waits("master"))
    received = pickle.loads(pickle.dumps(tracked))
    assert type(received) is Handle and (received.name, received.actor) == ("buffer", "actor")


class Clock(Silent):
    async def tick(self) -> str:
        return "tick"


class ClockPart(Part[Clock]):
    """A toy kind: all that a run needs to know of it."""

    name = "clock"
    loads = True

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        return [Bundles(cls.name, 1, 0.1, 0, 0.1, "tells the time")]

    def create(self) -> list[Handle[Clock]]:
        return [self.track(remote(Clock(), "clock-0"))]

    async def start(self) -> str:
        return f"the clock says {await self.actors[0].call(Clock.tick)}"


async def test_a_new_kind_of_actor_is_one_class(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.core.parts.table.KINDS", [*KINDS, ClockPart])
    parts = make()
    assert plan_placement(parts.config)[-1].name == "clock"
    clock = RunParts([ClockPart], parts.config, parts.prepared, parts.placement, parts.waits, [])
    assert [actor.name for actor in clock.actors()] == ["clock-0"] == [*clock.supervised()]
    assert await clock.start() == ["the clock says tick"]
