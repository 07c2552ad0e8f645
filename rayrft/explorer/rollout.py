"""Rollout of a task into a scored group: the repeats of a workflow, their deadlines, failures and rewards."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from rayrft.config import RunConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied, EnvironmentFailed, EnvironmentTimeout, ModelError
from rayrft.experience import Experience, Task
from rayrft.explorer.calls import Engines, GroupCalls, Parking, derive_seed
from rayrft.explorer.deadlines import AttemptDeadline, Expired, GroupDeadline
from rayrft.explorer.engines.auxiliary import AuxiliaryModel
from rayrft.explorer.engines.exchange import Sampling
from rayrft.explorer.environments import Environments
from rayrft.explorer.trajectory import ContextFull, Model, PromptTooLong, Trajectory
from rayrft.explorer.workflows import Workflow, build_workflow
from rayrft.rewards import RewardResult, Transcript
from rayrft.rewards.base import checked
from rayrft.runtime.waits import cancelled

log = logging.getLogger(__name__)


ScoreAnswers = Callable[[Task, list[Transcript]], Awaitable[list[RewardResult]]]
"""Return one result per transcript of a task."""


@dataclass(frozen=True)
class Rollout:
    """The rows of the repeats that succeeded, one reward result per row, and the failures of the others."""

    rows: list[Experience]
    results: list[RewardResult]
    failed: Counter[str] = field(default_factory=Counter)
    """Repeats without a row, by reason: ``prompt_too_long``, ``timeout``, ``environment_error``, ``workflow_error``."""
    problem: str | None = None
    """The last error of a workflow or environment, in one line."""
    parked: list[Experience] = field(default_factory=list)
    """The calls of the group, if it was parked: it has no rows then."""
    scored_s: float = 0.0
    """Seconds from the end of the last attempt to the last reward."""


@dataclass(slots=True)
class _BuiltRow:
    """A trajectory of a workflow, its row, what a reward sees of it, and the reward that the workflow has set."""

    trajectory: Trajectory
    row: Experience
    transcript: Transcript
    result: RewardResult | None

    @classmethod
    def of(cls, trajectory: Trajectory, experience_id: str, group_id: str, task: Task) -> _BuiltRow:
        """Convert a trajectory. Raises ValueError or TypeError if its reward is none."""
        row, transcript = trajectory.to_experience(experience_id, group_id, task), trajectory.transcript
        result = None if trajectory.result is None else checked(trajectory.result, transcript)
        return cls(trajectory, row, transcript, result)

    def score(self, result: RewardResult) -> RewardResult:
        """Set the result, with rewards of steps inside answers, and return it: unknown if these cannot be placed."""
        if result.steps:
            try:
                places = self.trajectory.step_rewards_by_token(result.steps)
                self.row = self.row.with_fields(metrics=self.row.metrics | places)
            except ValueError as error:
                result = RewardResult(None, result.components, f"steps: {error}", result.answer, error=True)
        self.result = result
        return result


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
        """Return the busy seconds since the last call."""
        now = time.monotonic()
        total = self._total + (now - self._since if self._active else 0.0)
        self._since, self._total = now, 0.0
        return total


@dataclass(frozen=True)
class _SharedObjects:
    """Objects that runners share. ``logged``: the kinds of failures that were logged whole; ``problems``: those of them
    that nobody has taken yet, by reason."""

    environments: Environments | None
    workflows: dict[str, Workflow] = field(default_factory=dict)
    logged: set[int] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)


class Runner:
    """Runs the config's workflows on tasks. Training and evaluation differ only in ``n`` and ``temperature``."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: ChatTokenizer,
        engines: Engines,
        score: ScoreAnswers,
        auxiliary: Mapping[str, AuxiliaryModel] | None = None,
        scores_inline: Callable[[Task], bool] = lambda task: False,
        shared: _SharedObjects | None = None,
    ) -> None:
        """``scores_inline``: whether the rewards of a task do not wait. Its attempts are scored together then."""
        self._config = config
        self._scores_inline = scores_inline
        self._auxiliary = auxiliary or {}
        self._tokenizer = tokenizer
        self._engines = engines
        self._score = score
        self._parkable: dict[str, GroupCalls] = {}
        self._images = config.folder / "images"
        self.rolling, self.scoring = BusyClock(), BusyClock()
        environment = config.explorer.environment
        self._shared = shared or _SharedObjects(Environments(environment, config.plugins) if environment else None)
        self.workflow(config.explorer.workflow)

    def beside(self, engines: Engines, max_tokens: int | None = None) -> Runner:
        """Return one for these engines and ``max_tokens``, with the same workflows, environments and processes."""
        config = self._config
        if max_tokens is not None:
            sampling = config.explorer.sampling.model_copy(update={"max_tokens": max_tokens})
            config = config.model_copy(update={"explorer": config.explorer.model_copy(update={"sampling": sampling})})
        known = (self._score, self._auxiliary, self._scores_inline, self._shared)
        return Runner(config, self._tokenizer, engines, *known)

    async def run(self, task: Task, name: str, n: int, temperature: float, parking: Parking | None = None) -> Rollout:
        """Attempt a task ``n`` times concurrently, and score the rows without a reward by their last turn.

        ``name`` is the group's id, from which ids of rows and seeds of requests are derived. With ``parking`` it may
        end unfinished. An error in a workflow fails that repeat only. Raises ActorDied if an engine has died.
        """
        seed, sampling = self._seed(name), self._config.explorer.sampling
        common = Sampling(temperature, sampling.max_tokens, self._tokenizer.stop_ids, seed, sampling.repetition)
        calls = GroupCalls(self._engines, n, common, parking)
        group = GroupDeadline(self._config.explorer.group_deadline_s)
        inline, create_task = self._scores_inline(task), asyncio.get_running_loop().create_task
        ended = list[float]()

        async def scored(repeat: int) -> list[_BuiltRow] | _Failure:
            """Make an attempt and, unless rewards are ``inline``, score its rows while other attempts run."""
            with self.rolling:
                made = await self._attempt(task, repeat, calls, group, name)
            ended.append(time.perf_counter())
            if not inline and not isinstance(made, _Failure):
                await self._score_rows(task, made)
            return made

        attempts = [create_task(scored(repeat)) for repeat in range(n)]
        made, failed, problem = list[_BuiltRow](), Counter[str](), None
        if parking is not None:
            self._parkable[name] = calls
            for repeat, attempt in enumerate(attempts):
                calls.attempts[repeat].on_park = attempt.cancel
        try:
            outcomes = await asyncio.gather(*attempts)
        finally:
            if parking is not None:
                self._parkable.pop(name, None)
            for attempt in attempts:
                if not attempt.cancelling():  # else it is closing what it has opened
                    attempt.cancel()
            calls.cancel()
            group.close()
        if calls.parked:
            return Rollout([], [], parked=calls.to_rows(name, task.id))
        for outcome in outcomes:
            if isinstance(outcome, _Failure):
                failed[outcome.reason] += 1
                problem = outcome.problem or problem
            else:
                made += outcome
                outcome.clear()  # the attempt's task and its trajectories would keep each other
        if inline:
            await self._score_rows(task, made)
        results, scored_s = [each.result for each in made if each.result], time.perf_counter() - max(ended)
        return Rollout([each.row for each in made], results, failed, problem, scored_s=scored_s)

    def park(self, name: str) -> None:
        """Park the group of that id, which runs with ``parking``; nothing happens if it is not running."""
        if name in self._parkable:
            self._parkable[name].park()

    async def _attempt(
        self, task: Task, repeat: int, calls: GroupCalls, group: GroupDeadline, name: str
    ) -> list[_BuiltRow] | _Failure:
        workflow, model = task.workflow or self._config.explorer.workflow, self._model(repeat, calls, name)
        seconds = self._config.explorer.deadline_s
        try:
            try:
                deadline = AttemptDeadline(group, seconds, calls.attempts[repeat].session)
                if self._shared.environments is None:
                    with deadline:
                        made = await self.workflow(workflow).run(task, model, None)
                else:
                    async with self._shared.environments.attempt(episode_seed(self._config, name, repeat)) as env:
                        with deadline:
                            made = await self.workflow(workflow).run(task, model, env)
            except (ContextFull, PromptTooLong) as error:
                made = [trajectory for trajectory in model.started if trajectory.answers]
                if not made:
                    return self._failure(workflow, task, "prompt_too_long", f"the prompt is too long: {error}", "")
                if isinstance(error, PromptTooLong):
                    made[-1].end_for_length()
            return _rows(made, task, name, model, calls)
        except EnvironmentFailed as error:
            reason = "timeout" if isinstance(error, EnvironmentTimeout) else "environment_error"
            return self._failure(workflow, task, reason, str(error), "\n".join(getattr(error, "__notes__", [])))
        except Expired:
            limit = "explorer.group_deadline_s" if group.expired else f"explorer.deadline_s, {seconds:g} s"
            return self._failure(workflow, task, "timeout", f"not finished within {limit}", "")
        except asyncio.CancelledError as error:
            if calls.attempts[repeat].parked:
                return []
            if cancelled():
                raise
            problem = f"{type(error).__name__} of a task of its own"
            return self._failure(workflow, task, "workflow_error", problem, traceback.format_exc())
        except (ActorDied, ModelError):
            raise
        except (Exception, SystemExit) as error:  # a user's workflow may raise anything: only the repeat fails
            problem = f"{type(error).__name__}: {error}"
            return self._failure(workflow, task, "workflow_error", problem, traceback.format_exc())
        finally:
            calls.attempts[repeat].end()
            model.started.clear()  # model and trajectories would keep each other until garbage is collected

    def _failure(self, workflow: str, task: Task, reason: str, problem: str, trace: str) -> _Failure:
        """Log a failure, the first of its kind with its traceback, and return it."""
        text = f"workflow {workflow!r} on task {task.id}: {' '.join(problem.split())}"
        places = [line for line in trace.splitlines() if line.startswith("  File")]
        kind = hash((workflow, reason, *places))
        first = kind not in self._shared.logged
        log.warning("%s\n%s" if first else "%s%s", text, trace * first)
        if first:
            self._shared.logged.add(kind)
            self._shared.problems[reason] = text
        return _Failure(reason, text)

    def take_problems(self) -> dict[str, str]:
        """Return the failures since the last call that were the first of their kinds, one for each reason."""
        taken = dict(self._shared.problems)
        self._shared.problems.clear()
        return taken

    async def _score_rows(self, task: Task, made: list[_BuiltRow]) -> None:
        """Set the results of rows: the workflow's reward if it set one, else that of the config."""
        found = iter(list[RewardResult]())
        if unscored := [each.transcript for each in made if each.result is None]:
            with self.scoring:
                found = iter(await self._score(task, unscored))
        for each in made:
            result = each.score(next(found) if each.result is None else each.result)
            if result.value is None:
                log.warning("the reward of task %s is unknown: %s", task.id, result.reason)

    async def _score_one(self, task: Task, response: str) -> RewardResult:
        with self.scoring:
            [result] = await self._score(task, [Transcript.of(task, response)])
        return result

    def _model(self, repeat: int, calls: GroupCalls, name: str) -> Model:
        """``name`` is the group's id."""
        sampling = self._config.explorer.sampling
        auxiliary = {of: each.with_seed(self._seed(f"{name}/{repeat}/{of}")) for of, each in self._auxiliary.items()}
        return Model(
            calls.of(repeat),
            self._score_one,
            self._tokenizer,
            max_tokens=sampling.max_tokens,
            max_prompt_tokens=sampling.max_prompt_tokens,
            max_length=self._config.model.max_length,
            images=self._images,
            repeat=repeat,
            auxiliary=auxiliary,
            session=calls.attempts[repeat].session,
        )

    def _seed(self, name: str) -> int | None:
        return derive_seed(self._config.seed, name) if self._config.seeds_requests else None

    def workflow(self, name: str) -> Workflow:
        """Return the workflow of that name, built once."""
        if name not in self._shared.workflows:
            built = build_workflow(name, self._config.explorer, auxiliary=self._config.auxiliary)
            self._shared.workflows[name] = built
        return self._shared.workflows[name]


