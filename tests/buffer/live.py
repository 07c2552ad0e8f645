"""Real Buffer actors for tests, and a history in which groups end in every way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.ledger import Ledger
from rayrft.config import dump_config, load_config
from rayrft.config.buffer import BufferConfig
from rayrft.experience import Experience, to_batch
from rayrft.monitor.summary import RunStatus
from tests.buffer.in_process import LocalBuffer, ObjectTable, small
from tests.buffer.rows import expert_rows, group, packed, plan
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


def put(buffer: Any, *groups: list[Experience]) -> None:
    for rows in groups:
        asyncio.run(BufferWriter(handle(buffer)).put(to_batch(rows)))


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
    with pytest.MonkeyPatch.context() as patch:
        ObjectTable(patch)
        history(local := LocalBuffer(config.folder / "buffer", small()))
        local.put([([replace(group(7)[0], turns=TURNS, reward_components={"format": 0.5})], None)])
        local.kill()
    with buffers() as start:
        start(config.folder / "buffer", name=f"{name}:buffer")
        (config.folder / "config.yaml").write_text(dump_config(config))
        master = ray.remote(FakeMaster).options(num_cpus=0, name=f"{name}:master").remote(config.folder)
        ray.get(master.status.remote())
        yield config.folder
        ray.kill(master)


def history(buffer: LocalBuffer, *, length: int = 4) -> dict[str, list[int]]:
    """Groups by status, of two rows each: 0 and 1 trained at step 0, 2 and 3 leased, 4 ready, 9 dropped; row 4/0 with
    the reward 7 and feedback in time, row 0/1 with feedback too late; five demonstrations ``gold``."""
    buffer.do("load", "gold", packed(expert_rows(5)))
    buffer.do("open_stage", plan(1))
    [ticket] = buffer.do("admit", "test", 1, 1)
    buffer.put([(group(9, length=length), ticket)])
    buffer.do("open_stage", plan(2, scheduled=False))
    *others, last = (group(number, length=length) for number in range(5))
    for rows in (*others, [replace(last[0], reward=7.0), last[1]]):
        buffer.put([(rows, None)])
    buffer.trained(0)
    buffer.lease(1)
    buffer.do("feedback", "4/0", None, {"quality": "good"})
    buffer.do("feedback", "0/1", None, {"quality": "bad"})
    return {"trained": [0, 1], "leased": [2, 3], "ready": [4], "dropped": [9]}
