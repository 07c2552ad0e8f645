"""A Buffer in this process: no actor, a table in place of the object store, and a kill that leaves only the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.events import GroupReport
from rayrft.buffer.leases import BlockRows, Lease
from rayrft.buffer.ledger import Ledger
from rayrft.buffer.schedule import Ticket
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSet
from rayrft.errors import DataError, FeedbackRefused, LeaseEnded
from rayrft.experience import Experience, to_batch, unpack
from tests.buffer.rows import group
from tests.scripted import remote


class ObjectTable:
    """Stands for ``ray.put`` and ``ray.get``. Messages of any size travel inside calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._messages: list[pa.Buffer] = []
        monkeypatch.setattr("ray.put", self.put)
        monkeypatch.setattr("rayrft.buffer.client.INLINE_BYTES", 1 << 40)
        monkeypatch.setattr("ray.get", lambda refs: [self._messages[ref] for ref in refs])

    def put(self, message: pa.Buffer) -> int:
        self._messages.append(pa.py_buffer(message.to_pybytes()))
        return len(self._messages) - 1


def small(**settings: Any) -> BufferConfig:
    """Settings of any size, also below what a config may ask for."""
    sampler = BufferConfig.model_validate({"sampler": settings.pop("sampler", {})}).sampler
    return BufferConfig.model_construct(**{"fsync": "never", **settings, "sampler": sampler})


class InlineLoop(asyncio.SelectorEventLoop):
    """Does in a turn of its own what is meant for a thread: nobody waits for threads."""

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        async def work() -> Any:
            return function(*arguments)

        return self.create_task(work())


class LocalBuffer:
    """A Buffer at ``folder``. ``do`` makes a call and gives what came of it: errors of the contract as their names."""

    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop

    def __init__(
        self,
        folder: Path,
        config: BufferConfig,
        tasks: Callable[[], TaskSet] | None = None,
        run: str = "run",
        **named: Any,
    ) -> None:
        self.folder, self.named = folder, named
        self._arguments = run, folder, config, 0, tasks
        self.open()

    def open(self) -> None:
        self.buffer = Buffer(*self._arguments, **self.named)
        self.loop = self.make_loop()

    def kill(self) -> None:
        """As SIGKILL does it: nothing is written any more, and the lock is free."""
        if self.loop.is_closed():
            return
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        self.loop.run_until_complete(
            asyncio.wait([*tasks, self.loop.create_task(self.loop.shutdown_default_executor())])
        )
        self.loop.close()
        self.buffer.store._row_thread.shutdown()
        self.buffer.store.storage.unlock()

    def restart(self) -> None:
        self.kill()
        self.open()

    def begin(self, method: str, *arguments: Any) -> asyncio.Task[Any]:
        """Make a call without waiting for its answer, for which `run` waits."""
        return self.loop.create_task(getattr(self.buffer, method)(*arguments))

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def do(self, method: str, *arguments: Any) -> Any:
        try:
            return self.run(getattr(self.buffer, method)(*arguments))
        except (LeaseEnded, FeedbackRefused, DataError) as error:
            return type(error).__name__, error.value

    def put(
        self, groups: list[tuple[list[Experience], Ticket | None]], dropped: dict[str, int] | None = None, **said: Any
    ) -> None:
        """Groups in one call of a producer's writer; ``said`` is what their reports say beside the number of rows."""
        writer = BufferWriter(remote(self.buffer))

        async def all_at_once() -> None:
            puts = [
                writer.put(to_batch(rows), GroupReport(rows=len(rows), **said), ticket=ticket, dropped=dropped)
                for rows, ticket in groups
            ]
            await asyncio.gather(*puts)

        self.run(all_at_once())

    def put_numbers(self, *numbers: int) -> None:
        """Groups of these numbers, without tickets, in one call."""
        self.put([(group(number), None) for number in numbers])

    def leased(self, step: int) -> list[str]:
        """Ids of the rows of the step's batch, sorted; it must have one."""
        return sorted(row for share in self.lease(step)[1] for row, _, _ in share)

    def trained(self, step: int, *, advance: bool = False) -> list[str]:
        """Train a step, which has a batch; return the ids of its rows, sorted."""
        names = self.leased(step)
        self.do("ack", step)
        if advance:
            self.do("advance", step + 1)
        return names

    def lease(self, step: int, ranks: int = 2) -> Any:
        """What the trainer sees of the step's batch, rank by rank and row by row; or why there is none now."""
        lease = self.do("lease", step, ranks, 0)
        if not isinstance(lease, Lease):
            return lease
        shares = [[row for part in share.parts for row in _rows(part)] for share in lease.shares]
        return lease.step, shares, lease.usual_rows, lease.expert_rows, lease.staleness, lease.rollouts

    def resume(self, step: int, life: str) -> Ledger:
        """What a resumed run is told, except how the log was repaired for it."""
        ledger, _ = self.run(self.buffer.resume(step, life))
        return ledger

    def held(self) -> list[tuple[str, float | None]]:
        """Id and reward of every held row."""
        found: list[tuple[str, float | None]] = []
        for ref, rows in self.do("partition", "usual"):
            batch = unpack(ray.get([ref])[0]).select(["experience_id", "reward"]).take(pa.array(rows))
            found += zip(batch.column("experience_id").to_pylist(), batch.column("reward").to_pylist(), strict=True)
        return sorted(found)

    def may_admit(self) -> bool:
        """Whether a request for tickets is answered at once."""
        state = self.buffer.state
        return state.exhausted("") or self.buffer.retention.room("") > 0

    def standing(self) -> dict[str, Any]:
        """Everything that a restart must not change."""
        leases = {step: self.lease(step) for step in sorted(self.buffer.state.training.leases)}
        state = self.buffer.state
        counts = [state.contents.late_feedback_count, *(tasks.position for tasks in state.tasks.values())]
        return {"stats": self.do("stats"), "counts": counts, "rows": self.held(), "leases": leases}


def _rows(part: BlockRows) -> list[tuple[str, float | None, float]]:
    """Id, reward and weight of the rows of a part."""
    batch = unpack(ray.get([part.ref])[0]).select(["experience_id", "reward"]).take(pa.array(part.rows))
    return list(zip(*(column.to_pylist() for column in batch.columns), part.weights.tolist(), strict=True))
