"""Actors of one process in simulated time, which may be killed at any moment: what Ray promises of them, without Ray.

A call arrives after a random time, and so does its answer. The death of an actor cancels its tasks, loses its objects,
and fails its calls; those of an actor that is restarted under its handle are repeated, unless the caller forbids it.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import itertools
import random
import selectors
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError

from rayrft.runtime.handle import Handle

_LATENCY_S = 0.002
_CREATED_S = 0.02
_RESTARTED_S = 0.3
_NOTICED_S = 0.01
"""Longest times until a call or answer has arrived, an actor is created or restarted, and its death is known."""

_life: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
"""The process that is running; None: the driver's."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer when nothing else is left to run, and does in a turn of its own what is for a thread."""

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self._now = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            assert timeout is not None, f"a deadlock of {describe_tasks(self)}"
            self._now += max(timeout, 0.0)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]
        self.set_task_factory(_make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        async def work() -> Any:
            found = function(*arguments)
            return await found if asyncio.iscoroutine(found) else found

        return self.create_task(work())


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Any = None) -> asyncio.Task[Any]:
    """Create a task that dies with the process that creates it, or that its context is of."""
    task = asyncio.Task(coroutine, loop=loop, context=context)
    if (life := (context and context.get(_life)) or _life.get()) is not None:
        if context is not None:
            context.run(_life.set, life)
        life.tasks[task] = None
        task.add_done_callback(lambda done: life.tasks.pop(done, None))
        if not life.alive:
            task.cancel()
    return task


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Return one line per task: its name and what it awaits."""
    lines = []
    for task in asyncio.all_tasks(loop):
        frames, awaited = [], task.get_coro()
        while awaited is not None and hasattr(awaited, "cr_code"):
            frame = awaited.cr_frame
            frames.append(f"{awaited.__qualname__}:{frame.f_lineno if frame else '?'}")
            awaited = awaited.cr_await
        lines.append(" > ".join(frames))
    return "\n".join(f"{count} x {line}" for line, count in Counter(lines).most_common())


@dataclass(eq=False)
class Life:
    """A process of an actor, from its creation to its death."""

    number: int
    name: str
    target: Any = None
    alive: bool = True
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    children: list[Actor] = field(default_factory=list)
    """Actors that it owns, which die with it."""
    calls: dict[_Call, None] = field(default_factory=dict)
    """In flight."""
    awaited: dict[asyncio.Future[Any], None] = field(default_factory=dict)
    """Answers to calls that it has made."""


@dataclass(eq=False)
class _Call:
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    retried: bool
    """Whether it is repeated after a restart."""
    holder: Life | None
    answer: asyncio.Future[Any]

    def resolve(self, result: Any = None, error: BaseException | None = None) -> None:
        if self.answer.done() or (self.holder is not None and not self.holder.alive):
            return
        if error is None:
            self.answer.set_result(sent(result, self.holder))
        else:
            self.answer.set_exception(error)
            self.answer.exception()  # nobody needs to ask for it


class Actor:
    """An actor, by whatever process it is."""

    def __init__(self, world: World, name: str, make: Callable[[Life], Any], restarts: bool) -> None:
        self.world, self.name, self.restarts = world, name, restarts
        self._make = make
        self.dead = False
        self.life: Life | None = None
        """None while it is being created or restarted."""
        self._queue: list[_Call] = []
        self._sent: dict[Life | None, float] = {}
        """When the last call of each process arrives: they arrive in order."""
        self._later(_CREATED_S, self._begin)

    def call(self, call: _Call) -> None:
        if call.holder is not None and not call.holder.alive:
            return
        loop = self.world.loop
        arrives = max(loop.time() + self.world.chance.uniform(0, _LATENCY_S), self._sent.get(call.holder, 0.0) + 1e-6)
        self._sent[call.holder] = arrives
        loop.call_at(arrives, self._arrive, call, context=contextvars.Context())
        if self.world.repeated is not None and self.world.chance.random() < self.world.repeated(call.method):
            late = self.world.chance.expovariate(1 / self.world.chance.choice((0.02, 0.5, 3.0)))
            loop.call_later(late, self._arrive, call, context=contextvars.Context())

    def kill(self, *, restart: bool) -> None:
        """Kill its process; without ``restart``, for good."""
        if self.dead:
            return
        life, self.life = self.life, None
        self.dead = not (restart and self.restarts)
        if life is not None:
            self.world.end(life)
            calls = list(life.calls)
            self._later(_NOTICED_S, lambda: [self._repeat(call) for call in calls])
            if not self.dead:
                self._later(_RESTARTED_S, self._begin)
        if self.dead:
            self._later(_NOTICED_S, self._refuse)

    @property
    def starting(self) -> bool:
        """Whether it is being created or restarted."""
        return self.life is None and not self.dead

    def _later(self, longest: float, do: Callable[[], object]) -> None:
        self.world.loop.call_later(self.world.chance.uniform(0, longest), do, context=contextvars.Context())

    def _refuse(self) -> None:
        queue, self._queue = self._queue, []
        for call in queue:
            call.resolve(error=ActorDiedError())

    def _repeat(self, call: _Call) -> None:
        if not self.dead and not call.retried:
            return call.resolve(error=ActorUnavailableError("its process died", None))
        self._arrive(call)

    def _begin(self) -> None:
        if self.dead or self.life is not None:
            return
        self.life = life = Life(next(self.world.numbers), self.name)
        self.world.begun[self.name] += 1
        contextvars.Context().run(self._create, life)
        queue, self._queue = self._queue, []
        for call in queue:
            self._arrive(call)

    def _create(self, life: Life) -> None:
        _life.set(life)
        life.target = self._make(life)

    def _arrive(self, call: _Call) -> None:
        if self.dead:
            call.resolve(error=ActorDiedError())
        elif self.life is not None:
            self._start(self.life, call)
        elif call.retried or not self.restarts:
            self._queue.append(call)
        else:
            call.resolve(error=ActorUnavailableError("it is being restarted", None))

    def _start(self, life: Life, call: _Call) -> None:
        life.calls[call] = None
        context = contextvars.Context()
        context.run(_life.set, life)
        arguments, keywords = sent((call.arguments, call.keywords), life)
        method = _pid if call.method == "pid" else getattr(life.target, call.method)
        work = method(life) if call.method == "pid" else method(*arguments, **keywords)
        task = self.world.loop.create_task(work, context=context)
        task.add_done_callback(lambda done: self._ended(life, call, done), context=contextvars.Context())

    def _ended(self, life: Life, call: _Call, task: asyncio.Task[Any]) -> None:
        error = None
        if not task.cancelled() and (error := task.exception()) is not None:
            error = RayTaskError(call.method, "", error, "rank", 1, "127.0.0.1").as_instanceof_cause()
        if not life.alive or task.cancelled():
            return
        result = None if error else task.result()
        if error is None:
            for do in self.world.on_result:
                do(life, call.method, call.arguments, result)

        def answer() -> None:
            if life.calls.pop(call, call) is None and life.alive:
                call.resolve(result, error)

        self._later(_LATENCY_S, answer)


async def _pid(life: Life) -> int:
    return life.number


class Remote:
    """A handle of an actor, as Ray's, held by a process."""

    def __init__(self, actor: Actor, holder: Life | None) -> None:
        self._actor, self._holder = actor, holder

    def __getattr__(self, method: str) -> _Method:
        if method.startswith("__"):
            raise AttributeError(method)
        return _Method(self._actor, self._holder, method)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._actor is other._actor

    def __hash__(self) -> int:
        return hash(self._actor)

    def __deepcopy__(self, memo: Any) -> Remote:
        return Remote(self._actor, _receiver.get())


