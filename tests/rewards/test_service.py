"""Rewards on Ray Serve: who scores, what of the death of a replica, and the end of it all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from rayrft.config.reward import RewardConfig
from rayrft.errors import ConfigError
from rayrft.rewards import RewardResult, Transcript
from rayrft.rewards.scorer import DomainStats, Rewards
from rayrft.rewards.service import RewardService, ServeBackend, deploy_rewards
from rayrft.runtime.handle import Handle, Watched
from rayrft.runtime.serving import HttpSettings
from rayrft.runtime.serving.applications import applications, create_anchor, delete_applications, on_head
from tests.errors import about
from tests.rewards.trouble import HERE, task, transcripts

OWNER = "test:rewards"


@pytest.fixture(scope="module")
def ray_serve(ray_cluster: Any) -> Iterator[None]:
    """Ray Serve, which has one address in a cluster, is left to other modules as it was."""
    running = applications()
    yield
    assert applications() == running
    if not running:
        serve.shutdown()


@asynccontextmanager
async def served(config: RewardConfig) -> AsyncIterator[tuple[Rewards, RewardService, Handle[Watched]]]:
    service, anchor = RewardService.of("test", config, []), create_anchor(OWNER)
    try:
        await asyncio.to_thread(on_head, deploy_rewards, service, OWNER, HttpSettings())
        pool = Rewards(config, [], lambda: ServeBackend(service))
        await pool.open()
        yield pool, service, anchor
    finally:
        await asyncio.to_thread(delete_applications, service.all_versions)
        anchor.kill()


# The version


def version(plugins: list[Path] | None = None, **config: Any) -> str:
    config = {key: value for key, value in {"name": "math", **config}.items() if value is not None}
    return RewardService.of("run", RewardConfig(**config), plugins or []).version


def test_another_reward_is_another_version_and_no_two_domains_share_an_application(tmp_path: Path) -> None:
    first = version()
    assert version(workers=4, spare_workers=0, placement="serve", replicas={"max": 3}, fallback=0.5) == first
    (plugin := tmp_path / "plugin.py").write_text("ONE = 1\n")
    others = [version(name="exact"), version(options={"strict": True}), version(deadline_s=11), version([plugin])]
    others.append(version(name=None, domains={"a": {"name": "math"}}))
    plugin.write_text("ONE = 2\n")
    others.append(version([plugin]))
    assert len({first, *others}) == 7
    service = RewardService("run", "0a", RewardConfig(name="math"), [])
    assert service.application("") == "run:rewards-0a"
    assert len({service.application(each) for each in ("", "a", "a b", "a#b", "a/b", "a%2Fb")}) == 6


def test_other_weights_in_the_folder_of_a_model_are_another_version(tmp_path: Path) -> None:
    def scored_by(folder: Path) -> str:
        judge = {"name": "judge", "options": {"model": "a name", "url": "http://x"}}
        return version(name=None, parts=[{"name": "model", "options": {"model": str(folder)}}, judge])

    (folder := tmp_path / "rm").mkdir()
    (folder / "config.json").write_text("{}")
    (weights := folder / "model.safetensors").write_bytes(b"12345678")
    (folder / "more").mkdir()
    first = scored_by(folder)
    os.utime(weights, ns=(1, 1))
    assert scored_by(folder) == first, "the same content, however old"
    weights.write_bytes(b"12345679")
    second = scored_by(folder)
    os.utime(weights, ns=(2, 2))
    (folder / "tokenizer.json").write_text("{}")
    assert len({first, second, scored_by(folder), scored_by(tmp_path / "none")}) == 4


# A handle that a test scripts


class _Response:
    def __init__(self, replies: list[Any], cancelled: list[bool]) -> None:
        self._replies, self._cancelled = replies, cancelled

    def __await__(self) -> Any:
        reply = self._replies.pop(0)
        if reply is None:
            yield from asyncio.Event().wait().__await__()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def cancel(self) -> None:
        self._cancelled.append(True)


class _Replicas:
    """The handle of a deployment, and what it replies: None is never."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.cancelled = list(replies), list[bool]()
        self.score, self.asked = self, asyncio.Event()

    def remote(self, task: Any, transcripts: list[Transcript]) -> _Response:
        self.asked.set()
        return _Response(self.replies, self.cancelled)


