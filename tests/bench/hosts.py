"""Stand-ins for the engines and ranks of a large run: eight host actors stand for all of them.

The other actors are real, and count the calls that they answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cloudpickle import CloudPickler

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.leases import Lease
from rayrft.core.master import Master
from rayrft.core.placement import PlacedClass, Placement
from rayrft.explorer.engines.engine import EngineWeights, RolloutEngine
from rayrft.explorer.engines.exchange import Answering, Completion, Request, Stream
from rayrft.explorer.engines.pool import EnginePool
from rayrft.explorer.explorer import Explorer
from rayrft.runtime.handle import NAMESPACE, Handle, Watched
from rayrft.trainer.api import Mailbox, RankSetup
from rayrft.trainer.trainer import Trainer
from rayrft.weights.messages import SendReport
from tests.monitor.made import result

HOSTS = 8
_QUIET_S, _PACE_S = 0.3, 0.5


class _Sizer(CloudPickler):
    """Pickles without a reference's bookkeeping."""

    def reducer_override(self, obj: Any) -> Any:
        return (bytes, (obj.binary(),)) if isinstance(obj, ray.ObjectRef) else super().reducer_override(obj)


def _size(value: Any) -> int:
    with BytesIO() as file:
        _Sizer(file, protocol=5).dump(value)
        return file.tell()


def tallied(cls: type) -> type:
    """Let the actors of a class count the calls that they answer, by method, and their bytes while asked to."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            state = self.__dict__
            state.setdefault("_tally", Counter())[method.__name__, "calls"] += 1
            if state.get("_sizing"):
                state["_tally"][method.__name__, "bytes"] += _size((args, kwargs))
            value = await method(self, *args, **kwargs)
            if state.get("_sizing"):
                state["_tally"][method.__name__, "bytes"] += _size(value)
            return value

        return call

    async def tally(self: Any, sizing: bool = False) -> Counter[tuple[str, str]]:
        """Return the counts since the last call. ``sizing``: whether to count bytes until the next call."""
        self._sizing, found = sizing, self.__dict__.get("_tally", Counter())
        self._tally = Counter()
        return found

    methods = {name: found for base in reversed(cls.__mro__) for name, found in vars(base).items()}
    for name, found in methods.items():
        if inspect.iscoroutinefunction(found) and not name.startswith("_") and name != "generate":
            setattr(cls, name, counted(found))
    cls.tally = tally  # type: ignore[attr-defined]
    return cls


@tallied
class TalliedBuffer(Buffer): ...


@tallied
class TalliedExplorer(Explorer): ...


@tallied
class TalliedPool(EnginePool): ...


@tallied
class ScriptedTrainer(Trainer):
    """The Trainer, whose ranks are those of the hosts."""

    def _fit_blocking(self, folder: Path, setup: RankSetup) -> None:
        ranks = self._config.ranks
        ray.get([host.run_ranks.remote(setup, range(index, ranks, HOSTS)) for index, host in enumerate(hosts())])


@tallied
class ScriptedMaster(Master):
    """The Master, whose engines are those of the hosts."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        real = Placement.actor
        tally = {Buffer: TalliedBuffer, Explorer: TalliedExplorer, EnginePool: TalliedPool, Trainer: ScriptedTrainer}

        def placed(self: Placement, cls: Any, part: str, **how: Any) -> Any:
            if cls is RolloutEngine:
                return PlacedClass(how["name"], Hosted(hosts()[how["bundle"] % HOSTS], how["bundle"]))
            return real(self, tally.get(cls, cls), part, **how)

        Placement.actor = placed  # type: ignore[method-assign]


class Hosted:
    """Stands for Ray's handle of an engine, which a host stands for."""

    def __init__(self, host: Any, index: int) -> None:
        self._host, self._index, self._actor_id = host, index, host._actor_id

    def remote(self) -> Hosted:
        """Stand for the creation of the actor."""
        return self

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return HostedMethod(self._host.call, self._index, method)


@dataclasses.dataclass
class HostedMethod:
    call: Any
    index: int
    method: str

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self.call.remote(self.index, self.method, args, kwargs)

    def options(self, **options: Any) -> HostedMethod:
        return dataclasses.replace(self, call=self.call.options(**options))


