"""Handles of actors: calls by method, which the type checker follows from process to process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from rayrft.errors import ActorDied, ActorUnreachable, NoRoom, RayrftError
from rayrft.files import held
from rayrft.runtime import ray_api
from rayrft.runtime.ray_api import ray
from rayrft.runtime.waits import WaitReport, Waits

NAMESPACE = "rayrft"
"""The namespace of all named actors of runs."""
_RETRY_S = 1.0
"""Seconds between calls of an actor that cannot be reached: Ray has no event for its return."""
_ANSWER_S = 300.0
"""Deadline of calls: the Buffer may have to read freed blocks back from the log before it answers."""
_CANCEL_S = 5.0
_REMEDY = "see its log in the Ray dashboard"
_USED = re.compile(r"\(IP: ([^,]+),.*was (\S+) used / (\S+) limit")
"""In the text of Ray's OutOfMemoryError."""
_SHORT = {
    "OutOfMemoryError": "the memory of its node was nearly used up{}, so Ray killed it; lower buffer.memory_bytes, "
    "trainer.micro_batch_tokens or the number of engines and reward processes",
    "ObjectStoreFullError": "Ray's object store is full; lower buffer.memory_bytes or raise Ray's object_store_memory",
    "OutOfDiskError": "Ray's object store is full, and so is the disk to which it spills; free disk space on that node",
}
"""What is short at Ray's errors, and how to get more of it."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class Watched:
    """The base of actors whose death can be awaited. Without GPUs of their own they see none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        ray_api.hide_gpus()
        return super().__new__(cls)

    async def watch(self) -> None:
        """Never return: a caller that awaits it learns at once when the actor dies."""
        await asyncio.Event().wait()

    async def idle(self) -> None:
        """Never return, whatever `watch` raises: a caller that awaits it learns when the actor's process has ended."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """Return the actor's process id."""
        return os.getpid()

    async def waiting(self) -> WaitReport | None:
        """Return the actor's waits at once, if it keeps any: a heartbeat."""
        return None


