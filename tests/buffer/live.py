"""Real Buffer actors for tests, and a history in which groups end in every way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.ledger import Ledger
from rayrft.buffer.schedule import Ticket
from rayrft.config import dump_config, load_config
from rayrft.config.buffer import BufferConfig
from rayrft.errors import FeedbackRefused
from rayrft.experience import Experience, pack, to_batch
from rayrft.monitor.summary import RunStatus
from tests.buffer.rows import expert_rows, group, plan
from tests.e2e.conftest import small_config
from tests.scripted import handle


@contextlib.contextmanager
def buffers() -> Iterator[Callable[..., Any]]:
    """Gives a function that starts a Buffer actor on a folder, with the given settings."""
    actors: list[Any] = []

    def start(folder: Path, *, tasks: Any = None, name: str | None = None, **settings: Any) -> Any:
        config = BufferConfig.model_validate(settings)
        actor = ray.remote(Buffer).options(num_cpus=0, max_concurrency=100, name=name)
        actors.append(actor.remote("run", folder, config, 0, tasks))
        return actors[-1]

    yield start
    for actor in actors:
        ray.kill(actor)


def put(buffer: Any, *groups: list[Experience], ticket: Ticket | None = None) -> None:
    for rows in groups:
        asyncio.run(BufferWriter(handle(buffer)).put(to_batch(rows), ticket=ticket))


TURNS = ({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is\n2."})


class FakeMaster:
    """What `attach` asks of a Master."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def status(self) -> RunStatus:
        return RunStatus(self._folder.name, "running", None, 0, 0, self._folder, [], Ledger())


@contextlib.contextmanager
def live_run(storage: Path, name: str) -> Iterator[Path]:
    """A run that is under way, as far as its Buffer goes, with the groups of `history` and group 7, which was spoken;
    gives its folder."""
    config = load_config(small_config(storage, name))
    with buffers() as start:
        buffer = start(config.folder / "buffer", name=f"{name}:buffer")
        history(buffer)
        put(buffer, [replace(group(7)[0], turns=TURNS, reward_components={"format": 0.5})])
        (config.folder / "config.yaml").write_text(dump_config(config))
        master = ray.remote(FakeMaster).options(num_cpus=0, name=f"{name}:master").remote(config.folder)
        ray.get(master.status.remote())
        yield config.folder
        ray.kill(master)


def history(buffer: Any, *, length: int = 4) -> dict[str, list[int]]:
    """Groups by status, of two rows each: 0 and 1 trained at step 0, 2 and 3 leased, 4 ready, 9 dropped; row 4/0 with
    the reward 7 and feedback in time, row 0/1 with feedback too late; five demonstrations ``gold``."""
    ray.get(buffer.load.remote("gold", [pack(to_batch(expert_rows(5)))]))
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(buffer.admit.remote("test", 1, 1))
    put(buffer, group(9, length=length), ticket=ticket)
    ray.get(buffer.open_stage.remote(plan(2, scheduled=False)))
    *others, last = (group(number, length=length) for number in range(5))
    put(buffer, *others, [replace(last[0], reward=7.0), last[1]])
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    ray.get(buffer.lease.remote(1, 1, 5))
    ray.get(buffer.feedback.remote("4/0", labels={"quality": "good"}))
    with contextlib.suppress(FeedbackRefused):
        ray.get(buffer.feedback.remote("0/1", labels={"quality": "bad"}))
    return {"trained": [0, 1], "leased": [2, 3], "ready": [4], "dropped": [9]}
