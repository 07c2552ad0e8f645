"""A call that is lost, and an actor that cannot be reached, are not a death: who calls asks again, and members stay."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayrft.endpoint.keeper import RemoteSessions
from rayrft.errors import ActorDied, ActorUnreachable
from rayrft.runtime import handle
from rayrft.runtime.actor_pool import ActorPool
from rayrft.runtime.handle import Handle, root_cause, until_failed
from rayrft.runtime.serving import applications
from rayrft.runtime.serving.applications import delete_with
from tests.errors import about
from tests.scripted import Remote, remote

LOST = ActorUnavailableError("the connection broke", None)
REQUEST = ContextVar("request", default="")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_RETRY_S", 0.0)
    monkeypatch.setattr(applications, "_LOOK_S", 0.0)
    monkeypatch.setattr(Handle, "kill", lambda self: None)


class Worker:
    """Fails as it is told, call by call, and then answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.started_in: str | None = None
        self.is_watched = asyncio.Event()

    async def start(self) -> None:
        self.started_in = REQUEST.get()

    async def work(self) -> str:
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    async def watch(self) -> None:
        await self.work()
        self.is_watched.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("failures", "outcome", "created"),
    [
        ([LOST], "done", 1),
        ([LOST, LOST], ActorUnreachable, 1),
        ([ActorDiedError()], "done", 2),
        ([LOST, ActorDiedError()], ActorDied, 2),
    ],
)
async def test_an_actor_of_a_pool_is_replaced_when_it_has_died_and_only_then(
    failures: list[Exception], outcome: Any, created: int
) -> None:
    workers = [Worker(*failures), Worker()]
    left = list(workers)
    pool = ActorPool[Worker](lambda: remote(left.pop(0), "worker"), lambda worker: worker.call(Worker.start), 1, "w")
    await pool.open()
    REQUEST.set("the first call")

    def ask(worker: Handle[Worker]) -> Awaitable[str]:
        return worker.call(Worker.work)

    if outcome == "done":
        assert await pool.call(ask) == ("done", 1)
    else:
        with pytest.raises(outcome):
            await pool.call(ask)
    assert await pool.call(ask) == ("done", 0) and len(workers) - len(left) == created
    assert {worker.started_in for worker in workers[:created]} == {""}, "a start is in the context of no call"


async def test_a_watch_that_is_lost_is_begun_again_and_ends_with_the_death() -> None:
    worker = Worker(LOST, LOST, ActorDiedError())
    with pytest.raises(ActorDiedError):
        await until_failed(remote(worker))
    assert not worker.failures
    assert isinstance(root_cause(LOST, "engine-0"), ActorUnreachable)


async def test_an_application_is_deleted_when_no_actor_has_its_owners_name(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [Worker(LOST), Worker(ActorDiedError()), Worker(ActorDiedError())]
    """As they are found by name: the second has died, though its name is taken yet; then another run has it."""
    deleted = list[str]()

    def find(name: str, namespace: str) -> Any:
        if not owners:
            raise ValueError(name)
        return Remote(owners.pop(0))

    async def lost_once(self: Worker) -> None:
        await self.work()

    monkeypatch.setattr(Worker, "watch", lost_once)
    monkeypatch.setattr(ray, "get_actor", find)
    monkeypatch.setattr("ray.serve.delete", lambda name, _blocking: deleted.append(name))
    await asyncio.wait_for(delete_with("run:engine_pool", "run:serve"), 20)
    assert deleted == ["run:serve"] and not owners


async def test_an_owner_that_cannot_be_reached_for_a_moment_keeps_its_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = Worker(LOST, LOST)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: Remote(owner))
    monkeypatch.setattr("ray.serve.delete", None)  # a call of it fails
    watching = asyncio.ensure_future(delete_with("run:engine_pool", "run:serve"))
    await asyncio.wait_for(owner.is_watched.wait(), 20)
    assert not owner.failures and not watching.done()
    watching.cancel()


def test_a_handle_blocks_until_the_actor_has_died_and_not_until_a_call_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [LOST, LOST, ActorDiedError()]

    def get(call: Any, timeout: float | None = None) -> None:
        raise failures.pop(0)

    monkeypatch.setattr(ray, "get", get)
    handle.until_dead(Handle("anchor", Mock()))
    assert not failures


class Refused(Exception):
    """An error that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("one fault", threading.Lock())


def refuse() -> None:
    raise Refused


class RefusingKeeper:
    async def stats(self) -> None:
        refuse()


async def test_an_error_that_cannot_be_pickled_is_raised_with_its_text(ray_cluster: Any) -> None:
    keeper = handle.Handle[Any]("keeper", ray.remote(RefusingKeeper).options(num_cpus=0).remote())
    for call, field in (
        (asyncio.to_thread(applications.on_head, refuse), "refuse"),
        (RemoteSessions(keeper, 15.0).stats(), "keeper"),
    ):
        with pytest.raises(ActorDied, match=r"Refused: .*one fault", check=about(field)):
            await call
