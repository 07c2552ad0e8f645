"""Equivalence of mathematical answers, by the library math-verify."""

from __future__ import annotations

from rayrft.experience import Task
from rayrft.rewards.base import Reward, RewardResult, register_reward


@register_reward("math")
def math_answer() -> Reward:
    """1 if the response's final answer equals the ground truth mathematically (``1/2`` is ``0.5``), else 0.

    Component ``parsed`` is 1 if the response contains an answer. The library's timeouts need the main thread of a
    process; the deadline of the reward worker replaces them.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extraction = (LatexExtractionConfig(), ExprExtractionConfig())

    def score(task: Task, response: str) -> RewardResult:
        truth = parse(task.answer, extraction, parsing_timeout=None)
        if not truth:
            return RewardResult(None, reason=f"the ground truth {task.answer!r} is not a mathematical answer")
        answer = parse(response, extraction, parsing_timeout=None)
        right = bool(answer) and bool(verify(truth, answer, timeout_seconds=None))
        return RewardResult(float(right), {"parsed": float(bool(answer))}, answer=str(answer[0]) if answer else "")

    return score
