"""Wrong calls from actor to actor. mypy must reject every one: where it does not, the comment on the line is the error
(an ``ignore`` that nothing needs)."""

from __future__ import annotations

from collections.abc import Callable

from rayrft.buffer.buffer import Buffer
from rayrft.runtime.handle import Handle, TrackedHandle, fetch
from rayrft.runtime.waits import Waits
from rayrft.trainer.api import RankApi
from rayrft.trainer.trainer import Trainer, ask_ranks


async def calls(buffer: Handle[Buffer], trainer: Handle[Trainer]) -> None:
    await buffer.call(Buffer.ack, "0")  # type: ignore[call-overload]  # a wrong argument
    await buffer.call(Buffer.ack)  # type: ignore[call-overload]  # one too few
    await buffer.call(Buffer.ack, 0, version=1)  # type: ignore[call-arg]  # a name that it does not have
    await buffer.call(Trainer.waiting)  # type: ignore[call-overload]  # a method of another actor
    name: str = await buffer.call(Buffer.pid)  # type: ignore[call-overload]  # its answer for another type
    digest: str = (await ask_ranks(trainer, RankApi.score, [[1, 2]]))[0]  # type: ignore[assignment]
    await ask_ranks(trainer, RankApi.train, 0)  # type: ignore[arg-type]
    await ask_ranks(trainer, Trainer.waiting)  # type: ignore[arg-type]  # a method of the actor
    TrackedHandle(buffer, Waits("a"), endless=[Trainer.watch])  # type: ignore[list-item]
    del name, digest


class Blocking:
    def ready(self) -> None: ...


def blocking(actor: Handle[Blocking], create: Callable[[int], Handle[Blocking]]) -> None:
    ready: int = fetch(actor.call(Blocking.ready))  # type: ignore[assignment]  # a method that is not a coroutine
    create("0")  # type: ignore[arg-type]  # a wrong argument of the constructor
    del ready
