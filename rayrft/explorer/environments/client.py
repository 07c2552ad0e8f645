"""Environments for attempts: where they live, their deadlines and limits, and what becomes of their failures."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rayrft.config.explorer import EnvironmentConfig
from rayrft.errors import CallFailed, CallTimeout, ConfigError, EnvironmentFailed, EnvironmentTimeout, ProcessDied
from rayrft.experience import Task
from rayrft.explorer.environments.base import Environment, Observation, Pictured, Step, environment_factory
from rayrft.runtime.processes.pool import ProcessPool
from rayrft.runtime.processes.worker import Worker, call_here, failed_call
from rayrft.runtime.waits import in_thread

log = logging.getLogger(__name__)

_CREATE_S = 60.0
"""Seconds in which a process must have created its environment, if a step has not more."""
_INFO_BYTES = 64 << 10
"""Room for a step's ``info`` beside its observation, in the answer of a process."""


class EnvironmentClient:
    """The environment of one attempt, as its workflow sees it. ``seed`` is that of the episode."""

    def __init__(self, environments: Environments, seed: int, leases: contextlib.AsyncExitStack) -> None:
        self._environments = environments
        self._leases = leases
        self._callee: Worker | _Local | None = None
        self.seed = seed

    async def reset(self, task: Task) -> Observation:
        """Start an episode on the task, and return the first observation.

        Where the environment's process dies on it, another one is tried. Raises EnvironmentFailed.
        """
        config = self._environments.config
        retries_left = config.reset_retries
        while True:
            try:
                if self._callee is None:
                    await self.lease()
                assert self._callee is not None
                return self._checked(await self._callee.call("reset", task, self.seed, deadline_s=config.deadline_s))
            except CallFailed as error:
                if not isinstance(error, ProcessDied) or not retries_left:
                    raise _failure(error) from error
                retries_left -= 1
                self._callee = None
                await self._leases.aclose()

    async def lease(self) -> None:
        """Have an environment to oneself. Raises CallFailed if none can be created."""
        self._callee = await self._leases.enter_async_context(self._environments.lease())

    async def step(self, action: str) -> Step:
        """Act. Raises EnvironmentFailed."""
        if self._callee is None:
            raise EnvironmentFailed("reset() has not been awaited", field="step")
        try:
            step = await self._callee.call("step", action, deadline_s=self._environments.config.deadline_s)
        except CallFailed as error:
            raise _failure(error) from error
        if not isinstance(step, Step):
            raise EnvironmentFailed(f"step() returned {type(step).__name__}, not a Step", field="step")
        if not isinstance(step.reward, int | float) or not math.isfinite(step.reward):
            raise EnvironmentFailed("the reward is not a finite number", field="step", value=step.reward)
        self._checked(step.observation)
        return step

    def _checked(self, observation: Any) -> Observation:
        """Return an observation. Raises EnvironmentFailed if it is none, or longer than what the config allows."""
        said = observation.text if isinstance(observation, Pictured) else observation
        if isinstance(said, str):
            size = len(said)
        elif isinstance(said, list) and all(
            isinstance(message, dict) and all(isinstance(text, str) for text in message.values()) for message in said
        ):
            size = sum(len(text) for message in said for text in message.values())
        else:
            raise EnvironmentFailed(f"an observation is text or messages of text, not {said!r:.200}")
        limit = self._environments.config.observation_limit
        if size > limit:
            remedy = "shorten it, or raise explorer.environment.observation_limit"
            problem = f"an observation has more than {limit} characters"
            raise EnvironmentFailed(problem, remedy, field="observation", value=size)
        return observation


