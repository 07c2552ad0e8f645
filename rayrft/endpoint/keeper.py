"""The actor that keeps the sessions of the endpoint and puts their groups into the Buffer."""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.config.serve import ServeConfig
from rayrft.endpoint.recording import OpenCall
from rayrft.endpoint.sessions import Sessions, SessionStats
from rayrft.experience import to_batch
from rayrft.explorer.scoring import ScoredGroup
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, Watched, once, root_cause, when_reachable
from rayrft.runtime.ray_api import ray
from rayrft.runtime.waits import settle

R = TypeVar("R")

_FORGET_EVERY_S = 3600.0
_Change = Literal["begin", "answered", "failed"]
"""The method of `Sessions` that begins or ends a call."""


class SessionKeeper(Watched):
    """The actor, which the replicas of the endpoint call; for the arguments see `Sessions`.

    ``count_file`` holds the number of rows that the Buffer does not have yet: if the keeper dies they are lost, and its
    successor counts them as ``keeper_died``.
    """

    def __init__(
        self,
        config: ServeConfig,
        run: str,
        group_size: int,
        buffer: Handle[Buffer],
        count_file: Path,
        *,
        drop_equal: bool,
        mask_truncated: bool = False,
    ) -> None:
        self._attempt, self._keep_days = uuid.uuid4().hex[:8], config.keep_days
        self._sessions = Sessions(
            config,
            f"{run}/serve/{self._attempt}",
            group_size,
            drop_equal=drop_equal,
            mask_truncated=mask_truncated,
            first_number=random.getrandbits(62),
        )
        self._buffer = buffer
        self._writer = BufferWriter(buffer)
        self._count = np.memmap(count_file, np.int64, "r+" if count_file.exists() else "w+", shape=1)
        self._unsent = int(self._count[0])
        """Rows that the Buffer does not have yet, of groups and dropped ones."""
        self._dropped = +Counter({"keeper_died": self._unsent})
        """Dropped rows that the Buffer has not counted yet, by reason."""
        self._discards = 0
        self._discarding = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        """The error of a call of the Buffer."""
        self._failed = asyncio.Event()

    @once
    async def start(self) -> None:
        """Start to end sessions in time; call it first."""
        self._send()
        self._expiring = asyncio.create_task(self._expire())
        if self._keep_days is not None:
            self._forgetting = asyncio.create_task(self._forget_old(self._keep_days))
            self._forgetting.add_done_callback(self._sent)

    async def change(self, changes: list[tuple[_Change, tuple[Any, ...]]]) -> list[OpenCall | None]:
        """Begin and end calls in this order, by the arguments of the methods of `Sessions` but the time.

        Returns the begun calls.
        """
        results = [getattr(self._sessions, name)(*args, time.monotonic()) for name, args in changes]
        self._send()  # a begun call may be the first to be given up
        return results

    async def opted_out(self, rows: int) -> None:
        """Count answers that their client does not want to be kept."""
        self._sessions.opted_out(rows)
        self._send()

    async def forget(self, name: str) -> tuple[int, int]:
        """Erase a session, by its id or that of a response, with the groups of its rows. Return the number of erased
        rows, and of rows that can be erased once a checkpoint covers their step."""
        dropped = self._sessions.forget(name)
        while self._sending:  # the session's group may be on its way to the Buffer
            await asyncio.gather(*self._sending)
        await asyncio.gather(*self._send())
        erased, leased = await self._buffer.call(Buffer.forget, [name])
        return dropped + erased, leased

    async def _forget_old(self, days: float) -> None:
        """Erase sessions of this age, now and then. Never returns."""
        ahead = time.time() - time.monotonic()  # a clock that is set later erases nothing
        while True:
            await self._buffer.call(Buffer.forget, [], ahead + time.monotonic() - 86_400 * days)
            await asyncio.sleep(_FORGET_EVERY_S)

    async def feedback(self, name: str, reward: float, components: dict[str, float]) -> str:
        """Give the reward of a session; return its id once the Buffer has its group. Raises DataError and
        FeedbackRefused."""
        session = self._sessions.feedback(name, reward, components, time.monotonic())
        await asyncio.gather(*self._send())
        return session

    async def stats(self) -> SessionStats:
        return self._sessions.stats()

    async def close(self) -> None:
        """Drop sessions that are not part of a group; return when the Buffer has, and has counted, everything."""
        self._sessions.close()
        self._send()
        while self._sending:
            await asyncio.gather(*self._sending)

    async def watch(self) -> None:
        """Raise the error of the Buffer that ends the run; see `Watched.watch`."""
        await self._failed.wait()
        assert self._error is not None  # set before the event
        raise self._error

    async def _expire(self) -> None:
        """End sessions in time. Never returns."""
        while True:
            self._changed.clear()
            left = self._sessions.next_expiry() - time.monotonic()
            try:
                await asyncio.wait_for(self._changed.wait(), None if math.isinf(left) else max(0.0, left))
            except TimeoutError:
                self._sessions.expire(time.monotonic())
                self._send()

    def _send(self) -> list[asyncio.Task[None]]:
        """Start to send formed groups and counts of dropped rows to the Buffer."""
        self._changed.set()
        groups, dropped = self._sessions.take()
        self._dropped += dropped
        self._note_count(-dropped.total() - sum(len(group.rows) for group in groups))
        sending = [self._start(self._put(group)) for group in groups]
        return [*sending, self._start(self._discard())] if self._dropped else sending

    def _note_count(self, sent: int = 0) -> None:
        self._unsent -= sent
        self._count[0] = self._sessions.held + self._unsent

    def _start(self, sending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(sending, context=Context())  # a cancelled request must not cancel it for others
        self._sending.add(task)
        task.add_done_callback(self._sent)
        return task

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._failed.set()

    async def _put(self, group: ScoredGroup) -> None:
        # The Buffer itself counts rows that it rejects or has no place for.
        await self._writer.put(to_batch(group.rows), group.report, dropped=dict(group.dropped))
        self._note_count(len(group.rows))

    async def _discard(self) -> None:
        async with self._discarding:  # counts that come meanwhile are sent together
            dropped, self._dropped = self._dropped, Counter()
            if dropped:
                self._discards += 1
                await self._buffer.call(Buffer.discard, f"{self._attempt}/{self._discards}", dict(dropped))
                self._note_count(dropped.total())


class RemoteSessions:
    """The sessions in the keeper's actor. Calls run outside of the request's context, or Ray would cancel them with the
    request, whose end the keeper must know; their errors are without Ray's wrappers.

    Changes travel together: those that come while a call is open wait for its end. A call fails with ActorUnreachable
    if the keeper is away for ``patience_s``.
    """

    def __init__(self, keeper: Handle[SessionKeeper], patience_s: float) -> None:
        self._keeper, self._patience_s = keeper.with_options(max_task_retries=0), patience_s
        self._unsent: list[tuple[_Change, tuple[Any, ...], asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def begin(self, *args: Any) -> OpenCall:
        begun: OpenCall = await self._change("begin", *args)
        return begun

    async def answered(self, *args: Any) -> None:
        await self._change("answered", *args)

    async def failed(self, *args: Any) -> None:
        await self._change("failed", *args)

    async def opted_out(self, rows: int) -> None:
        await self._call(SessionKeeper.opted_out, rows)

    async def forget(self, name: str) -> tuple[int, int]:
        return await self._call(SessionKeeper.forget, name)

    async def feedback(self, name: str, reward: float, components: dict[str, float]) -> str:
        return await self._call(SessionKeeper.feedback, name, reward, components)

    async def stats(self) -> SessionStats:
        return await self._call(SessionKeeper.stats)

    async def _call(self, method: Callable[..., Coroutine[Any, Any, R]], *args: Any) -> R:
        try:
            return await when_reachable(lambda: Context().run(self._keeper.call, method, *args), self._patience_s)
        except (*ray_api.ACTOR_ERRORS, ray.exceptions.RayTaskError) as error:
            raise root_cause(error, "keeper") from None

    async def _change(self, name: _Change, *args: Any) -> Any:
        changed = asyncio.get_running_loop().create_future()
        self._unsent.append((name, args, changed))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), context=Context())
        return await changed

    async def _send(self) -> None:
        while self._unsent:
            sent, self._unsent = self._unsent, []
            try:
                results: list[Any] = await self._call(SessionKeeper.change, [change[:2] for change in sent])
            except Exception as error:  # raised in the callers
                results = [error] * len(sent)
            for (*_, changed), result in zip(sent, results, strict=True):
                settle(changed, result)
        self._sending = None
