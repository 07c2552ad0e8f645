"""What a run is started with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rayrft.config.reward import RewardConfig
from rayrft.core.preflight import choose_probe
from rayrft.core.reward_checks import check_rewards
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError
from rayrft.experience import Task
from tests.errors import about


def test_the_probe_is_of_sequences_that_leave_an_engine_room_for_a_token(tiny_model: Path) -> None:
    tokenizer = ChatTokenizer(str(tiny_model))
    tasks = [Task.create("test", f"Spell this word backward: {'cat' * times}", "tac" * times) for times in (4, 1, 2, 3)]
    lengths = [len(tokenizer.prompt(task.messages) + tokenizer.response(task.answer)) for task in tasks]
    chosen = choose_probe(tasks, tokenizer, max_length=lengths[3])
    assert [row.task_id for row in chosen] == [tasks[1].id, tasks[2].id]
    assert len(choose_probe(tasks * 3, tokenizer, max_length=1000)) == 8


BUILT: Counter[str] = Counter()
SCORED: list[str] = []


class Telling:
    """Says how it scores, and what it needs."""

    def __init__(self, name: str = "a", longest_s: float = 1.0) -> None:
        BUILT[name] += 1
        self.notice, self.longest_s, self.needs_auxiliary = f"{name} scores", longest_s, ("grader",)

    def __call__(self, task: Task, response: str) -> float:
        SCORED.append(task.question)
        return 1.0


def test_each_reward_is_built_once_tried_on_every_source_and_says_how_it_scores_before_the_run_starts() -> None:
    BUILT.clear()
    SCORED.clear()
    name = f"{__name__}:Telling"
    config = RewardConfig(domains={d: {"name": name, "options": {"name": d}} for d in "ab"})  # type: ignore[dict-item]
    tasks = [
        (Task.create("t", f"{domain}{number}", "x", domain=domain), number // 2)
        for domain in "ab"
        for number in range(4)
    ]
    assert check_rewards(config, tasks, ["grader"]) == [f"reward {name!r}: {domain} scores" for domain in "ab"]
    assert BUILT == {"a": 1, "b": 1} and SCORED == ["a0", "a2", "b0", "b2"]


@pytest.mark.parametrize(
    ("settings", "auxiliary", "domain", "field"),
    [
        ({"options": {"longest_s": 10.0}}, ["grader"], "a", "reward.deadline_s"),
        ({}, [], "a", "auxiliary"),
        ({}, ["grader"], "c", "reward.domains"),
    ],
)
def test_what_a_reward_lacks_is_an_error_before_the_run_starts(
    settings: dict[str, Any], auxiliary: list[str], domain: str, field: str
) -> None:
    config = RewardConfig(domains={"a": {"name": f"{__name__}:Telling", **settings}})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, check=about(field)):
        check_rewards(config, [(Task.create("t", "question", "x", domain=domain), 0)], auxiliary)