@tallied
class ScriptedEngine(Answering, Watched):
    """Answers the requests of training when its host lets it, one after the other; others at once."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host, self._version, self._asked = host, 0, 0

    async def start(self, *_: Any, **__: Any) -> None: ...

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        self._asked += 1
        await self._host.turn(self._asked * request.n)
        place, self._asked = self._asked, self._asked - 1
        await asyncio.sleep(place * _PACE_S)
        stop, length = request.sampling.stop_token_ids[0], request.sampling.max_tokens
        ordinary = sorted(set(request.prompt) - set(request.sampling.stop_token_ids))
        spans = ((0, length, self._version),)
        tokens = ((*random.choices(ordinary, k=length - 1), stop) for _ in range(request.n))
        return [Completion(each, tuple((-np.random.random(length)).tolist()), spans, "stop") for each in tokens]

    async def score(self, token_ids: list[int], images: tuple[str, ...] = ()) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def connect(self, link: Any, first: int) -> None: ...

    async def respond(self) -> int:
        return self._version

    async def pause(self, keep_cache: bool = False) -> None: ...

    async def receive(self, number: int, version: int) -> EngineWeights:
        self._version = version
        return EngineWeights(version, ("digest",))

    async def resume(self) -> None: ...


class ScriptedRank:
    """Answers the calls of a rank. Rank 0 of the run holds some steps."""

    def __init__(self, host: Host, index: int, trainer: Handle[Mailbox]) -> None:
        self._host, self._index, self._trainer, self._steps = host, index, trainer, 0

    async def run(self) -> None:
        await self._trainer.call(Mailbox.ready, self._index, None)
        number, answer = 0, None
        while (call := await self._trainer.call(Mailbox.next_call, self._index, number, answer)) is not None:
            number, answer = number + 1, await getattr(self, call.method)(*call.args, **call.kwargs)

    async def open_stage(self, *_: Any) -> None: ...

    async def train(self, lease: Lease) -> Any:
        await asyncio.gather(*{part.ref for part in lease.shares[self._index].parts})
        self._steps += 1
        if self._index == 0:
            await self._host.hold(self._steps)
        return result()

    async def locate(self, timeout_s: float) -> Any:
        return None if self._index else ("127.0.0.1", 1)

    async def connect(self, link: Any) -> None: ...

    async def send(self, number: int, version: int, bucket_bytes: int) -> SendReport:
        return SendReport("digest", 0)

    async def score(self, sequences: list[list[int]], images: Any = None) -> list[list[float]]:
        return [[-1.0] * (len(tokens) - 1) for tokens in sequences]

    async def checkpoint(self, folder: Path) -> None:
        self._trainer.call(Mailbox.wrote, self._index, folder, None)

    save = checkpoint


class Host:
    """Simulates the engines and ranks of one GPU in eight. Host 0 pauses at the steps in ``held``. When no request has
    come for a while, the oldest are answered, all but ``in_flight`` of them."""

    def __init__(self, held: Sequence[int], in_flight: int) -> None:
        self._engines: dict[int, ScriptedEngine] = {}
        self._held, self._in_flight, self._open = {*held}, in_flight, asyncio.Event()
        self._waiting = deque[asyncio.Future[None]]()
        self._opening: asyncio.TimerHandle | None = None
        self._reached: asyncio.Queue[int] = asyncio.Queue()
        self._most = 0

    async def call(self, index: int, method: str, args: Any, kwargs: Any) -> Any:
        if index not in self._engines:
            self._engines[index] = ScriptedEngine(self)
        return await getattr(self._engines[index], method)(*args, **kwargs)

    async def run_ranks(self, setup: RankSetup, indices: Iterable[int]) -> None:
        await asyncio.gather(*(ScriptedRank(self, index, setup.trainer).run() for index in indices))

    async def turn(self, of_engine: int) -> None:
        """Wait until a request is to be answered; its engine has so many answers in flight."""
        self._most = max(self._most, of_engine)
        self._waiting.append(asked := asyncio.get_running_loop().create_future())
        if self._opening is not None:
            self._opening.cancel()
        self._opening = asyncio.get_running_loop().call_later(_QUIET_S, self._answer)
        await asked

    def _answer(self) -> None:
        while len(self._waiting) > self._in_flight:
            self._waiting.popleft().set_result(None)

    async def hold(self, step: int) -> None:
        if step in self._held:
            self._open.clear()
            self._reached.put_nowait(step)
            await self._open.wait()

    async def held(self) -> int:
        """Wait for the next step that is held; return its number."""
        return await self._reached.get()

    async def go(self) -> None:
        """Continue the step that is held."""
        self._open.set()

    async def tally(self, sizing: bool = False) -> Counter[tuple[str, str]]:
        return sum([await engine.tally(sizing) for engine in self._engines.values()], Counter())  # type: ignore[attr-defined]

    async def most(self) -> int:
        """Return the most answers that an engine had in flight."""
        return self._most


@functools.cache
def hosts() -> list[Any]:
    return [ray.get_actor(f"host-{index}", namespace=NAMESPACE) for index in range(HOSTS)]
