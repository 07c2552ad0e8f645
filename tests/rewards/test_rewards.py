"""Reward functions, how several become one, and who runs them under a deadline."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from rayrft import rewards
from rayrft.config.reward import RewardConfig, RewardPart
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards import RewardResult, StepReward, Transcript, build_reward
from rayrft.rewards.base import combine, score
from rayrft.rewards.scorer import ActorBackend, DomainStats, HostedReward, RewardActor, Rewards, Scorer
from tests.errors import about
from tests.rewards.scored import result as at_once
from tests.rewards.trouble import HERE, task, transcripts
from tests.scripted import ScriptedChat, handle

pytestmark = pytest.mark.usefixtures("forked_templates")


def test_exact_match_ignores_surrounding_space_alone_and_reasoning_gym_verifies_its_own_tasks() -> None:
    for response, value in ((" tac\n", 1.0), ("tacx", 0.0), ("Tac", 0.0)):
        assert at_once("exact", "tac", response).value == value
    assert at_once("exact", "", "").value is None, "a task without an answer"
    for response, right in (("tac", True), ("xyz", False)):
        found = at_once("reasoning_gym", "tac", response, source_dataset="spell_backward", word="cat")
        assert found.value is not None and (found.value == 1.0) == right and (found.value < 0.5) != right


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("k12", {"options": "A. cat B. dog"}),
        ("k12", {"options": [1, 2]}),
        ("k12", {"options": {"A": 1, "B": 2}}),
        ("k12", {"blanks": "B"}),
        ("k12", {"blanks": [3, 4]}),
        ("k12", {"tolerance": "0.1", "kind": "number"}),
        ("k12", {"tolerance": True, "kind": "number"}),
        ("k12", {"kind": ["choice"]}),
        ("vision", {"kind": ["point"]}),
        ("vision", {"box": "1234", "kind": "point"}),
        ("vision", {"radius": "5", "kind": "point"}),
        ("code", {"language": "Python 3", "tests": ["assert f() == 1"]}),
        ("code", {"entry_point": ["f"], "tests": ["assert f() == 1"]}),
    ],
)
def test_metadata_of_another_type_makes_the_reward_unknown_and_is_named(name: str, metadata: dict[str, Any]) -> None:
    answer = "1, 2" if name == "vision" else "B"
    found = at_once(name, answer, answer, **metadata)
    assert found.value is None and f"metadata.{next(iter(metadata))}: does not fit" in str(found.reason)


def test_options_may_be_by_letter_and_missing_values_of_metadata_are_those_of_the_reward() -> None:
    for options in ["cat", "dog"], ("cat", "dog"), {"A": "cat", "B": "dog"}, {"B": "dog", "A": "cat"}:
        assert at_once("k12", "B", "The answer is dog", options=options).value == 1.0
        assert at_once("k12", "B", "The answer is cat", options=options).value == 0.0
    given = {"kind": None, "options": None, "blanks": None, "tolerance": None}
    assert at_once("k12", "tac", "tac", **given).value == 1.0
    assert at_once("k12", "10", "10.5", {"kind": "number", "tolerance": 0.1}, **given).value == 1.0


async def scored(reward: Any, response: str = "a") -> RewardResult:
    return await score(reward, task("a"), Transcript.of(task("a"), response))


async def test_a_format_is_its_blocks_in_order_and_nothing_else() -> None:
    for response, value, tags in (
        ("<think>a</think> <answer>b</answer>\n", 1.0, 1.0),
        ("<think>a</think><answer>b</answer> so", 0.0, 1.0),
        ("Well: <think>a</think><answer>b</answer>", 0.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 1.0),
        ("<think>a<answer>b</answer></think>", 0.0, 1.0),
        ("<think> </think><answer>b</answer>", 0.0, 1.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0, 0.5),
        ("<think>a</think><answer>b", 0.0, 0.5),
        ("<think>" * 100_000, 0.0, 0.0),
        ("", 0.0, 0.0),
    ):
        found = await scored(build_reward("format", {}), response)
        assert (found.value, found.components) == (value, {"tags": tags}), response[:99]


def test_a_reward_of_unknown_name_path_or_options_is_refused() -> None:
    for name, options, about_it in (
        ("exatc", {}, ("reward.name", "exatc")),
        ("exact", {"strict": True}, ("reward.options",)),
        ("no.such.module:reward", {}, ("reward.name",)),
    ):
        with pytest.raises(ConfigError, check=about(*about_it)):
            build_reward(name, options)


async def test_what_is_no_number_is_an_unknown_reward_and_not_the_end_of_the_run() -> None:
    for result in (
        float("nan"),
        float("inf"),
        RewardResult(float("-inf"), {"part": 1.0}),
        RewardResult("good"),  # type: ignore[arg-type]
        RewardResult(1.0, {"part": "some"}),  # type: ignore[dict-item]
        RewardResult(1.0, turns=(1.0, 0.0)),
        RewardResult(1.0, turns=(float("nan"),)),
        RewardResult(1.0, shaping=float("inf")),
        RewardResult(1.0, {"part": float("nan")}),
        RewardResult(None, {"part": float("nan")}, "away", turns=(1.0, 2.0), shaping=float("nan")),
        "good",
        None,
    ):
        found = await scored(lambda task, response: result)  # noqa: B023
        assert found.value is None and found.reason, result
        assert (found.turns, found.shaping) == ((), 0.0) and found.components.get("part", 1.0) == 1.0
        value = result.value if isinstance(result, RewardResult) else result
        assert not isinstance(value, float) or math.isfinite(value) or found.reason == f"the reward is {value}"


async def test_a_function_sees_the_last_answer_and_a_reward_model_the_whole_conversation() -> None:
    turns = ("user", "Why?"), ("assistant", "So."), ("user", "Sure?"), ("assistant", "Yes.")
    transcript = Transcript(tuple({"role": role, "content": content} for role, content in turns), ("cat.png",), "stop")
    seen = list[Any]()

    class Model:
        def score(self, task: Task, transcript: Transcript) -> RewardResult:
            seen.append(transcript)
            return RewardResult(1.0, turns=tuple(float(len(answer)) for answer in transcript.answers))

    class Later(Model):
        async def score(self, task: Task, transcript: Transcript) -> RewardResult:  # type: ignore[override]
            return super().score(task, transcript)

    await score(lambda task, response: seen.append(response) or 1.0, task("a"), transcript)
    for model in (Model(), Later()):
        assert (await score(model, task("a"), transcript)).turns == (3.0, 4.0)
    assert seen == ["Yes.", transcript, transcript]


# Several rewards of one answer

PARTS = [
    RewardPart(name="right"),
    RewardPart(name="style", weight=0.5),
    RewardPart(name="safe", role="gate"),
    RewardPart(name="format", role="shape", weight=0.1),
]


def result(value: float | None, **components: float) -> RewardResult:
    return RewardResult(value, components, None if value is not None else "away")


def test_rewards_are_added_by_weight_shut_by_gates_and_shaped_apart() -> None:
    for values, value, shaping in (
        ((1.0, 0.5, 1.0, 1.0), 1.25, 0.1),
        ((1.0, 0.5, 0.0, -1.0), 0.0, -0.1),
        ((1.0, 0.5, -3.0, 1.0), 0.0, 0.1),
        ((None, 0.5, 1.0, 1.0), None, 0.1),
        ((None, None, 0.0, 1.0), 0.0, 0.1),  # shut, whatever the others would say
        ((1.0, 0.5, None, 1.0), None, 0.1),
        ((1.0, 0.5, 1.0, None), None, 0.0),
    ):
        found = combine(PARTS, [result(each, seen=2.0) for each in values])
        assert (found.value, found.shaping) == (value, pytest.approx(shaping))
        known = {part.name: each for part, each in zip(PARTS, values, strict=True) if each is not None}
        assert found.components == {**known, **{f"{part.name}.seen": 2.0 for part in PARTS}}
        assert (found.value is None) == ("away" in str(found.reason))


def test_parts_with_full_marks_sum_to_full_marks_and_what_a_part_shapes_is_weighed_with_it() -> None:
    parts = [RewardPart(name=str(weight), weight=weight) for weight in (0.7, 0.2, 0.1)]
    found = combine(parts, [RewardResult(1.0, turns=(1.0,))] * 3)
    assert (found.value, found.turns) == (1.0, (1.0,)), "and not 0.9999999999999999"
    found = combine(PARTS[:2], [RewardResult(1.0, shaping=0.5), RewardResult(1.0, shaping=-1.0)])
    assert (found.value, found.shaping) == (1.5, 0.0)


def test_two_parts_of_one_name_are_told_apart_by_a_label_and_one_must_be_added() -> None:
    with pytest.raises(ValueError, match="Give one a label"):
        RewardConfig(parts=[{"name": "exact"}, {"name": "exact", "weight": 0.5}])
    RewardConfig(parts=[{"name": "exact"}, {"name": "exact", "weight": 0.5, "label": "again"}])
    found = combine([RewardPart(name="a"), RewardPart(name="a", label="b")], [result(1.0, x=1.0), result(0.5, x=2.0)])
    assert found.value == 1.5 and found.components == {"a": 1.0, "b": 0.5, "a.x": 1.0, "b.x": 2.0}
    with pytest.raises(ValueError, match="a part with role add"):
        RewardConfig(parts=[{"name": "exact", "role": "gate"}])


def test_rewards_of_turns_and_of_steps_are_added_where_they_end() -> None:
    first, second = RewardResult(1.0, turns=(1.0, 2.0)), RewardResult(1.0, turns=(4.0, 8.0))
    assert combine(PARTS[:2], [first, second]).turns == (3.0, 6.0)
    assert combine(PARTS[:3], [first, second, result(0.0)]).turns == (), "shut"
    assert combine(PARTS[:2], [first, result(1.0)]).turns == (1.0, 2.0)
    first = RewardResult(1.0, steps=(StepReward(0, 3, 1.0), StepReward(1, 2, 2.0)))
    second = RewardResult(1.0, steps=(StepReward(0, 2, 4.0), StepReward(1, 2, 8.0)))
    added = (StepReward(0, 2, 2.0), StepReward(0, 3, 1.0), StepReward(1, 2, 6.0))
    assert combine(PARTS[:2], [first, second]).steps == added
    assert combine(PARTS[:3], [first, second, result(0.0)]).steps == (), "shut"


async def test_steps_that_end_in_order_inside_their_answers_are_kept_and_others_make_the_reward_unknown() -> None:
    told = await scored(lambda task, response: RewardResult(1.0, steps=(StepReward(0, 1, 1.0),)), "<think></think>ab")
    assert told.steps == (StepReward(0, len("<think></think>a"), 1.0),), (
        "a function counts in the answer that it is given"
    )
    steps = (StepReward(0, 0, 1), StepReward(0, np.int64(2), np.float32(0.5)))  # type: ignore[arg-type]
    found = await scored(lambda task, response: RewardResult(1.0, steps=steps), "ab")
    assert found.steps == (StepReward(0, 0, 1.0), StepReward(0, 2, 0.5))
    assert [type(step.end) for step in found.steps] == [int, int] and type(found.steps[1].value) is float
    for steps, says in (
        ((StepReward(0, 3, 1.0),), "steps[0].end is 3, and may be 0 to 2"),
        ((StepReward(0, -1, 1.0),), "steps[0].end is -1"),
        ((StepReward(0, 1.5, 1.0),), "steps[0].end is 1.5"),  # type: ignore[arg-type]
        ((StepReward(1, 1, 1.0),), "steps[0].turn is 1, and may be 0 to 0"),
        ((StepReward(0, 1, 1.0), StepReward(0, 1, 2.0)), "steps[1].end is 1, not after"),
        ((StepReward(0, 2, 1.0), StepReward(0, 1, 2.0)), "steps[1].end is 1, not after"),
        ((StepReward(0, 1, 1.0), StepReward(0, 2, math.nan)), "steps[1].value is nan"),
        (((0, 1, 1.0),), "steps[0] is not a StepReward"),
    ):
        found = await scored(lambda task, response: RewardResult(1.0, steps=steps), "ab")  # noqa: B023
        assert found.value is None and found.error and says in str(found.reason) and found.steps == ()


# The scorer


@asynccontextmanager
async def scorer_of(**config: Any) -> AsyncIterator[Rewards]:
    scorer = Scorer(RewardConfig(**config), [])
    pool = Rewards(RewardConfig(**config), [], lambda: scorer)
    await pool.open()
    try:
        yield pool
    finally:
        await scorer.close()


async def test_a_reward_that_raises_hangs_or_dies_is_unknown_and_touches_no_other_of_its_group() -> None:
    async with scorer_of(name=HERE + "moody", deadline_s=2.0, workers=2) as scorer:
        answers = transcripts("raise", "fine", "hang", "die", "fine", "say", "fine")
        results = await scorer.score(task("a"), answers)
        assert [each.value for each in results] == [None, 1.0, None, None, 1.0, None, 1.0]
        raised, _, hung, died, _, said, _ = (str(each.reason) for each in results)
        assert raised == "ZeroDivisionError: division by zero"
        assert hung == "timeout: no reward within 2 s" and "process died" in died and "exit code 1" in died
        assert "cannot be unpickled" in said
        stats = scorer.take_stats()[""]
        assert (stats.scored, stats.unknown, stats.pending) == (7, 4, 0) and stats.slowest_s >= 2.0
        assert (stats.errors, stats.retried) == (4, 1), "a call whose process dies is made twice"
        assert [each.value for each in await scorer.score(task("a"), transcripts("fine"))] == [1.0]
        assert scorer.take_stats()[""].unknown == 0


async def test_a_slow_domain_holds_up_no_other() -> None:
    domains = {"slow": {"name": HERE + "moody", "deadline_s": 60.0}, "fast": {"name": HERE + "moody"}}
    async with scorer_of(domains=domains) as scorer:
        hanging = asyncio.ensure_future(scorer.score(replace(task("a"), domain="slow"), transcripts("hang", "hang")))
        [fine] = await scorer.score(replace(task("a"), domain="fast"), transcripts("fine"))
        assert fine.value == 1.0 and not hanging.done()
        assert {domain: each.pending for domain, each in scorer.take_stats().items()} == {"slow": 2, "fast": 0}
        hanging.cancel()


@pytest.mark.parametrize(
    ("name", "function", "hides"),
    [
        (HERE + "sized", None, True),
        (HERE + "SizedTranscript", None, False),
        ("trl", "tests.rewards.foreign:sizes", False),
        ("verl", "tests.rewards.foreign:compute_length", False),
    ],
)
async def test_reasoning_is_hidden_from_every_kind_of_reward_or_shown(
    name: str, function: str | None, hides: bool
) -> None:
    text = "<think>b</think>a"
    for reasoning, size in ((None, 1 if hides else len(text)), ("hide", 1), ("show", len(text))):
        options = {"function": function} if function else {}
        async with scorer_of(name=name, options=options, reasoning=reasoning) as scorer:
            [found] = await scorer.score(task("a"), [Transcript.of(task("a"), text)])
            assert found.value == size / 10, reasoning
            assert [step.end for step in found.steps] == [len(text)] * ("Transcript" in name)


async def test_a_call_that_hangs_takes_no_worker_from_others() -> None:
    async with scorer_of(name=HERE + "moody", deadline_s=8.0, workers=1) as scorer:
        hanging = asyncio.ensure_future(scorer.score(task("a"), transcripts("hang", "hang")))
        fine = await scorer.score(task("a"), transcripts(*["fine"] * 20))
        assert [each.value for each in fine] == [1.0] * 20 and not hanging.done()
        assert [each.reason for each in await hanging] == ["timeout: no reward within 8 s"] * 2
        again = await scorer.score(task("a"), transcripts(*["fine"] * 20))
        assert [each.value for each in again] == [1.0] * 20


async def test_a_process_whose_call_was_slow_stays_and_runs_on_as_before() -> None:
    async with scorer_of(name=HERE + "moody", deadline_s=20.0, workers=1, spare_workers=1) as scorer:
        seen = set[str | None]()
        for _ in range(3):
            results = await scorer.score(task("a"), transcripts("fine", "nap", "niceness", "niceness"))
            assert [each.value for each in results] == [1.0, 1.0, *[float(os.getpriority(os.PRIO_PROCESS, 0))] * 2]
            seen |= {each.answer for each in results[2:]}
        assert len(seen) <= 2, "no process was replaced"


async def test_a_stand_in_that_cannot_be_started_costs_no_call(tmp_path: Path) -> None:
    options = {"mark": str(tmp_path / "mark")}
    async with scorer_of(name=HERE + "one_at_a_time", options=options, deadline_s=20.0, workers=1) as scorer:
        # A nap is slow after calls that took no time, and there is no room for a second process.
        results = await scorer.score(task("a"), transcripts(*["fine"] * 3, "nap", "fine", "nap", "fine"))
        assert [each.value for each in results] == [1.0] * 7


async def test_calls_that_wait_are_made_together_and_those_that_fail_together_each_alone() -> None:
    # As many as a quarter of the deadline has room for, which is four of them on the slowest machine.
    async with scorer_of(name=HERE + "Together", deadline_s=6.0, workers=1) as scorer:
        fine = await scorer.score(task("a"), transcripts(*["fine", "bad"] * 5))
        assert [each.value for each in fine] == [1.0, 0.0] * 5, "each has its own"
        sizes = [each.components["of"] for each in fine]
        assert sizes == [1.0] + [4.0] * 8 + [1.0], "the first one says how long it takes"
        for trouble, tries in (("raise", 1), ("lose", 1), ("die", 2)):
            spoilt = await scorer.score(task("a"), transcripts("fine", trouble, "fine", "fine"))
            assert [each.value for each in spoilt] == [1.0, None if trouble != "lose" else 1.0, 1.0, 1.0], trouble
            assert [each.tries for each in spoilt] == [tries] * 4, trouble
        stats = scorer.take_stats()[""]
        assert (stats.scored, stats.errors) == (22, 2)


@pytest.mark.parametrize("trouble", ["cancelled", "exits", "times out"])
async def test_a_coroutine_that_cancels_exits_or_times_out_is_unknown_and_costs_no_other(trouble: str) -> None:
    async with scorer_of(name=HERE + "Gone") as scorer:
        gone, fine = await scorer.score(task("a"), transcripts(trouble, "fine"))
        assert gone.value is None and gone.reason and fine.value == 1.0
        assert trouble != "times out" or gone.reason == "TimeoutError: the judge is away", "not the deadline's"


async def test_a_coroutine_is_cancelled_at_its_deadline_and_others_run_meanwhile() -> None:
    async with scorer_of(name=HERE + "Meeting", options={"together": 3}, deadline_s=2.0) as scorer:
        results = await scorer.score(task("a"), transcripts("a", "b", "c"))
        assert [each.value for each in results] == [1.0] * 3, "each waits for the others"
        [alone] = await scorer.score(task("a"), transcripts("never"))
        assert alone.value is None and alone.reason == "timeout: no reward within 2 s"


async def test_a_call_that_waits_is_given_up_or_cannot_be_sent_holds_up_nobody() -> None:
    async with scorer_of(name=HERE + "moody", deadline_s=2.0, workers=1) as scorer:
        given_up = asyncio.ensure_future(scorer.score(task("a"), transcripts("nap", "fine")))
        await asyncio.sleep(0)
        following = asyncio.ensure_future(scorer.score(task("a"), transcripts("fine")))
        given_up.cancel()
        [found] = await following
        assert found.value == 1.0 and scorer.take_stats()[""].scored == 1
        [lost] = await scorer.score(task("a", hook=lambda: None), transcripts("fine"))
        assert lost.value is None and "cannot be sent" in str(lost.reason)
        results = await scorer.score(task("a"), transcripts("nap", "nap", "nap", "nap"))
        assert [each.value for each in results] == [1.0] * 4, "of 0.7 s, one after another; each has its own deadline"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"domains": {"a": {"name": HERE + "cannot_be_built", "workers": 3}}}, "reward.name"),
        ({"name": "exact", "options": {"strict": True}}, "reward.options"),
    ],
)
async def test_a_reward_that_cannot_be_built_is_an_error_at_the_start(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        async with scorer_of(**config):
            pass


async def test_a_process_that_cannot_be_started_again_is_an_error_of_every_call(tmp_path: Path) -> None:
    options = {"mark": str(tmp_path / "mark")}
    async with scorer_of(name=HERE + "only_once", options=options, deadline_s=1.0) as scorer:
        outcomes = await asyncio.gather(
            *(scorer.score(task("a"), transcripts(each)) for each in ("hang", "fine", "fine")), return_exceptions=True
        )
        assert isinstance(outcomes[0], list) and outcomes[0][0].value is None
        for outcome in outcomes[1:]:
            assert isinstance(outcome, ConfigError) and "no more" in str(outcome)
        with pytest.raises(ConfigError, match="no more"):
            await scorer.score(task("a"), transcripts("fine"))


async def test_a_task_of_a_domain_without_a_reward_is_refused() -> None:
    async with scorer_of(domains={"math": {"name": "exact"}}) as scorer:
        with pytest.raises(ConfigError, check=about("reward.domains", "code")):
            await scorer.score(replace(task("a"), domain="code"), transcripts("a"))


# The pool


@pytest.mark.usefixtures("ray_cluster")
async def test_reward_actors_share_the_work_and_one_that_dies_is_restarted(tmp_path: Path) -> None:
    config = RewardConfig(
        name=HERE + "names_its_actor", options={"mark": str(tmp_path / "mark")}, placement="pool", actors=2
    )
    placed = ray.remote(RewardActor).options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
    actors = [handle(placed.remote(config, [])) for _ in range(config.actors)]
    pool = Rewards(config, [], lambda: ActorBackend(actors))
    await pool.open()
    groups = await asyncio.gather(*(pool.score(task("a"), transcripts("where")) for _ in range(2)))
    first, second = (group[0].answer for group in groups)
    assert first != second, "the second call goes to the idle one"
    [dead] = await pool.score(task("a"), transcripts("kill the actor"))
    assert dead.value == 1.0, "made again on another"
    [both] = await pool.score(task("a"), transcripts("always kill the actor"))
    assert both.value is None and "reward actor failed" in str(both.reason)
    [fine] = await pool.score(task("a"), transcripts("where"))
    assert fine.value == 1.0 and fine.answer not in (first, second)
    stats = pool.take_stats()[""]
    assert stats == DomainStats(5, 1, 1, 2, stats.seconds, stats.slowest_s), "those of the dead are known, too"


async def test_a_judge_elsewhere_asks_the_models_that_its_process_is_given() -> None:
    yes = ScriptedChat(lambda messages, seed: "yes!" if "Is x right?" in messages[0]["content"] else "")
    actor = RewardActor(RewardConfig(name=HERE + "AsksAnother"), [], lambda: {"grader": yes})
    await actor.open()
    results = await actor.score(task("a"), transcripts("x", "y"))
    assert [result.components for result in results] == [{"said": 4.0}, {"said": 0.0}]


async def test_a_reward_call_passes_six_functions() -> None:
    """In the Explorer and in the process, apart from the queue, and from what they look up and count."""
    passed, folder = set[str](), f"{Path(rewards.__file__).parent}{os.sep}"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and code.co_name[0] != "<":
            passed.add(code.co_qualname)

    async with scorer_of(name=HERE + "moody", deadline_s=20.0, workers=1) as scorer:
        hosted, [transcript] = HostedReward(HERE + "moody", {}), transcripts("say so")
        sys.setprofile(note)
        try:
            [scored] = await scorer.score(task("a"), [transcript])
            [again] = await hosted.score([(task("a"), transcript)])
        finally:
            sys.setprofile(None)
    assert scored.value == again.value == 1.0
    path = {"Rewards.score", "Scorer.score", "InProcesses.score", "HostedReward.score", "score", "checked"}
    assert passed - {"Transcript.response", "Transcript.answers", "DomainStats.add"} == path


async def test_a_reward_that_runs_inline_needs_no_process() -> None:
    before = psutil.Process().children()
    pool = Rewards(RewardConfig(name="exact"), [], None)
    await pool.open()
    right, wrong = await pool.score(task("a"), transcripts("a", "b"))
    assert (right.value, wrong.value) == (1.0, 0.0) and psutil.Process().children() == before


@pytest.mark.parametrize("name", ["exact", "math"])
async def test_of_several_right_answers_any_gives_full_marks(name: str) -> None:
    asked = replace(task("1/2"), other_answers=("0.25", "x + 1"))
    async with scorer_of(name=name) as scorer:
        answers = ["1/2", "x + 1", "7"]
        found = await scorer.score(asked, [Transcript.of(asked, answer) for answer in answers])
        assert [result.value for result in found] == [1.0, 1.0, 0.0]


async def test_parts_are_added_up_by_their_present_weights() -> None:
    def of(weight: float) -> RewardConfig:
        return RewardConfig.model_validate(
            {"parts": [{"name": "exact"}, {"name": "exact", "label": "b", "weight": weight}]}
        )

    rewards, values = Rewards(of(1.0), [], None), []
    await rewards.open()
    for weight in (1.0, 3.0):
        rewards.adjust(of(weight))
        [result] = await rewards.score(task("a"), transcripts(task("a").answer))
        values.append(result.value)
    assert values == [2.0, 4.0]
