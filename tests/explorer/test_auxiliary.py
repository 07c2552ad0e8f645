"""Auxiliary models: what is asked of them, how it is sampled, and what comes of their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.core.parts.table import plan_placement
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied, ConfigError, RequestRefused
from rayrft.experience import Task
from rayrft.explorer.engines.auxiliary import AuxiliaryModel
from rayrft.explorer.rollout import Rollout, Runner
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows import build_workflow, register_workflow
from tests.errors import about
from tests.explorer.scripted import Speaker, config, full_marks

TASK = Task.create("test", "Spell this word backward: cat", "tac", system="Spell.")
ROOM = {"model.max_length": 400, "explorer.sampling.max_prompt_tokens": 300, "explorer.sampling.max_tokens": 60}


@register_workflow("asks_the_judge")
class AsksTheJudge:
    def __init__(self, question: str = "cat", **options: Any) -> None:
        self._question, self._options = question, options

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory:
        trajectory = model.start(task.messages)
        await trajectory.act()
        verdict = await model.auxiliary("judge").chat([{"role": "user", "content": self._question}], **self._options)
        again = await model.auxiliary("judge").chat([{"role": "user", "content": self._question}])
        trajectory.reward(float(verdict == again == "tac"))
        return trajectory


def speaker(tokenizer: ChatTokenizer, says: str) -> Speaker:
    return Speaker(tokenizer, lambda _: says)


async def run(
    model: Path, name: str, judge: Speaker, options: dict[str, Any], n: int = 2, **described: Any
) -> tuple[Rollout, Speaker]:
    tokenizer = ChatTokenizer(model)
    known = {"judge": {"model": str(model), "max_tokens": 7, "temperature": 0.5, **described}}
    workflow = {"explorer.workflow": name, "explorer.workflow_options": {name: options}}
    settings = config(**{**ROOM, "auxiliary": known, **workflow})
    policy = speaker(tokenizer, "dog")
    served = {"judge": AuxiliaryModel("judge", settings.auxiliary["judge"], tokenizer, judge.generate)}
    rollout = await Runner(settings, tokenizer, policy, full_marks, served).run(TASK, "group", n, 1.0)
    return rollout, policy


@pytest.fixture
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model)


async def test_a_simulated_user_sees_the_conversation_and_its_words_are_observed(
    tiny_model: Path, tokenizer: ChatTokenizer
) -> None:
    user = speaker(tokenizer, "bird")
    options = {"user": "judge", "turns": 2, "prompt": "word\n{conversation}\nhorse"}
    rollout, policy = await run(tiny_model, "user_simulator", user, options, n=1)
    [row] = rollout.rows
    assert [turn["content"] for turn in row.turns][1:] == [TASK.question, "dog", "bird", "dog", "bird", "dog"]
    assert [turn["role"] for turn in row.turns][1:] == ["user", "assistant"] * 3
    assert "bird" in policy.asked[1]
    said = user.asked[1]
    assert said.index("word") < said.index("cat") < said.index("dog") < said.index("bird") < said.index("horse")
    assert "Spell." not in said, "what the system says to the assistant"
    answers = 3 * len(tokenizer.response("dog"))
    assert row.action_mask.sum() == answers, "only the policy's own words are trained"


async def test_a_call_is_sampled_as_the_config_says_unless_it_says_otherwise(
    tiny_model: Path, tokenizer: ChatTokenizer
) -> None:
    judge = speaker(tokenizer, "tac")
    rollout, _ = await run(tiny_model, "asks_the_judge", judge, {"max_tokens": 3, "temperature": 0.0}, n=1)
    assert [row.reward for row in rollout.rows] == [1.0]
    told, default = judge.requests
    assert (told.sampling.max_tokens, told.sampling.temperature) == (3, 0.0)
    assert (default.sampling.max_tokens, default.sampling.temperature) == (7, 0.5)
    assert told.sampling.stop_token_ids == tokenizer.stop_ids


async def test_an_attempt_keeps_its_engine_and_every_call_has_a_seed_of_its_own(
    tiny_model: Path, tokenizer: ChatTokenizer
) -> None:
    judges = [speaker(tokenizer, "tac") for _ in range(2)]
    for judge in judges:
        await run(tiny_model, "asks_the_judge", judge, {})
    sessions = [id(session) for session in judges[0].sessions]
    assert len(set(sessions)) == 2 and len(sessions) == 4
    seeds = [[request.sampling.seed for request in judge.requests] for judge in judges]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 4


async def test_a_prompt_without_room_for_an_answer_fails_the_attempt(
    tiny_model: Path, tokenizer: ChatTokenizer
) -> None:
    judge = speaker(tokenizer, "tac")
    rollout, _ = await run(tiny_model, "asks_the_judge", judge, {"question": "cat horse bird"}, max_length=8)
    assert rollout.failed == {"workflow_error": 2} and "auxiliary.judge.max_length" in str(rollout.problem)
    model = AuxiliaryModel("judge", AuxiliaryConfig(model="m", max_length=8), tokenizer, judge.generate)
    with pytest.raises(RequestRefused, check=about("auxiliary.judge.max_length", 8)):
        await model.chat([{"role": "user", "content": "cat horse bird"}])
    assert judge.asked == []


async def test_a_dead_engine_of_an_auxiliary_model_ends_the_run_with_its_name(
    tiny_model: Path, tokenizer: ChatTokenizer
) -> None:
    def dies(_: str) -> str:
        raise ActorDied("the engine failed to answer", field="auxiliary-judge-0")

    with pytest.raises(ActorDied, check=about("auxiliary-judge-0")):
        await run(tiny_model, "asks_the_judge", Speaker(tokenizer, dies), {})


async def test_a_name_that_is_none_of_the_config_is_told_with_the_nearest(
    tiny_model: Path, tokenizer: ChatTokenizer
) -> None:
    settings = config(**{"auxiliary.judges": {"model": "some/model"}})
    options = settings.explorer.model_copy(update={"workflow_options": {"user_simulator": {"user": "judge"}}})
    with pytest.raises(ConfigError, check=about("auxiliary", "judge"), match="judges"):
        build_workflow("user_simulator", options, auxiliary=settings.auxiliary)

    async def nothing(*_: Any) -> Any:
        raise AssertionError("not asked")

    model = Model(nothing, nothing, tokenizer, max_tokens=1, max_prompt_tokens=1, max_length=1, images=Path("images"))
    with pytest.raises(ConfigError, check=about("auxiliary", "judge")):
        model.auxiliary("judge")


def test_every_auxiliary_model_has_its_engines_in_the_plan() -> None:
    judge = {"model": "some/model", "engine": {"count": 2, "cpus": 0.5, "memory_gib": 3}}
    parts = {part.name: part for part in plan_placement(config(**{"auxiliary.judge": judge}))}
    assert (parts["auxiliary-judge"].count, parts["auxiliary-judge"].cpus) == (2, 0.5)
    assert parts["engine_pool"].count == 2, "each model has a membership of its own"
