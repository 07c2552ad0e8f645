"""From a task to a scored group: the repeats of a workflow, their deadlines, their failures, and their rewards."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rayrft.config import RunConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied, ModelError
from rayrft.experience import Experience, Task
from rayrft.explorer.engine import Completion, Sampling
from rayrft.explorer.trajectory import ContextFull, Generate, Model, PromptTooLong, Trajectory
from rayrft.explorer.workflow import Workflow, build_workflow
from rayrft.rewards import RewardResult

log = logging.getLogger(__name__)


class Engines(Protocol):
    """What answers requests: ``n`` continuations of one token sequence."""

    async def generate(
        self, prompt: list[int], n: int, sampling: Sampling, images: tuple[str, ...] = ()
    ) -> list[Completion]: ...


Score = Callable[[Task, list[str]], Awaitable[list[RewardResult]]]
"""One result for each response to a task."""


@dataclass(frozen=True)
class Rollout:
    """The rows of the repeats that came, with a reward result each, and why the others did not."""

    rows: list[Experience]
    results: list[RewardResult]
    failed: Counter[str] = field(default_factory=Counter)
    """Repeats without a row, by reason: ``prompt_too_long``, ``timeout``, ``workflow_error``."""
    problem: str | None = None
    """The last error of a workflow, in one line."""


class BusyClock:
    """Wall time during which at least one of many concurrent activities was running."""

    def __init__(self) -> None:
        self._active, self._since, self._total = 0, 0.0, 0.0

    def __enter__(self) -> None:
        if self._active == 0:
            self._since = time.monotonic()
        self._active += 1

    def __exit__(self, *_: object) -> None:
        self._active -= 1
        if self._active == 0:
            self._total += time.monotonic() - self._since

    def take(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        total = self._total + (now - self._since if self._active else 0.0)
        self._since, self._total = now, 0.0
        return total


class Runner:
    """Acts on tasks by the config's workflows. Training and evaluation go through it, and differ by ``n`` and
    ``temperature`` alone."""

    def __init__(self, config: RunConfig, tokenizer: ChatTokenizer, engines: Engines, score: Score) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._engines = engines
        self._score = score
        self._workflows: dict[str, Workflow] = {}
        self._told: set[tuple[str, str]] = set()
        self.rolling, self.scoring = BusyClock(), BusyClock()
        self._workflow(config.explorer.workflow)

    async def run(self, task: Task, name: str, n: int, temperature: float) -> Rollout:
        """Act on a task ``n`` times, side by side, and score the rows without a reward by their last turn.

        ``name`` is the group's id, from which the ids of its rows and the seeds of its requests follow. What a workflow
        raises costs that repeat. Raises ActorDied when an engine is gone.
        """
        together = _Together(self._engines, n)
        models = [self._model(name, repeat, temperature, together) for repeat in range(n)]
        attempts = [asyncio.create_task(self._attempt(task, model, name)) for model in models]
        rows, failed, problem = list[Experience](), Counter[str](), None
        try:
            with self.rolling:
                outcomes = await asyncio.gather(*attempts)
        finally:
            unfinished: list[asyncio.Future[Any]] = [*attempts, *together.answering]
            for future in unfinished:
                future.cancel()
        for outcome in outcomes:
            if isinstance(outcome, _Failure):
                failed[outcome.reason] += 1
                problem = outcome.problem or problem
            else:
                rows += outcome
        return Rollout(rows, await self._results(task, rows), failed, problem)

    async def _attempt(self, task: Task, model: Model, name: str) -> list[Experience] | _Failure:
        workflow = task.workflow or self._config.explorer.workflow
        try:
            async with asyncio.timeout(self._config.explorer.deadline_s):
                made = await self._workflow(workflow).run(task, model)
            return _rows(made, task, name, model.repeat)
        except ContextFull:
            ended = [trajectory for trajectory in model.started if trajectory.answers]
            for trajectory in ended[-1:]:
                trajectory.end_for_length()
            return _rows(ended, task, name, model.repeat) if ended else _Failure("prompt_too_long")
        except PromptTooLong:
            return _Failure("prompt_too_long")
        except TimeoutError:
            seconds = self._config.explorer.deadline_s
            return self._failure(workflow, task, "timeout", f"no end within explorer.deadline_s, {seconds:g} s", "")
        except (ActorDied, ModelError, asyncio.CancelledError):
            raise
        except Exception as error:  # a user's workflow may raise anything: it costs the repeat
            problem = f"{type(error).__name__}: {error}"
            return self._failure(workflow, task, "workflow_error", problem, traceback.format_exc())

    def _failure(self, workflow: str, task: Task, reason: str, problem: str, trace: str) -> _Failure:
        """A failure that is told in the log: the first of its kind with its traceback, the others in a line."""
        text = f"workflow {workflow!r} on task {task.id}: {problem}"
        kind = (workflow, trace[: trace.rfind("\n", 0, -1)] or problem)
        log.warning("%s\n%s" if trace and kind not in self._told else "%s%s", text, trace * (kind not in self._told))
        self._told.add(kind)
        return _Failure(reason, text)

    async def _results(self, task: Task, rows: list[Experience]) -> list[RewardResult]:
        """A result for every row: the workflow's, where it gave the row a reward, else that of its last turn."""
        unscored = [row.turns[-1]["content"] for row in rows if row.reward is None]
        with self.scoring:
            found = iter(await self._score(task, unscored) if unscored else [])
        return [
            next(found) if row.reward is None else RewardResult.of(row.reward, row.reward_components, row.error)
            for row in rows
        ]

    def _model(self, name: str, repeat: int, temperature: float, together: _Together) -> Model:
        sampling = self._config.explorer.sampling
        seed = derive_seed(self._config.seed, name) if self._config.seeds_requests else None
        return Model(
            together.of(repeat, seed),
            self._tokenizer,
            Sampling(temperature, sampling.max_tokens, (self._tokenizer.eos_id,)),
            max_prompt_tokens=sampling.max_prompt_tokens,
            max_length=self._config.model.max_length,
            repeat=repeat,
        )

    def _workflow(self, name: str) -> Workflow:
        if name not in self._workflows:
            self._workflows[name] = build_workflow(name, self._config.explorer.workflow_options.get(name, {}))
        return self._workflows[name]