async def pool_over(replicas: _Replicas, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Rewards:
    monkeypatch.setattr(serve, "get_deployment_handle", lambda deployment, application: replicas)
    checked = RewardConfig(**config)
    pool = Rewards(checked, [], lambda: ServeBackend(RewardService("run", "0a", checked, [])))
    await pool.open()
    return pool


DIED = ray.exceptions.RayActorError(error_msg="The actor died.\nLong ago.")
FINE = [RewardResult(1.0, seconds=0.5)]


async def test_a_call_whose_replica_dies_is_made_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = _Replicas(FINE, DIED, FINE, DIED, DIED, FINE)
    pool = await pool_over(replicas, monkeypatch)
    results = [(await pool.score(task("a"), transcripts("a")))[0] for _ in range(3)]
    assert [(each.value, each.tries) for each in results] == [(1.0, 1), (1.0, 2), (None, 2)]
    assert results[-1].reason == "reward replica failed: Long ago" and results[-1].error
    assert pool.take_stats() == {"": DomainStats(3, 1, 1, 2, 1.0, 0.5, 0)}
    assert replicas.replies == [FINE], "no more than once"


async def test_who_gives_up_a_call_cancels_it_and_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = _Replicas(None)
    pool = await pool_over(replicas, monkeypatch)
    asking = asyncio.ensure_future(pool.score(task("a"), transcripts("a", "b")))
    await replicas.asked.wait()
    assert pool.take_stats() == {"": DomainStats(pending=2)}
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert replicas.cancelled == [True] and pool.take_stats() == {"": DomainStats()}


# Ray Serve itself


@pytest.mark.usefixtures("ray_serve")
async def test_replicas_of_each_domain_score_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    moody = {"name": HERE + "names_its_actor", "options": {"mark": str(tmp_path / "mark")}, "deadline_s": 30}
    config = RewardConfig(placement="serve", domains={"a b": moody, "exact": {"name": "exact"}})
    async with served(config) as (pool, service, anchor):
        assert set(applications(service.all_versions)) == {service.application("a b"), service.application("exact")}
        moody_task, exact_task = replace(task("a"), domain="a b"), replace(task("a"), domain="exact")
        right, wrong = await pool.score(exact_task, transcripts("a", "b"))
        assert (right.value, wrong.value) == (1.0, 0.0)
        [first] = await pool.score(moody_task, transcripts("where"))
        [killed] = await pool.score(moody_task, transcripts("kill the actor"))
        assert (killed.value, killed.tries) == (1.0, 2), "made again on another"
        [both] = await pool.score(moody_task, transcripts("always kill the actor"))
        assert both.value is None and "reward replica failed" in str(both.reason) and both.error
        [fine] = await pool.score(moody_task, transcripts("where"))
        assert fine.value == 1.0 and fine.answer != first.answer
        stats = pool.take_stats()
        assert (stats["a b"].scored, stats["a b"].errors, stats["a b"].retried) == (4, 1, 2)
        assert (stats["exact"].scored, stats["exact"].unknown) == (2, 0)
        with pytest.raises(ConfigError, check=about("name", "test")):
            create_anchor(OWNER)
        # Whoever owned them has died, and nobody closes them: they delete themselves.
        anchor.kill()
        async with asyncio.timeout(60):
            while await asyncio.to_thread(applications, service.all_versions):  # noqa: ASYNC110 - Serve has no event
                await asyncio.sleep(0.05)


@pytest.mark.slow  # Serve looks at what is pending for seconds before it starts a replica
@pytest.mark.usefixtures("ray_serve")
async def test_a_second_replica_comes_with_the_calls_and_none_is_lost(tmp_path: Path) -> None:
    # No call ends before two replicas have one.
    waits = {"name": HERE + "WaitsForAnother", "options": {"folder": str(tmp_path)}, "deadline_s": 150}
    config = RewardConfig(placement="serve", **waits, replicas={"max": 2, "pending": 1})
    async with served(config) as (pool, _, _):
        found = await asyncio.gather(*(pool.score(task("a"), transcripts(str(number))) for number in range(16)))
        results = [result for [result] in found]
        assert [result.components["said"] for result in results] == list(range(16)), "each has its own"
        assert all(result.value == 1.0 and result.tries == 1 for result in results)
        assert len({result.answer for result in results}) == 2
        assert pool.take_stats()[""].pending == 0


@pytest.mark.usefixtures("ray_serve")
async def test_a_reward_that_cannot_be_built_is_an_error_and_leaves_nothing() -> None:
    config = RewardConfig(placement="serve", name=HERE + "cannot_be_built")
    with pytest.raises(ConfigError, match="no such file", check=about("reward")):
        async with served(config):
            pass
    assert not await asyncio.to_thread(applications, "test:")
    delete_applications("test:")  # again does no harm