class Handle(Generic[T_co]):
    """A handle of an actor of class ``T`` named ``name``; it may be sent to other processes.

    ``await handle.call(Buffer.ack, step)`` calls `Buffer.ack` at the actor. ``actor`` is Ray's handle, and ``options``
    are Ray's options of the calls.
    """

    def __init__(self, name: str, actor: Any, **options: Any) -> None:
        self.name = name
        self.actor = actor
        self._options = options

    @overload
    def call(
        self, method: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[R]: ...

    @overload
    def call(self, method: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...

    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Start the method at the actor, whether or not the result is awaited."""
        return self._start(method, args, kwargs)

    @property
    def untracked(self) -> Handle[T_co]:
        """A plain handle of the actor."""
        return Handle(self.name, self.actor)

    @property
    def pinned(self) -> Self:
        """A handle like this one of the present actor, and not of its successors: see `succeed`."""
        handle = object.__new__(type(self))
        vars(handle).update(vars(self))
        return handle

    def with_options(self, **options: Any) -> Handle[T_co]:
        """Return a handle whose calls have these of Ray's options."""
        return Handle(self.name, self.actor, **options)

    def kill(self, *, restart: bool = False) -> None:
        """Kill the actor; with ``restart``, Ray restarts it if it was created so."""
        ray.kill(self.actor, no_restart=not restart)

    def succeed(self, successor: Handle[Any]) -> None:
        """Let this handle be that of a dead actor's successor; handles in other processes are not changed."""
        self.actor = successor.actor

    def _start(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[Any]:
        remote = getattr(self.actor, method.__name__)
        if self._options:
            remote = remote.options(**self._options)
        return remote.remote(*args, **kwargs)


class TrackedHandle(Handle[T_co]):
    """A handle whose calls are recorded as ``waits`` of the caller, for use in its event loop. Sent to another process
    it becomes a plain handle. ``endless`` calls, which last as long as the run or block while there is no work, are not
    recorded. ``labels`` name a call from its arguments where the method's name is not enough. The trace has calls by
    these names, but not the ``untraced`` ones.
    """

    def __init__(
        self,
        handle: Handle[T_co],
        waits: Waits,
        *,
        endless: Collection[Callable[Concatenate[T_co, ...], Any]] = (),
        labels: Mapping[Callable[Concatenate[T_co, ...], Any], Callable[..., str]] | None = None,
        untraced: Collection[Callable[Concatenate[T_co, ...], Any]] = (),
    ) -> None:
        super().__init__(handle.name, handle.actor)
        self._waits = waits
        self._endless, self._untraced = endless, untraced
        self._labels = labels or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.name, self.actor)

    def _start(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[Any]:
        answer = super()._start(method, args, kwargs)
        if method in self._endless:
            return answer
        label = self._labels[method](*args, **kwargs) if method in self._labels else method.__name__
        return asyncio.ensure_future(self._wait(label, answer, "" if method in self._untraced else label))

    async def _wait(self, what: str, answer: Awaitable[Any], name: str) -> Any:
        with self._waits.on(self.name, what, name=name):
            return await answer


def once(method: Callable[Concatenate[T, P], Awaitable[R]]) -> Callable[Concatenate[T, P], Coroutine[Any, Any, R]]:
    """Make all calls of an actor's method one call, whose result each of them returns: a restarted Master calls it
    again, as it does not know whether its predecessor did."""
    name = f"_once_{method.__name__}"

    @wraps(method)
    async def shared(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if name not in vars(self):
            setattr(self, name, asyncio.ensure_future(method(self, *args, **kwargs)))
        return cast(R, await asyncio.shield(getattr(self, name)))

    return shared


def is_restarted() -> bool:
    """Return whether this process is that of an actor which Ray has restarted."""
    if not ray.is_initialized():  # else Ray would start
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


def find_actor(name: str) -> Handle[Any] | None:
    """Return the handle of a living actor of that name; None if there is none."""
    try:
        return Handle(name.rpartition(":")[2], ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        return None


def fetch(call: Awaitable[R], who: str = "", deadline_s: float | None = None) -> R:
    """Block until a call of a `Handle`, or a task of Ray, has answered; outside of event loops. Raises the errors of
    ``ray.get``, and ActorUnreachable for ``who`` if it cannot be reached, or does not answer within ``deadline_s``."""
    try:
        return ray.get(call, timeout=deadline_s)
    except ray.exceptions.GetTimeoutError:
        problem = f"no answer for {deadline_s:g} s"
    except ray.exceptions.ActorUnavailableError:
        problem = "it cannot be reached"
    raise ActorUnreachable(problem, "check it in the Ray dashboard, and try again", field=who)


def answer(call: Awaitable[R], who: str, deadline_s: float | None = None) -> R:
    """Block until a call has answered, as `fetch`, by default for `_ANSWER_S`. Raises its `root_cause` if it fails."""
    try:
        return fetch(call, who, _ANSWER_S if deadline_s is None else deadline_s)
    except (*ray_api.ACTOR_ERRORS, ray.exceptions.RayTaskError) as error:
        raise root_cause(error, who) from None


@held
def put_object(value: Any) -> Any:
    """Put an object in Ray's object store; return its reference. Raises NoRoom if the store stays full: see `held`."""
    try:
        return ray.put(value)
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise NoRoom(death_reason(error), field="object store") from None


def cancel_calls(calls: Collection[Awaitable[Any]]) -> None:
    """Cancel calls before their actors are killed: Ray would print that it repeats them."""
    for call in calls:
        ray.cancel(call, recursive=False)
    if calls:
        ray.wait([*calls], num_returns=len(calls), timeout=_CANCEL_S)


def end(actors: Collection[Handle[Watched]]) -> None:
    """Kill actors, in this order; block until their names and memory are free for others."""
    watches = [actor.with_options(max_task_retries=0).call(Watched.watch) for actor in actors]
    for actor in actors:
        actor.kill()
    ray.wait(watches, num_returns=len(watches))


async def fence(actor: Handle[Watched]) -> None:
    """Kill an actor, in an event loop; return when its process has ended, and its name and resources are free. One that
    was stopped by a signal may be there for five more seconds."""
    ended = asyncio.ensure_future(when_reachable(lambda: actor.untracked.call(Watched.idle)))
    actor.kill()
    with contextlib.suppress(*ray_api.ACTOR_ERRORS):
        await ended


def until_dead(actor: Handle[Watched]) -> None:
    """Block until an actor has died; outside of event loops. Raises the root cause if it fails."""
    try:
        with contextlib.suppress(*ray_api.ACTOR_ERRORS):
            fetch_when_reachable(lambda: actor.call(Watched.watch))
    except ray.exceptions.RayTaskError as error:
        raise root_cause(error, actor.name) from None


def fetch_when_reachable(call: Callable[[], Awaitable[R]]) -> R:
    """Make a call again while its actor cannot be reached; block for its result. Raises the errors of ``ray.get``."""
    while True:
        try:
            return fetch(call())
        except ActorUnreachable:
            time.sleep(_RETRY_S)


async def until_failed(actor: Handle[Watched]) -> None:
    """Return only by raising the error with which an actor fails, or that of its death."""
    await when_reachable(lambda: actor.with_options(max_task_retries=0).call(Watched.watch))


async def until_restarted(actor: Handle[Watched], pid: int) -> tuple[RayrftError, float]:
    """Return why an actor's process of this id died, and when, once Ray has restarted the actor. Raises the error of an
    actor that Ray fails to restart."""
    alive = time.monotonic()
    while await actor.untracked.call(Watched.pid) == pid:  # also if it could not be reached for a while
        alive = time.monotonic()
        with contextlib.suppress(ray.exceptions.ActorUnavailableError):
            await actor.with_options(max_task_retries=0).call(Watched.watch)
    ago = time.time() - await asyncio.to_thread(ended_at, actor)
    died = max(alive, time.monotonic() - max(ago, 0.0))  # whatever the clocks of two nodes say
    return ActorDied("its process died", _REMEDY, field=actor.name), died


def ended_at(actor: Handle[Watched]) -> float:
    """Return the time at which the process ended that had an actor before its present one: calls fail a second or two
    later, when Ray may have restarted it. Now, if Ray has forgotten that process."""
    records = ray_api.state._connect_and_get_accessor()
    known = ray_api.ActorTableData.FromString(records.get_actor_info(actor.actor._actor_id)).previous_incarnations
    worker = records.get_worker_info(ray.WorkerID(known[-1].worker_id)) if known else None
    return time.time() if worker is None else ray_api.WorkerTableData.FromString(worker).end_time_ms / 1000


async def when_reachable(call: Callable[[], Awaitable[R]], patience_s: float = math.inf) -> R:
    """Make a call, and make it again while its actor cannot be reached; return its result, in an event loop. Raises
    Ray's error once ``patience_s`` have passed."""
    began = time.monotonic()
    while True:
        try:
            return await call()
        except ray.exceptions.ActorUnavailableError:
            if time.monotonic() - began >= patience_s:
                raise
            await asyncio.sleep(_RETRY_S)


def death_reason(error: Any) -> str:
    """Return why an actor died or cannot be reached, or what it lacks, from Ray's error: one line without its ids."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "it cannot be reached"
    if short := _SHORT.get(type(error).__name__):
        used = _USED.search(str(error))
        return short.format(" ({1} of {2} on {0})".format(*used.groups()) if used else "")
    lines = [line for line in str(error).splitlines() if line.strip()]
    if error.actor_init_failed:  # a traceback, which ends with what was raised
        return lines[-1].rpartition("rayrft.errors.")[2].rstrip(".")
    # Lines: a heading, the actor's properties (indented by tabs), and the reason.
    reason = next((line for line in lines[1:] if not line.startswith("\t")), lines[0])
    return reason.partition(" Some common causes")[0].rstrip(".")


def root_cause(error: BaseException, actor: str = "master") -> RayrftError:
    """Unwrap Ray's wrappers of an error and return it as a RayrftError, about ``actor`` if it is not typed."""
    if isinstance(error, BaseExceptionGroup):
        return root_cause(error.exceptions[0], actor)
    # First: Ray's wrapper of a RayrftError is one, too, whose text is a traceback.
    if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        if type(error.cause) is ray.exceptions.RayError:  # what was raised cannot be pickled: its traceback is left
            lines = error.traceback_str.rstrip().splitlines()
            first = max((at for at, line in enumerate(lines) if not line.startswith(" ")), default=0)
            return ActorDied(" ".join(map(str.strip, lines[first:]))[:1000].rstrip("."), _REMEDY, field=actor)
        return root_cause(error.cause, actor)
    if isinstance(error, RayrftError):
        return error
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return ActorUnreachable(death_reason(error), _REMEDY, field=actor)
    if isinstance(error, ray.exceptions.RayActorError):
        return ActorDied(f"the actor died: {death_reason(error)}", _REMEDY, field=actor)
    if type(error).__name__ in _SHORT:
        return ActorDied(death_reason(error), field=actor)
    text = str(error).strip().splitlines() or ["no message"]
    return ActorDied(f"{type(error).__name__}: {text[0]}", _REMEDY, field=actor)
