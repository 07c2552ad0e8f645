"""Reward functions as people have them, for other trainers."""

from __future__ import annotations

import asyncio
from typing import Any

Messages = list[dict[str, str]]


def right_and_short(
    prompts: list[Messages],
    completions: list[Messages],
    completion_ids: list[list[int]],
    answer: list[str],
    level: list[int],
    log_metric: Any,
    **rest: Any,
) -> list[float | None]:
    """Unknown where the prompt asks for it."""
    found = list[float | None]()
    for prompt, completion, ids, truth, hard in zip(prompts, completions, completion_ids, answer, level, strict=True):
        right = truth in completion[-1]["content"]
        found.append(None if "unknown" in prompt[-1]["content"] else right * hard - 0.01 * len(ids))
    log_metric("right", 1.0)
    return found


async def of_texts(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(set(text)) + len(prompt)) for prompt, text in zip(prompts, completions, strict=True)]


def sizes(completions: list[Messages], **columns: Any) -> list[float]:
    return [len(completion[-1]["content"]) / 10 for completion in completions]


def of_images(completions: list[Messages], images: list[list[Any]], **columns: Any) -> list[float]:
    return [float(picture.size[0]) for [picture] in images]


def of_a_column_that_is_not_there(
    prompts: list[Any], completions: list[Any], solution: list[str], **_: Any
) -> list[int]:
    return [1] * len(prompts)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], bonus: float = 0.0
) -> dict[str, Any]:
    right = ground_truth == solution_str.rpartition("#### ")[2]
    return {"score": right + bonus, "acc": right, "said": data_source, **extra_info}


async def compute_length(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return len(solution_str) / 10
