"""Workflows in processes: an attempt that blocks, hangs, leaks or ends its process harms no other.

The model, its trajectories and the environment stay in the Explorer. The process has handles to them, so that a row
holds what was sampled and observed, whatever the process does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from rayrft.errors import ActorDied, ModelError
from rayrft.experience import Task
from rayrft.explorer.engines.auxiliary import AuxiliaryModel
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.registry import loaded_plugins
from rayrft.runtime.processes.pool import ProcessPool
from rayrft.runtime.processes.remote import ErrorReply, Remote, call_object, raised

_LARGEST = 64 << 20
"""Bytes of the largest request of a process, such as an observation with images."""


class RemoteModel(Remote, of=Model, attributes="repeat max_tokens max_length", without="queued recorded"):
    """A handle to the `Model` of an attempt."""


class RemoteTrajectory(
    Remote,
    of=Trajectory,
    attributes="messages images stop_reason result",
    without="record step_rewards_by_token prompted to_experience",
):
    """A handle to a `Trajectory`."""


class RemoteAuxiliary(Remote, of=AuxiliaryModel):
    """A handle to an `AuxiliaryModel`."""


class RemoteEnvironment(Remote, of=EnvironmentClient, attributes="seed", without="lease"):
    """A handle to the `EnvironmentClient` of an attempt."""


_HANDLES = {each._of: each for each in (RemoteModel, RemoteTrajectory, RemoteAuxiliary, RemoteEnvironment)}


class IsolatedWorkflow:
    """The workflow that ``create`` makes; each attempt has an instance in one of up to ``processes`` processes."""

    def __init__(self, create: Callable[[], Any], processes: int) -> None:
        host, plugins = partial(_WorkflowHost, create), loaded_plugins()
        self._pool = ProcessPool(host, processes=processes, plugins=plugins, answer_limit=_LARGEST)

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> list[Trajectory]:
        """Attempt the task."""
        attempt = _Attempt()
        arguments = task, attempt.handle(model), attempt.handle(env)
        async with contextlib.AsyncExitStack() as leases:
            with model.queued():
                worker = await leases.enter_async_context(self._pool.lease())
            made: list[int] | int = await worker.call("run", *arguments, deadline_s=math.inf, serve=attempt.serve)
        if isinstance(made, int):
            raise attempt.errors[made]
        return [attempt.objects[key] for key in made]

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()


class _Attempt:
    """The Explorer's side of an attempt: the objects of the handles, by their keys."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.errors: list[Exception] = []

    async def serve(self, key: int, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Answer a handle. Raises the errors that end the run, which no workflow may catch."""
        try:
            return self.handle(await call_object(self.objects[key], name, arguments, named))
        except (ActorDied, ModelError):
            raise
        except Exception as error:  # the workflow may catch it
            self.errors.append(error)
            return ErrorReply(error, len(self.errors) - 1)

    def handle(self, value: Any) -> Any:
        """Return a handle to an object that stays here; other values as they are."""
        if type(value) not in _HANDLES:
            return value
        self.objects.append(value)
        return _HANDLES[type(value)](len(self.objects) - 1)


class _WorkflowHost:
    """The workflow, in its process."""

    def __init__(self, create: Callable[[], Any]) -> None:
        self._workflow = create()

    async def run(self, task: Task, model: RemoteModel, env: RemoteEnvironment | None) -> list[int] | int:
        """Return the keys of the workflow's trajectories, or the number of the error that it did not catch."""
        raised.clear()
        try:
            made = await self._workflow.run(task, model, env)
        except Exception as error:
            if error in raised:
                return raised[error]
            raise
        trajectories = made if isinstance(made, list) else [made]
        if not trajectories or not all(isinstance(each, RemoteTrajectory) for each in trajectories):
            raise TypeError(f"a workflow must return a Trajectory or a list of them, not {made!r}")
        return [each.key for each in trajectories]