@dataclass(frozen=True)
class _Method:
    actor: Actor
    holder: Life | None
    name: str
    retried: bool = True

    def options(self, max_task_retries: int) -> _Method:
        return _Method(self.actor, self.holder, self.name, bool(max_task_retries))

    def remote(self, *arguments: Any, **keywords: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        if (holder := self.holder) is not None:
            if not holder.alive:
                answer.cancel()
            holder.awaited[answer] = None
            answer.add_done_callback(lambda done: holder.awaited.pop(done, None))
        retried = self.retried and self.actor.restarts
        arguments, keywords = sent((arguments, keywords), self.holder)
        self.actor.call(_Call(self.name, arguments, keywords, retried, self.holder, answer))
        return answer


class Ref:
    """A reference to an object, which is lost with its owner."""

    def __init__(self, value: Any, owner: Life | None) -> None:
        self._value, self._owner = value, owner

    def get(self) -> Any:
        if self._owner is not None and not self._owner.alive:
            raise ObjectLostError("an object", None, "")
        return self._value

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        return self.get()

    def __deepcopy__(self, memo: Any) -> Ref:
        return self


_receiver: contextvars.ContextVar[Life | None] = contextvars.ContextVar("receiver", default=None)


def sent(value: Any, receiver: Life | None) -> Any:
    """Return a copy as another process receives it."""
    token = _receiver.set(receiver)
    try:
        return copy.deepcopy(value)
    finally:
        _receiver.reset(token)


class World:
    """All actors of a run."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop, self.chance = loop, random.Random(seed)
        self.numbers = itertools.count(1)
        self.actors: list[Actor] = []
        self.begun = Counter[str]()
        """Processes of actors, by name."""
        self.on_end: list[Callable[[Life], None]] = []
        """Called with each process that ends."""
        self.on_result: list[Callable[[Life, str, Any, Any], None]] = []
        """Called with each call that ends well: its process, method, arguments and result."""
        self.repeated: Callable[[str], float] | None = None
        """How often a call of a method is executed once more, late, as where a connection is lost for a moment."""
        self.problems: list[str] = []
        """What was wrong."""

    def create(
        self, name: str, make: Callable[[Life], Any], *, restarts: bool = False, owner: Life | None = None
    ) -> Handle[Any]:
        if any(each.name == name for each in self.living):
            self.problems.append(f"{name} is created while its predecessor is alive")
        actor = Actor(self, name, make, restarts)
        self.actors.append(actor)
        if owner is not None:
            owner.children.append(actor)
        return Handle(name, Remote(actor, _life.get()))

    def handle(self, name: str) -> Handle[Any] | None:
        """Return the handle of a living actor, as the process that is running has it."""
        return next((Handle(name, Remote(actor, _life.get())) for actor in self.living if actor.name == name), None)

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.dead]

    def end(self, life: Life) -> None:
        life.alive = False
        for task in [*life.tasks, *life.awaited]:
            task.cancel()
        for child in life.children:
            child.kill(restart=False)
        for do in self.on_end:
            do(life)

    def put(self, value: Any) -> Ref:
        return Ref(value, _life.get())

    def kill(self, remote: Remote, *, no_restart: bool = True) -> None:
        """Stand for ``ray.kill``."""
        remote._actor.kill(restart=not no_restart)
