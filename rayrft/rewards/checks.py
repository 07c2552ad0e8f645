"""Checks of rewards before a run starts: each exists, can be built, and gives right answers full marks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rayrft.config.auxiliary import require_auxiliary
from rayrft.config.reward import RewardConfig, RewardModelConfig, RewardPart, trained_by
from rayrft.errors import ConfigError
from rayrft.experience import Task, reaches
from rayrft.rewards import Reward, RewardResult, Transcript, build_reward, where
from rayrft.rewards.base import rewards, score_inline

_ACCEPT_TRUTH = ("exact", "k12", "math", "vision")
"""Rewards that give 1 to a task's own answer."""
_CHATS = "single_turn", "multi_turn", "user_simulator", "debate", "reflect_and_retry", "self_verification", "best_of_n"
_LEAVE_REWARD = (*_CHATS, "tool_calling")
"""Workflows that give no reward of their own."""
_ELSEWHERE = {"blanks", "box"}
"""Metadata of tasks whose right answer is not ``answer``."""
_TRIED, _SHOWN = 200, 3


def check_rewards(
    config: RewardConfig,
    tasks: Iterable[tuple[Task, int]],
    auxiliary: Collection[str] = (),
    workflow: str = "single_turn",
) -> list[str]:
    """Build all rewards of tasks, each with the number of its source, and return the rewards' notices. ``workflow`` is
    that of tasks that name none.

    A reward that needs no running model scores a reference answer of each domain and source. One that accepts the truth
    as an answer scores up to 200 of them, and a notice has the wrong ones. A reward that a stage trains is not built.
    Raises ConfigError if a task's domain has no reward, or if a reward cannot be built, fails on an answer, accepts no
    reference answer of a source, or needs an unknown auxiliary model or more time than its deadline. It is also raised
    if a reward needs answers and a source has none, unless a workflow may give its reward.
    """
    examples: dict[str, dict[int, list[Task]]] = {}
    for task, source in tasks:
        examples.setdefault(task.domain, {}).setdefault(source, []).append(task)
    notices: dict[str, None] = {}
    for domain, by_source in examples.items():
        model = config.models[config.domain_of(domain)]
        for part in model.scored_by:
            if trained_by(part) is not None:
                _check_trained(part)
                continue
            reward = check_reward(part, model, auxiliary)
            found = [getattr(reward, "notice", None)]
            if where(part.name) != "loop":  # it may ask models that are not served yet
                accepts = getattr(reward, "accepts_truth", part.name in _ACCEPT_TRUTH)
                check = _check_truths if accepts else _check_one
                for source, each in by_source.items():
                    if not accepts or _have_answers(each, source, part.name, workflow):
                        found.append(check(reward, part.name, each, source))
            notices.update({f"reward {part.name!r}: {notice}": None for notice in found if notice})
    return list(notices)


def _check_one(reward: Reward, name: str, tasks: Sequence[Task], source: int) -> str | None:
    """Score the answer of one task; return a notice if its reward is unknown. Raises ConfigError if it fails."""
    result = score_inline(reward, tasks[0], Transcript.of(tasks[0], tasks[0].answer))
    if result.error:
        problem = f"raised {result.reason} on the answer of a task"
        remedy = f"fix the reward; the task was {json.dumps(tasks[0].question)[:80]}"
        raise ConfigError(problem, remedy, field="reward.name", value=name)
    return None if result.value is not None else f"it is unknown for {_shown(tasks[0], result)}"


def _have_answers(tasks: Sequence[Task], source: int, name: str, workflow: str) -> bool:
    """Return whether tasks have answers. Raises ConfigError if they have none, and no workflow that may reward them."""
    if any(task.answer or _ELSEWHERE & task.metadata.keys() for task in tasks):
        return True
    if any((task.workflow or workflow) in _LEAVE_REWARD for task in tasks):
        problem = f"compares responses with the tasks' answers, and those of {_origin(source)} have none"
        remedy = "name the column of the answers in tasks.sources (answer), or choose a reward that needs none"
        raise ConfigError(problem, remedy, field="reward.name", value=name)
    return False


def _origin(source: int) -> str:
    return f"source {source}" if source >= 0 else "held-out tasks"


def _check_truths(reward: Reward, name: str, tasks: Sequence[Task], source: int) -> str | None:
    """Return a notice if some of up to 200 answers do not get full marks. Raises ConfigError if none does."""
    tried = [task for task in tasks if not _ELSEWHERE & task.metadata.keys()]
    tried = tried[:: -(-len(tried) // _TRIED) or 1]
    if not (wrong := [(task, result) for task in tried if (result := _not_full(reward, task)) is not None]):
        return None
    unknown = sum(result.value is None for _, result in wrong)
    problem = f"{len(wrong)} of {len(tried)} reference answers of {_origin(source)} "
    problem += f"do not get full marks ({unknown} unknown): {'; '.join(_shown(*each) for each in wrong[:_SHOWN])}"
    if len(wrong) == len(tried):
        remedy = "name the column of the answers in tasks.sources (answer, answer_after), or choose another reward"
        raise ConfigError(problem, remedy, field="reward.name", value=name)
    return problem


def _not_full(reward: Reward, task: Task) -> RewardResult | None:
    """Return the result of a task's own answer, plain and in a box, unless one of them gets full marks."""
    texts = (task.answer, f"\\boxed{{{task.answer}}}")
    results = [score_inline(reward, task, Transcript.of(task, text)) for text in texts]
    full = any(result.value is not None and reaches(result.value) for result in results)
    return None if full else results[0]


def _shown(task: Task, result: RewardResult) -> str:
    said = "unknown" if result.value is None else f"{result.value:g}"
    reason = f" ({result.reason[:120]})" if result.reason else ""
    return f"{task.answer[:60]!r} to {task.question[:60]!r} is {said}{reason}"


def check_reward(part: RewardPart, model: RewardModelConfig, auxiliary: Collection[str] = ()) -> Reward:
    """Build a reward. Raises ConfigError if that fails, or if the reward lacks an auxiliary model or time."""
    reward, name = build_reward(part.name, part.options), part.name
    require_auxiliary(getattr(reward, "needs_auxiliary", ()), auxiliary)
    if (longest := getattr(reward, "longest_s", 0.0)) >= model.deadline_s:
        problem = f"must exceed the {longest:g} s of reward {name!r}, which would be stopped before"
        remedy = "raise it, or lower the reward's own budget"
        raise ConfigError(problem, remedy, field="reward.deadline_s", value=model.deadline_s)
    score: Any = getattr(reward, "score", None)
    if where(name) == "loop":
        try:
            inspect.signature(score).bind("task", "transcript")
        except TypeError as error:
            problem, remedy = f"has a score() that cannot be called: {error}", "write score(self, task, transcript)"
            raise ConfigError(problem, remedy, field="reward.name", value=name) from None
    elif inspect.iscoroutinefunction(score):
        problem = "returns a reward that is a coroutine, which only works for a registered class"
        remedy = "register the class itself, such as a subclass with the options set"
        raise ConfigError(problem, remedy, field="reward.name", value=name)
    return reward


def _check_trained(part: RewardPart) -> None:
    """Raise ConfigError unless a reward accepts its options together with the folder that its stage will write."""
    options = {name: option for name, option in part.options.items() if name != "stage"}
    try:
        inspect.signature(rewards.get(part.name)).bind(model="", **options)
    except TypeError as error:
        remedy = "with 'stage', remove 'model', and see the reward's parameters for the others"
        problem = f"is rejected by {part.name!r}: {error}"
        raise ConfigError(problem, remedy, field="reward.options", value=part.options) from None
