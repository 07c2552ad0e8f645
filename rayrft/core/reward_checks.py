"""Checks of rewards before anything starts: that each is there, can be built, and scores a right answer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable

from rayrft.config.reward import RewardConfig, RewardModelConfig, RewardPart, trained_by
from rayrft.errors import ConfigError, ModelError
from rayrft.experience import Task
from rayrft.explorer.engines.auxiliary import no_auxiliary
from rayrft.rewards import Reward, Transcript, build_reward, where
from rayrft.rewards.base import invoke, rewards


def check_rewards(
    config: RewardConfig, tasks: Iterable[tuple[Task, int]], auxiliary: Collection[str] = ()
) -> list[str]:
    """Build all rewards of tasks, which come with the number of their source, and return what they say of themselves.
    Those that need nothing that runs score the right answer of one task of each domain and source.

    One that a stage trains is not built. Raises ConfigError if a task's domain has no reward, a reward cannot be built,
    needs an auxiliary model that there is not or more time than its deadline, or fails on that answer.
    """
    examples: dict[str, dict[int, Task]] = {}
    for task, source in tasks:
        examples.setdefault(task.domain, {}).setdefault(source, task)
    notices: dict[str, None] = {}
    for domain, by_source in examples.items():
        model = config.models[config.domain_of(domain)]
        for part in model.scored_by:
            if trained_by(part) is not None:
                _check_trained(part)
                continue
            reward = check_reward(part, model, auxiliary)
            if notice := getattr(reward, "notice", None):
                notices[f"reward {part.name!r}: {notice}"] = None
            if where(part.name) == "loop":
                continue  # it may ask models that are not served yet
            for task in by_source.values():
                try:
                    invoke(reward, task, Transcript.of(task, task.answer))
                except Exception as error:  # user code may raise anything
                    raise ConfigError(
                        f"the reward raised {type(error).__name__}: {error} on the answer of a task",
                        field="reward.name",
                        value=part.name,
                        remedy=f"fix the reward; the task was {json.dumps(task.question)[:80]}",
                    ) from None
    return list(notices)


def check_reward(part: RewardPart, model: RewardModelConfig, auxiliary: Collection[str] = ()) -> Reward:
    """Build a reward. Raises ConfigError if that is not possible, or if it lacks what it needs."""
    reward, name = build_reward(part.name, part.options), part.name
    for needed in getattr(reward, "needs_auxiliary", ()):
        if needed not in auxiliary:
            raise no_auxiliary(needed, auxiliary)
    if (longest := getattr(reward, "longest_s", 0.0)) >= model.deadline_s:
        raise ConfigError(
            f"reward {name!r} gives itself {longest:g} s, and would be stopped before: unknown, not 0",
            field="reward.deadline_s",
            value=model.deadline_s,
            remedy="raise it above that, or lower the reward's own budget",
        )
    if where(name) != "loop" and inspect.iscoroutinefunction(getattr(reward, "score", None)):
        raise ConfigError(
            "gives a reward that is a coroutine, which is run as one only if its class is registered",
            field="reward.name",
            value=name,
            remedy="register the class itself, such as a subclass with the options set",
        )
    return reward


def _check_trained(part: RewardPart) -> None:
    """Raise ConfigError unless a reward accepts its options with the folder that its stage will leave."""
    options = {name: option for name, option in part.options.items() if name != "stage"}
    try:
        inspect.signature(rewards.get(part.name)).bind(model="", **options)
    except TypeError as error:
        raise ConfigError(
            f"refused by {part.name!r}: {error}",
            field="reward.options",
            value=part.options,
            remedy="with 'stage', leave 'model' out, and see the reward's own parameters for the others",
        ) from None


def check_classifier(model: str, stage: str) -> None:
    """Raise ModelError unless transformers has a sequence classifier of the model's kind."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kind = type(AutoConfig.from_pretrained(model))
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"transformers has no sequence classifier for it, which stage {stage!r} trains",
            field="model.path",
            value=kind.__name__,
            remedy="choose a model such as Llama, Qwen or Gemma, without images",
        )
