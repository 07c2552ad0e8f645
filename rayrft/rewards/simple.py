"""Rewards by text comparison, and the verifiers of procedural tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrft.experience import Task
from rayrft.rewards.base import Reward, RewardResult, Transcript, inline, register_reward


@register_reward("exact")
@inline
def exact() -> Reward:
    """1 if the response equals the answer, ignoring surrounding white space, else 0. Unknown if the task has none."""

    def score(task: Task, response: str) -> RewardResult:
        if not (truth := task.answer.strip()):
            return RewardResult(None, reason="the task has no answer")
        return RewardResult(float(response.strip() == truth))

    return score


@register_reward("format")
@inline
@dataclass(frozen=True)
class TaggedFormat:
    """1 if the last answer, with its reasoning, is one block ``<tag>…</tag>`` for each of the tags, in their order,
    none empty, and only white space beside them; else 0. Component ``tags``: the share of tags that stand there once.

    The format reward of DeepSeek-R1 (arXiv:2501.12948, sec. 2.2.2); best as a part whose role is ``shape``.
    """

    tags: Sequence[str] = ("think", "answer")

    def score(self, task: Task, transcript: Transcript) -> RewardResult:
        marks, text = [(f"<{tag}>", f"</{tag}>") for tag in self.tags], transcript.turns[-1]["content"]
        once = [all(text.count(mark) == 1 for mark in pair) for pair in marks]
        rest, well_formed = text.strip(), all(once)
        for opening, closing in marks:
            content, closed, after = rest.removeprefix(opening).partition(closing)
            well_formed = well_formed and rest.startswith(opening) and bool(closed and content.strip())
            rest = after.strip()
        return RewardResult(float(well_formed and not rest), {"tags": sum(once) / max(1, len(once))})


@register_reward("reasoning_gym")
def reasoning_gym_verifier() -> Reward:
    """The verifier of the task's reasoning-gym data set, in [0, 1]; some give partial credit."""
    import reasoning_gym

    def score(task: Task, response: str) -> float:
        verify = reasoning_gym.get_score_answer_fn(task.metadata["source_dataset"])
        return float(verify(response, {"question": task.question, "answer": task.answer, "metadata": task.metadata}))

    return score