@dataclass(frozen=True)
class _Failure:
    reason: str
    problem: str | None = None


class _Together:
    """Sends the first requests of the n repeats of a group as one, where they are equal and come at the same time.

    Answer k of a request with a seed is that of a request for one answer with the seed plus k: so what is sampled does
    not depend on whether they came at the same time.
    """

    def __init__(self, engines: Engines, n: int) -> None:
        self._engines = engines
        self._n = n
        self._waiting: dict[int, tuple[list[int], Sampling, tuple[str, ...], asyncio.Future[Completion]]] = {}
        self.answering: set[asyncio.Future[None]] = set()
        """Requests that are not answered yet."""

    def of(self, repeat: int, seed: int | None) -> Generate:
        """The requests of one repeat; ``seed`` is the group's."""
        calls = 0

        async def generate(prompt: list[int], sampling: Sampling, images: tuple[str, ...]) -> Completion:
            nonlocal calls
            calls += 1
            own = None if seed is None else derive_seed(seed, str(calls)) + repeat
            if calls == 1 and self._n > 1:
                return await self._first(repeat, prompt, replace(sampling, seed=own), images)
            [completion] = await self._engines.generate(prompt, 1, replace(sampling, seed=own), images)
            return completion

        return generate

    async def _first(self, repeat: int, prompt: list[int], sampling: Sampling, images: tuple[str, ...]) -> Completion:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)  # once all repeats that are ready have had their turn
        self._waiting[repeat] = (prompt, sampling, images, loop.create_future())
        return await self._waiting[repeat][-1]

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        prompt, sampling, images, _ = waiting[min(waiting)]
        asks = [(each[0], each[1].max_tokens, each[2]) for each in waiting.values()]
        futures = [waiting[repeat][-1] for repeat in sorted(waiting)]
        if len(waiting) == self._n and all(ask == asks[0] for ask in asks):
            self._begin(self._answer(futures, prompt, sampling, images))
        else:
            for prompt, sampling, images, future in waiting.values():
                self._begin(self._answer([future], prompt, sampling, images))

    def _begin(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(answering)
        self.answering.add(task)  # the loop itself does not keep it
        task.add_done_callback(self.answering.discard)

    async def _answer(
        self,
        futures: list[asyncio.Future[Completion]],
        prompt: list[int],
        sampling: Sampling,
        images: tuple[str, ...],
    ) -> None:
        try:
            completions = await self._engines.generate(prompt, len(futures), sampling, images)
        except Exception as error:  # whoever waits gets it
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        else:
            for future, completion in zip(futures, completions, strict=True):
                if not future.done():
                    future.set_result(completion)


def _rows(made: Trajectory | list[Trajectory], task: Task, name: str, repeat: int) -> list[Experience]:
    """Raises TypeError and ValueError for what is no answer of a workflow."""
    trajectories = made if isinstance(made, list) else [made]
    if not trajectories or not all(isinstance(trajectory, Trajectory) for trajectory in trajectories):
        raise TypeError(f"a workflow gives a Trajectory or a list of them, not {made!r}")
    if not all(trajectory.answers for trajectory in trajectories):
        raise ValueError("a trajectory without an answer of the model: await act() first")
    ids = [f"{name}/{repeat}"] if len(trajectories) == 1 else [f"{name}/{repeat}/{k}" for k in range(len(trajectories))]
    return [trajectory.to_experience(id, name, task) for trajectory, id in zip(trajectories, ids, strict=True)]


def derive_seed(seed: int, name: str) -> int:
    """A seed of its own for whatever has that name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little") >> 1
