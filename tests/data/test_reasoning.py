"""Reasoning and answer are told apart in one place, and nothing reads an answer from reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from rayrft.data.reasoning import opened_reasoning, split_reasoning
from rayrft.experience import Task
from rayrft.explorer.environments.gymnasium import find_action
from rayrft.explorer.tools.call_formats import HermesCalls
from rayrft.rewards import Transcript, build_reward
from rayrft.rewards.base import score


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("\n 7", "\n 7"),
        ("<think>5</think>\n\n7", "7"),
        ("5</think> 7", " 7"),
        ("<think>5", ""),
        ("<think>5</think>6<think>7</think>8", "8"),
        ("<think>5</think>7<think>8", ""),
        ("<think>5</think>", ""),
        ("", ""),
    ],
)
def test_the_answer_follows_the_last_reasoning_that_is_closed(text: str, answer: str) -> None:
    reasoning, found = split_reasoning(text)
    assert found == answer and reasoning + found == text


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|user|>hi<|assistant|>", ""),
        ("<|user|>hi<|assistant|><think>\n", "<think>\n"),
        ("<|user|><think>hi</think><|assistant|><think>", "<think>"),
        ("<|user|>hi<|assistant|><think>\n\n</think>\n\n", ""),
    ],
)
def test_a_prompt_opens_reasoning_if_it_does_not_close_it(prompt: str, opening: str) -> None:
    assert opened_reasoning(prompt) == opening


@pytest.mark.parametrize(
    ("name", "options", "right", "wrong", "metadata"),
    [
        ("math", {}, r"so \boxed{7}", r"so \boxed{5}", {}),
        ("k12", {}, "The answer is 7.", "The answer is 5.", {"type": "number"}),
        ("vision", {}, "There are 7.", "There are 5.", {"type": "count"}),
        ("exact", {}, "7", "5", {}),
    ],
)
async def test_no_reward_reads_the_reasoning(
    name: str, options: dict[str, Any], right: str, wrong: str, metadata: dict[str, Any]
) -> None:
    task = Task.create("test", "3 + 4?", "7", metadata=metadata)
    for text, value in [
        (f"<think>{wrong}</think>{right}", 1.0),
        (f"{wrong}</think>\n\n{right}", 1.0),
        (f"<think>{right}</think>{wrong}", 0.0),
        (f"<think>{right}</think>", 0.0),
        (f"<think>{right}", 0.0),
    ]:
        result = await score(build_reward(name, options), task, Transcript.of(task, text))
        assert result.value == value, (text, result)


async def test_actions_and_calls_of_tools_in_reasoning_are_not_meant() -> None:
    assert find_action("<think>left, or <answer>up</answer>?</think>right", (("left",), ("right",), ("up",))) == 1
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    assert len(await HermesCalls().read(f"<think>{call}</think>{call}", ())) == 1
    assert not await HermesCalls().read(f"<think>{call}", ())
