"""Rewards that are scored at once, and tables of what they score."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards import Reward, RewardResult, Transcript, build_reward
from rayrft.rewards.base import score_inline
from rayrft.rewards.sandbox import Sandbox
from tests.conftest import ROOT

DATA = Path(os.environ.get("RAYRFT_TEST_DATA", ROOT / "tests" / "samples"))
_BUILT: dict[str, Reward] = {}


def real_rows(data_set: str, file: str) -> list[dict[str, Any]]:
    """Return the rows of a file of a real data set; skip the test where it is not there."""
    if not (path := DATA / data_set / file).exists():
        pytest.skip(f"{path} is not there")
    return [json.loads(line) for line in path.read_text().splitlines()]


def score(reward: Reward, task: Task, response: str) -> RewardResult:
    """Return the result of a reward that is not a coroutine."""
    return score_inline(reward, task, Transcript.of(task, response))


def result(
    name: str, answer: str, response: str, options: Any = None, /, *, asked: str = "question", **metadata: Any
) -> RewardResult:
    """Return the result of the reward of this name for a task with this answer."""
    reward = _BUILT.setdefault(f"{name}{options}", build_reward(name, options or {}))
    return score(reward, Task.create("test", asked, answer, metadata=metadata), response)


def sandbox_of(isolation: str) -> Sandbox:
    """Return the sandbox of this isolation; skip the test where the host lacks it."""
    try:
        return Sandbox(isolation)
    except ConfigError as error:
        pytest.skip(str(error))


def table(text: str) -> list[list[str]]:
    """Return the cells of each line: two spaces or more stand between them, and ⏎ for a line's end in a cell."""
    lines = (re.split(" {2,}", line.strip()) for line in text.strip().splitlines())
    return [[cell.replace("⏎", "\n") for cell in line] for line in lines]


def cells(text: str) -> list[str]:
    """Return the cells of all lines of a `table`."""
    return [cell for line in table(text) for cell in line]


def pairs(text: str) -> list[tuple[str, str]]:
    """Return the first cell of each line of a `table` with each of the others."""
    return [(first, other) for first, *others in table(text) for other in others]


def right_and_wrong(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the first cell of each line of a `table` with each of the others, and whether it stands before ``≠``."""
    for first, *others in table(text):
        middle = others.index("≠") if "≠" in others else len(others)
        yield from ((first, other, at < middle) for at, other in enumerate(others) if at != middle)