class Environments:
    """Gives each attempt an environment of its own: in this event loop, or in a process of a pool."""

    def __init__(self, config: EnvironmentConfig, plugins: Sequence[Path] = ()) -> None:
        """Raises ConfigError if such environments cannot be created."""
        self.config = config
        self._create = environment_factory(config)
        self._pool: ProcessPool | None = None
        coroutine = inspect.iscoroutinefunction(getattr(self._create.func, "step", None))
        if not coroutine or getattr(self._create.func, "blocking", False):
            prepare = getattr(self._create.func, "prepare", None)
            self._pool = ProcessPool(
                self._create,
                processes=config.processes,
                spares=config.spares,
                plugins=plugins,
                # UTF-8 has at most 4 bytes for a character.
                answer_limit=4 * config.observation_limit + config.image_bytes + _INFO_BYTES,
                start_s=max(config.deadline_s, _CREATE_S),
                warm_up=partial(prepare, **self._create.keywords) if prepare else None,
            )

    @contextlib.asynccontextmanager
    async def attempt(self, seed: int) -> AsyncIterator[EnvironmentClient]:
        """The environment for one attempt, closed in the end. Waits until a process is free, if it takes one.

        Raises EnvironmentFailed if it cannot be created.
        """
        async with contextlib.AsyncExitStack() as leases:
            client = EnvironmentClient(self, seed, leases)
            try:
                with contextlib.suppress(ProcessDied):  # reset() tries again
                    await client.lease()
            except CallFailed as error:
                raise _failure(error) from error
            yield client

    def lease(self) -> contextlib.AbstractAsyncContextManager[Worker | _Local]:
        """An environment that nobody has acted in. Raises CallFailed if it cannot be created."""
        if self._pool is not None:
            return self._pool.lease()
        return contextlib.aclosing(_Local(self._create, self.config.deadline_s))

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await self._pool.close()


def check_environment(config: EnvironmentConfig, plugins: Sequence[Path] = ()) -> None:
    """Create an environment as an attempt does, and close it, once its class's own ``check`` has passed. Raises
    ConfigError if it cannot be created."""
    create = environment_factory(config)
    if (check := getattr(create.func, "check", None)) is not None:
        check(**create.keywords)

    async def create_once() -> None:
        environments = Environments(config.model_copy(update={"processes": 1, "spares": 0}), plugins)
        try:
            async with environments.lease() as environment:
                if isinstance(environment, Worker):  # the pool would kill its process
                    with contextlib.suppress(CallFailed):
                        await environment.call("close", deadline_s=config.deadline_s)
        finally:
            await environments.close()

    try:
        in_thread(create_once)
    except CallFailed as error:
        how = f" ({error.value})" if error.value else ""
        problem = f"environment {config.name!r} cannot be created: {error.problem}{how}"
        remedy = error.remedy or "correct the options, the class, or what it needs on this machine"
        raise ConfigError(problem, remedy, field="explorer.environment.options", value=config.options) from None


class _Local:
    """An environment in this event loop, called like one in a process."""

    def __init__(self, create: Callable[[], Environment], deadline_s: float) -> None:
        try:
            self._environment = create()
        except (Exception, SystemExit) as error:  # a user's class may raise anything
            raise failed_call("create", error) from error
        self._deadline_s = deadline_s

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        return await call_here(method, lambda: getattr(self._environment, method)(*arguments), deadline_s)

    async def aclose(self) -> None:
        """Close it. What has been acted in it is as good as before, so a failure is only logged."""
        try:
            await self.call("close", deadline_s=self._deadline_s)
        except CallFailed as error:
            log.warning("environment: %s", error)


def _failure(error: CallFailed) -> EnvironmentFailed:
    """Convert the failure of a call to that of the environment, with the traceback from where it was raised."""
    kind = EnvironmentTimeout if isinstance(error, CallTimeout) else EnvironmentFailed
    remedy = "raise explorer.environment.deadline_s" if kind is EnvironmentTimeout else error.remedy
    failure = kind(error.problem, field=f"environment.{error.field}", value=error.value, remedy=remedy)
    for note in getattr(error, "__notes__", []):
        failure.add_note(note)
    return failure
