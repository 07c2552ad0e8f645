"""Reward functions that were written for TRL and for verl, as they are."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards.base import RewardResult, Transcript, register_reward, rewards
from rayrft.runtime.waits import in_thread


@register_reward("trl")
class TrlReward:
    """A function for TRL's GRPOTrainer: ``function(prompts, completions, completion_ids, **columns)``, also ``async``,
    each argument a list. None is an unknown reward.

    It is called for each answer alone. ``columns`` are those of the task's row, its ``images`` (PIL), and ``answer``,
    if the function takes one. Prompts and completions are messages, or texts unless ``conversational``. What it logs by
    ``log_metric`` are components of the reward; ``log_extra`` keeps nothing, and ``trainer_state`` is None. Source:
    `GRPOTrainer._calculate_rewards` of trl 1.16.
    """

    def __init__(self, function: str, conversational: bool = True) -> None:
        self._function, self._conversational = _imported(function), conversational

    def score(self, task: Task, transcript: Transcript) -> RewardResult:
        """See `RewardModel`. Raises ValueError unless the function returns one reward."""
        components = dict[str, float]()
        prompt: object = task.question
        completion: object = transcript.turns[-1]["content"]
        if self._conversational:
            turns = [dict(turn) for turn in transcript.turns]
            prompt, completion = turns[: len(task.messages)], turns[len(task.messages) :]
        columns = dict(task.metadata)
        if "answer" in inspect.signature(self._function).parameters:
            columns.setdefault("answer", task.answer)
        if task.images:
            from PIL import Image

            columns["images"] = [Image.open(path) for path in task.images]
        found = self._function(
            prompts=[prompt],
            completions=[completion],
            completion_ids=[list(transcript.token_ids)],
            trainer_state=None,
            log_extra=lambda column, values: None,
            log_metric=components.__setitem__,
            **{name: [value] for name, value in columns.items()},
        )
        if len(found) != 1:
            raise ValueError(f"{len(found)} rewards for one answer")
        [value] = found
        if value is None or math.isnan(value):
            return RewardResult(None, components, "the function returned None")
        return RewardResult(float(value), components)


@register_reward("verl")
class VerlReward:
    """A function for verl: ``compute_score(data_source, solution_str, ground_truth, extra_info)``, also ``async``. It
    returns a number, or a mapping with ``score``, whose other numbers are components.

    The arguments are those columns of the task's row (``ground_truth`` of ``reward_model``), where it has them, else
    the task's domain, its answer, and nothing; ``extra_info`` has ``num_turns``, too. ``options`` are further
    arguments. Source: `NaiveRewardManager` of verl 0.6.
    """

    def __init__(self, function: str, **options: Any) -> None:
        self._function = partial(_imported(function), **options)

    def score(self, task: Task, transcript: Transcript) -> RewardResult:
        """See `RewardModel`."""
        row, turns = task.metadata, sum(turn["role"] != "system" for turn in transcript.turns)
        found = self._function(
            data_source=row.get("data_source", task.domain),
            solution_str=transcript.turns[-1]["content"],
            ground_truth=(row.get("reward_model") or {}).get("ground_truth", task.answer),
            extra_info={**(row.get("extra_info") or {}), "num_turns": turns},
        )
        if not isinstance(found, dict):
            return RewardResult(float(found))
        numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        return RewardResult(numbers.pop("score"), numbers)


def _imported(path: str) -> Callable[..., Any]:
    """Return the function at ``package.module:attribute``, which blocks until a coroutine of it has ended. Raises
    ConfigError if there is none."""
    if ":" not in path:
        problem = "names no function"
        raise ConfigError(problem, "give package.module:function", field="reward.options.function", value=path)
    function = rewards.get(path, "reward.options.function")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return in_thread(lambda: found) if inspect.iscoroutine(found) else found

    return call
