"""Reward functions for TRL and verl give the values that they give there."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState
from PIL import Image
from trl import GRPOTrainer

from rayrft.config.reward import RewardConfig
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards import RewardResult, Transcript, build_reward, where
from rayrft.rewards.base import score_inline
from rayrft.rewards.checks import check_rewards
from tests.errors import about

SAID = (("2 + 2?", "It is 4."), ("2 + 3?", "4"), ("What is unknown?", "42"))


def tasks() -> list[Task]:
    """Rows with two more columns."""
    return [
        Task.create(
            "sums", question, "4", system="Be brief.", metadata={"answer": "4", "level": level, "unused": [level]}
        )
        for level, (question, _) in enumerate(SAID, 1)
    ]


def transcripts() -> list[Transcript]:
    """An answer to each task, of as many tokens as it has characters."""
    return [
        Transcript((*task.messages, {"role": "assistant", "content": text}), token_ids=(7,) * len(text))
        for task, (_, text) in zip(tasks(), SAID, strict=True)
    ]


def scored(name: str, **options: Any) -> list[RewardResult]:
    reward = build_reward(name, options)
    return [score_inline(reward, task, said) for task, said in zip(tasks(), transcripts(), strict=True)]


def scored_by_trl(function: Any, *, conversational: bool) -> list[float]:
    """The values that TRL's trainer computes of the same rows."""
    PartialState(cpu=True)  # its log asks for it
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
        environments=None,
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=["f"],
        async_loop=loop,
        _log_completion_extra=lambda *_: None,
        _log_metric=lambda *_: None,
    )
    prompts: list[Any] = [task.messages if conversational else task.question for task in tasks()]
    completions: list[Any] = [[said.turns[-1]] if conversational else said.response for said in transcripts()]
    rows = [{"prompt": prompt, **task.metadata} for prompt, task in zip(prompts, tasks(), strict=True)]
    ids = [list(said.token_ids) for said in transcripts()]
    found = GRPOTrainer._calculate_rewards(trainer, rows, prompts, completions, ids)
    loop.call_soon_threadsafe(loop.stop)
    return found[:, 0].tolist()


@pytest.mark.parametrize(("name", "conversational"), [("right_and_short", True), ("of_texts", False)])
def test_a_function_for_trl_gives_the_values_that_trl_computes(name: str, conversational: bool) -> None:
    from tests.rewards import foreign

    theirs = scored_by_trl(getattr(foreign, name), conversational=conversational)
    ours = scored("trl", function=f"tests.rewards.foreign:{name}", conversational=conversational)
    values = [float("nan") if each.value is None else each.value for each in ours]
    assert values == pytest.approx(theirs, abs=1e-6, nan_ok=True) and len(set(map(str, theirs))) == 3
    if name == "right_and_short":
        assert [each.value is None for each in ours] == [False, False, True] and not ours[2].error
        assert ours[0].components == {"right": 1.0}


def answers(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(answer == ["5"])]


def test_a_function_for_trl_that_takes_an_answer_gets_the_tasks_own_where_its_row_has_none() -> None:
    reward, said = build_reward("trl", {"function": "tests.rewards.test_functions:answers"}), transcripts()[0]
    assert score_inline(reward, Task.create("sums", "2 + 3?", "5"), said).value == 1.0
    assert score_inline(reward, tasks()[0], said).value == 0.0, "the row's column comes first"


def test_a_function_for_trl_sees_the_images_of_its_task(tmp_path: Path) -> None:
    Image.new("RGB", (16, 8)).save(tmp_path / "a.png")
    task = Task.create("seen", "How wide?", "16", images=(str(tmp_path / "a.png"),))
    reward = build_reward("trl", {"function": "tests.rewards.foreign:of_images"})
    assert score_inline(reward, task, Transcript.of(task, "16")).value == 16


def test_a_function_for_verl_gets_its_columns_and_gives_a_number_or_a_mapping() -> None:
    row = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}}
    task = Task.create("gsm8k", "2 + 2?", "other", metadata=row)
    reward = build_reward("verl", {"function": "tests.rewards.foreign:compute_score", "bonus": 0.5})
    for said, right in (("so #### 4", 1.0), ("so #### 5", 0.0)):
        found = score_inline(reward, task, Transcript.of(task, said))
        assert found.value == right + 0.5 and found.components == {"acc": right, "num_turns": 2.0, "index": 3.0}
    plain = Task.create("sums", "2 + 2?", "4")
    found = score_inline(reward, plain, Transcript.of(plain, "#### 4"))
    assert (found.value, found.components) == (1.5, {"acc": 1.0, "num_turns": 2.0}), "its answer is the truth"
    assert [each.value for each in scored("verl", function="tests.rewards.foreign:compute_length")] == [0.8, 0.1, 0.2]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"function": "tests.rewards.foreign:of_a_column_that_is_not_there"}, "'solution'"),
        ({"function": "tests.rewards.foreign:nothing"}, "nothing"),
        ({"function": "right_and_short"}, "right_and_short"),
        ({}, "function"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_the_run(options: dict[str, Any], problem: str) -> None:
    config = RewardConfig.model_validate({"name": "trl", "options": options})
    with pytest.raises(ConfigError, match=problem):
        check_rewards(config, [(task, 0) for task in tasks()])


def test_functions_of_others_run_in_processes_that_can_be_killed() -> None:
    assert where("trl") == where("verl") == "process"
    with pytest.raises(ConfigError, check=about("reward.options.function", "f")):
        build_reward("verl", {"function": "f"})