@dataclass(frozen=True)
class _Failure:
    reason: str
    problem: str | None = None


def _rows(
    made: Trajectory | list[Trajectory], task: Task, name: str, model: Model, calls: GroupCalls
) -> list[_BuiltRow]:
    """Convert a workflow's return value to rows. Raises TypeError or ValueError if it is not a valid one."""
    trajectories = made if isinstance(made, list) else [made]
    if not trajectories or not all(isinstance(trajectory, Trajectory) for trajectory in trajectories):
        raise TypeError(f"a workflow must return a Trajectory or a list of them, not {made!r}")
    for trajectory in trajectories:
        if not trajectory.answers:
            raise ValueError("the trajectory has no answer of the model: await act() first")
        if trajectory not in model.started or trajectories.count(trajectory) > 1:
            raise ValueError("a workflow must return trajectories of this attempt, each once")
        if not all(calls.attempts[model.repeat].answered(*prompted) for prompted in trajectory.prompted()):
            raise ValueError("the trajectory has tokens that were not sampled for it, or with other log-probs")
    first = f"{name}/{model.repeat}"
    ids = [first] if len(trajectories) == 1 else [f"{first}/{k}" for k in range(len(trajectories))]
    return [_BuiltRow.of(trajectory, id, name, task) for trajectory, id in zip(trajectories, ids, strict=True)]


def episode_seed(config: RunConfig, name: str, repeat: int) -> int:
    """Return the seed of the environment for an attempt of a group."""
    same = config.explorer.environment is None or config.explorer.environment.same_episode
    return derive_seed(config.seed, f"{name}/episode" if same else f"{name}/episode/{repeat}")
