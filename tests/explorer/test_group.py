"""A group from task to rows: through operators on experiences, with a greedy baseline, by a workflow of turns."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rayrft.algorithms import build
from rayrft.buffer.events import GroupReport
from rayrft.config import load_config
from rayrft.data.turns import compute_advantages
from rayrft.errors import ConfigError, OperatorFailed, RayrftError
from rayrft.experience import Experience, Task
from rayrft.explorer.evaluation import Attempt
from rayrft.explorer.scoring import ScoredGroup, with_verified
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.unstored import UnstoredAnswers
from rayrft.explorer.workflows import register_workflow
from rayrft.pipelines.experiences import VERIFIED, VerifiedGroup, check_experiences, experience_batch, experience_chain
from rayrft.pipelines.run.groups import GroupHost, OperatorActor
from rayrft.rewards import RewardResult
from tests.buffer.rows import group
from tests.errors import about
from tests.explorer.scripted import QuickEngine, Rewards, Taken, config, make_explorer, run_group
from tests.scripted import PoolHere, ScriptedChat

PLUGIN = Path(__file__).with_name("verifying.py")
DIES = {"name": "dies_of", "worth": 1.0}


IN_PROCESSES = {"scored_again", "hangs_here", "dies_of"}
"""Operators that ask, or that must not end the tests."""


class Verifying:
    """An Explorer whose groups of two, of rewards 1 and 0 unless told otherwise, go through these operators."""

    def __init__(self, tiny_model: Path, operators: list[Any], *rewards: float, **overrides: Any) -> None:
        operators = [{"name": each} if isinstance(each, str) else each for each in operators]
        settings = {"pipelines.experiences": operators, "plugins": [str(PLUGIN)], **overrides}
        if any(each["name"] in ("expert_rows", "best_against_worst") for each in operators):
            settings["pipelines.made"] = "found"
        self.config, self.taken = config(**settings), Taken()
        given = Rewards(*rewards or (1.0, 0.0) * 3)
        here = IN_PROCESSES.isdisjoint(each["name"] for each in operators)
        with mock.patch("rayrft.pipelines.run.host.ProcessPool", PoolHere) if here else nullcontext():
            self.explorer = make_explorer(self.config, tiny_model, QuickEngine(), self.taken, given)
        self.pipeline: Any = self.explorer.flow.pipeline

    async def __aenter__(self) -> Verifying:
        await self.pipeline.operators.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pipeline.operators.close()

    async def group(self) -> Taken:
        await run_group(self.explorer, self.config)
        return self.taken


async def test_rows_that_stay_are_verified_and_the_others_are_counted_by_operator_and_reason(tiny_model: Path) -> None:
    async with Verifying(tiny_model, ["worth"], **{"explorer.drop_zero_variance": False}) as verifying:
        taken = await verifying.group()
        stats = verifying.pipeline.take_stats()["worth"]
    assert [row.reward for row in taken.rows] == [1.0] and taken.rows[0].status == VERIFIED
    assert taken.dropped == {"worth: too low": 1}
    assert (taken.report.rows, taken.report.reward_sum) == (2, 1.0), "what was sampled counts as it was"
    assert (stats.taken, stats.left_out, stats.failed) == (2, 1, 0) and stats.seconds > 0


@pytest.mark.parametrize(
    ("operators", "rewards", "priorities", "dropped"),
    [
        ([{"name": "worth", "least": 2.0}], [], [], {"worth: too low": 2}),
        (["worth"], [], [], {"worth: too low": 1, "zero_variance": 1}),
        (["asked"], [], [], {"asked: Spell this word backward 000, x, own, None": 2}),
        (["bonus", "by_reward"], [1.25, 0.25], [2.25, 1.25], {}),
        (["scored_again"], [0.5, 0.75], [1.0, 1.0], {}),
    ],
    ids=["none is left", "made equal", "see the task", "give rewards and priorities", "score answers again"],
)
async def test_operators_decide_what_a_group_ends_as(
    tiny_model: Path, operators: list[Any], rewards: list[float], priorities: list[float], dropped: dict[str, int]
) -> None:
    async with Verifying(tiny_model, operators, 1.0, 0.0, 0.5, 0.75) as verifying:
        taken = await verifying.group()
    assert [row.reward for row in taken.rows] == rewards and [row.priority for row in taken.rows] == priorities
    assert taken.dropped == dropped and taken.report.rows == 2


async def test_operators_in_an_actor_ask_the_models_that_it_is_given_and_know_the_task(tiny_model: Path) -> None:
    judge = ScriptedChat(lambda messages, seed: '{"reason": "", "grade": 7}' if "tac" in str(messages) else "nothing")
    operators = [{"name": "judged", "model": "judge", "column": "response", "least": 5.0}, {"name": "scored_again"}]
    known = {"auxiliary": {"judge": {"model": str(tiny_model)}}, "reward.name": "exact"}
    settings = config(plugins=[str(PLUGIN)], **{"pipelines.experiences": operators}, **known)
    chain = experience_chain(settings, str(tiny_model))
    actor = OperatorActor(chain, settings.pipelines, lambda: {"judge": judge}, settings.auxiliary, settings.scoring)
    await actor.open()
    task = Task.create("test", "Spell cat backward", "tac")
    rows = [
        replace(row, task_id=task.id, turns=({"role": "assistant", "content": said},))
        for row, said in zip(group(1), ("tac", "cat"), strict=True)
    ]
    worked = await actor.apply(experience_batch(task, rows), task)
    await actor.close()
    assert worked.kept == [0] and worked.changed.column("reward").to_pylist() == [1.0] and not actor._tasks


def test_a_reward_that_an_operator_gives_counts_before_shaping_and_others_stay_what_they_were_before_it() -> None:
    first, second, third = (replace(row, reward=np.float32(0.9).item()) for row in group(1, 3))
    scored = ScoredGroup([first, second, third], Counter(), GroupReport(), raw_rewards=[1.0, 1.0, 0.0])
    given = VerifiedGroup([replace(second, reward=0.25), third], Counter({"worth: too low": 1}))
    verified = with_verified(scored, given)
    assert verified.raw_rewards == [0.25, 0.0] and verified.dropped == {"worth: too low": 1}


@pytest.mark.parametrize("name, pair", [("expert_rows", None), ("best_against_worst", True)])
async def test_made_rows_become_demonstrations_with_parents(tiny_model: Path, name: str, pair: bool | None) -> None:
    async with Verifying(tiny_model, [{"name": name, "keep": True}]) as verifying:
        taken = await verifying.group()
        again = await verifying.group()
    made = taken.made["found"]
    assert len(taken.rows) == 2 and made[0].chosen is pair and {row.source for row in made} == {"expert"}
    assert made[0].labels["parents"] == taken.rows[0].experience_id and made[0].labels["made_by"].startswith(name)
    half = len(again.made["found"]) // 2
    ids = [row.experience_id for row in again.made["found"]]
    assert ids[:half] == ids[half:], "made again, they are the same rows, which the Buffer skips"


async def test_made_rows_that_are_left_out_are_no_sampled_ones_that_were_dropped(tiny_model: Path) -> None:
    only_sampled = {"name": "expression", "where": "source = 'usual'"}
    async with Verifying(tiny_model, [{"name": "expert_rows", "keep": True}, only_sampled]) as verifying:
        taken = await verifying.group()
        stats = verifying.pipeline.take_stats()
    assert len(taken.rows) == taken.report.rows == 2 and not taken.dropped and not taken.made
    assert (stats["expert_rows"].made, stats["expression"].taken, stats["expression"].left_out) == (1, 3, 1)


@pytest.mark.parametrize(
    "operators, dropped",
    [
        (["raises_on_wrong"], {"raises_on_wrong: raised LookupError": 1}),
        (["hangs_here"], {"hangs_here: timeout": 2}),
        (["worth", DIES], {"dies_of: failed": 2}),
        (["gives_other_tokens"], {"operators: failed": 2}),
        (["turns_around"], {"operators: failed": 2}),
        ([{"name": "best_against_worst", "keep": True}, "makes_sampled_rows"], {"operators: failed": 2}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
async def test_what_an_operator_spoils_is_left_out_and_counted_and_the_next_group_goes_on(
    tiny_model: Path, operators: list[Any], dropped: dict[str, int]
) -> None:
    settings: dict[str, Any] = {"explorer.drop_zero_variance": False}
    if "hangs_here" in operators:
        settings["pipelines.deadline_s"] = 0.5
    async with Verifying(tiny_model, operators, **settings) as verifying:
        for groups in (1, 2):
            assert (await verifying.group()).dropped == dropped
            assert len(verifying.explorer.flow.failed) == (0 if "raises_on_wrong" in operators else groups)


async def test_groups_are_worked_on_together_and_one_that_fails_harms_no_other(tiny_model: Path) -> None:
    operators = ["bonus", "dies_of", "worth", {"name": "expert_rows", "keep": True, "max_pass_rate": 1.0}]
    async with Verifying(tiny_model, operators) as verifying:
        rewards = [(0.0, float(number % 3 if number != 7 else 7), 1.0) for number in range(1, 60)]
        given = [
            [replace(row, reward=reward) for row, reward in zip(group(number, 3), each, strict=True)]
            for number, each in enumerate(rewards, start=1)
        ]
        task = Task.create("test", "a question", "an answer")
        found = await asyncio.gather(*(verifying.pipeline.process(task, rows) for rows in given))
        stats = verifying.pipeline.take_stats()
    for number, verified in enumerate(found, start=1):
        if number == 7:
            assert verified.rows == [] and verified.left_out == {"dies_of: failed": 3}
            continue
        kept = [row.experience_id for row in verified.rows]
        assert kept == [f"{number}/1", f"{number}/2"][number % 3 == 0 :]
        assert [row.reward for row in verified.rows] == [number % 3 + 0.25, 1.25][-len(kept) :]
        assert verified.left_out == {"worth: too low": 3 - len(kept)}
        assert verified.made is not None and verified.made.column("group_id").to_pylist() == [str(number)]
    well = [verified for verified in found if verified.rows]
    assert stats["expert_rows"].made == len(well) == 58 and stats["worth"].taken == 3 * len(well)
    assert stats["worth"].left_out == sum(verified.left_out.total() for verified in well)


@pytest.mark.parametrize(
    ("operator", "most"),
    [({"name": "outliers"}, 32), ({"name": "pass_rate"}, 1), ({"name": "pass_rate", "by": "group_id"}, 32)],
)
def test_groups_go_together_if_operators_tell_them_apart(tiny_model: Path, operator: dict[str, Any], most: int) -> None:
    settings = config(plugins=[str(PLUGIN)], **{"pipelines.experiences": [{"name": "worth"}, operator]})
    assert GroupHost(experience_chain(settings, str(tiny_model)), leave_out=True).max_batch() == most


async def test_what_answers_operators_raises_where_the_group_is_waited_for(tiny_model: Path) -> None:
    class Refuses(Rewards):
        async def score(self, task: Task, transcripts: list[Any]) -> list[Any]:
            if next(self.sampled, None) is None:
                raise ConfigError("no reward scores tasks of this domain", field="reward.domains", value=task.domain)
            return [RewardResult(1.0)] * len(transcripts)

    async with Verifying(tiny_model, ["scored_again"]) as verifying:
        verifying.explorer._rewards = Refuses(1.0)  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(ConfigError, match="no reward scores"):
                await verifying.group()


@pytest.mark.parametrize(
    ("operator", "settings", "kind", "problem"),
    [
        (DIES, {}, RayrftError, r"32 consecutive groups failed.*dies_of.*exit code 7"),
        ("raises_on_wrong", {"pipelines.on_error": "stop"}, OperatorFailed, "no such thing"),
    ],
)
async def test_an_operator_that_fails_ends_the_run_after_many_groups_or_at_once(
    tiny_model: Path, operator: Any, settings: dict[str, Any], kind: type[RayrftError], problem: str
) -> None:
    async with Verifying(tiny_model, [operator], **settings) as verifying:
        if not settings:
            verifying.explorer.flow.failed |= dict.fromkeys(range(1, 32), False)
        with pytest.raises(kind, match=problem):
            await verifying.group()


@pytest.mark.parametrize(
    "operators, made, field, problem",
    [
        (["near_duplicates"], None, "pipelines.experiences.0", "looks at all rows"),
        (["says_other_tokens"], None, "pipelines.experiences.0", "what was sampled"),
        (["worth", "mirrors"], None, "pipelines.experiences.1", "mirrors"),
        (["expert_rows"], None, "pipelines.experiences.0", "pipelines.made is missing"),
        (["worth"], "found", "pipelines.made", "no operator makes rows"),
    ],
)
def test_operators_that_cannot_be_are_refused(operators: list[str], made: str | None, field: str, problem: str) -> None:
    chosen = {"pipelines.experiences": [{"name": each} for each in operators], "pipelines.made": made}
    settings = config(plugins=[str(PLUGIN)], **chosen)
    with pytest.raises(ConfigError, match=problem) as raised:
        check_experiences(settings, None)
    assert str(raised.value.field).startswith(field)


@pytest.mark.parametrize(
    ("operator", "used"),
    [({"name": "worth"}, False), ({"name": "heavy"}, True), ({"name": "heavy", "device": "cpu"}, False)],
)
def test_gpus_of_actors_are_for_operators_that_use_them(operator: dict[str, Any], used: bool) -> None:
    chosen = {"pipelines.experiences": [operator], "pipelines.actors.gpus": 1}
    settings = config(plugins=[str(PLUGIN)], **chosen)
    if used:
        check_experiences(settings, "model")
        return
    with pytest.raises(ConfigError, check=about("pipelines.actors.gpus", 1.0)):
        check_experiences(settings, "model")


@pytest.mark.parametrize("operators", [[], [{"name": "worth"}]])
def test_groups_are_not_drawn_by_a_priority_that_no_operator_writes(operators: list[dict[str, Any]]) -> None:
    sampler = {"buffer.sampler": {"name": "priority", "score": "priority"}, "plugins": [str(PLUGIN)]}
    with pytest.raises(ConfigError, check=about("buffer.sampler.score", "priority")):
        check_experiences(config(**sampler, **{"pipelines.experiences": operators}), None)
    check_experiences(config(**sampler, **{"pipelines.experiences": [*operators, {"name": "by_reward"}]}), None)


# Greedy baselines, and workflows of several turns


@register_workflow("two_turns")
class TwoTurns:
    """Asks, answers the model with an observation, and asks again; gives a format reward for the first turn."""

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory:
        trajectory = model.start(task.messages)
        await trajectory.act()
        trajectory.step_reward(0.25 * model.repeat)
        trajectory.observe("again")
        await trajectory.act()
        return trajectory


async def explored(tiny_model: Path, engine: QuickEngine, rewards: Rewards, algorithm: Any, **overrides: Any) -> Taken:
    """What one group of two ends as."""
    settings, taken = config(**{"stages.grpo.algorithm": algorithm, **overrides}), Taken()
    await run_group(make_explorer(settings, tiny_model, engine, taken, rewards), settings)
    return taken


def of_answers(rows: list[Experience], algorithm: Any) -> list[list[float]]:
    """Advantages of the tokens after the prompt, as the trainer computes them."""
    rest = {name: value for name, value in algorithm.items() if name != "name"}
    found = compute_advantages(rows, build(algorithm["name"], rest))
    return [values[row.prompt_length :].tolist() for row, values in zip(rows, found, strict=True)]


async def test_remax_asks_for_one_greedy_answer_and_keeps_the_sampled_ones(tiny_model: Path) -> None:
    engine = QuickEngine()
    taken = await explored(tiny_model, engine, Rewards(1.0, 0.0, 0.25), {"name": "remax"})
    assert sorted(engine.asked) == [(1, 0.0), (2, 1.0)]
    assert of_answers(taken.rows, {"name": "remax"}) == [[0.75] * 3, [-0.25] * 3]
    assert taken.report.rows == 2 and taken.report.tokens == 6 and taken.report.reward_sum == 1.0


async def test_tokens_have_log_probs_and_no_greedy_answer_is_asked_for_without_need(tiny_model: Path) -> None:
    engine = QuickEngine()
    taken = await explored(tiny_model, engine, Rewards(1.0, 0.0), {"name": "grpo"})
    assert engine.asked == [(2, 1.0)]
    assert [row.logprobs[row.action_mask == 1].tolist() for row in taken.rows] == [[-0.5, -0.625, -0.75]] * 2


@pytest.mark.parametrize(("worth", "mean", "unknown"), [(1.0, 0.0, 0), (-1.0, -1.0, 0), (None, math.nan, 5)])
async def test_cut_answers_earn_as_trained(worth: float | None, mean: float, unknown: int, tiny_model: Path) -> None:
    found = await make_explorer(config(), tiny_model, QuickEngine("length"), Taken(), Rewards(worth)).evaluate(1.0)
    assert (found.right, sum(found.unknown.values())) == (0, unknown)
    assert found.mean_reward == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize(
    ("algorithm", "first", "second"),
    [
        # Returns 1 and 0.25: +-0.375. The prompt is one state, with returns to go 1 and 0.25: +-0.375 again. So is the
        # observation, with 1 and 0: +-0.5.
        ({"name": "gigpo", "deviation": False, "discount": 1.0}, 0.75, 0.875),
        ({"name": "dr_grpo"}, 0.5, 0.5),
        ({"name": "grpo", "advantage": "step_wise"}, 0.5**0.5, 0.5**0.5),
    ],
    ids=["gigpo", "whole answers", "step_wise"],
)
async def test_turns_have_advantages(algorithm: dict[str, Any], first: float, second: float, tiny_model: Path) -> None:
    engine = QuickEngine()
    taken = await explored(tiny_model, engine, Rewards(1.0, 0.0), algorithm, **{"explorer.workflow": "two_turns"})
    assert [n for n, _ in engine.asked] == [2, 1, 1] and taken.report.tokens == 12
    for found, sign in zip(of_answers(taken.rows, algorithm), (1, -1), strict=True):
        turns = [*[sign * first] * 3, *[0.0] * (len(found) - 6), *[sign * second] * 3]
        assert len(found) > 6 and found == pytest.approx(turns, abs=1e-5)


async def test_an_explorer_continues_with_a_changed_config(tiny_model: Path) -> None:
    engine, taken, settings = QuickEngine(), Taken(), config(**{"stages.grpo.algorithm": {"name": "remax"}})
    rewards = Rewards(1.0, 0.0, 0.25)
    explorer = make_explorer(settings, tiny_model, engine, taken, rewards)
    changes = {"explorer.sampling.temperature": 0.5, "reward.fallback": 0.5, "evaluation.max_tokens": 2}
    changed = load_config(settings, changes)
    await explorer.adjust(changed)
    await run_group(explorer, settings)
    assert sorted(engine.asked) == [(1, 0.0), (2, 0.5)] and rewards.adjusted == changed.reward
    assert {*engine.limits} == {settings.explorer.sampling.max_tokens}
    engine.limits.clear()
    await explorer.evaluate(0.0)
    assert {*engine.limits} == {2}


async def test_of_answers_that_are_not_stored_the_latest_files_are_kept(tmp_path: Path) -> None:
    task = Task.create("test", "?", "!")
    for number in range(4):
        writer = UnstoredAnswers(tmp_path, "explorer-1", most_bytes=1)  # also after a restart
        await writer.add_evaluated([task], [Attempt(task.id, number, 1.0)], 0.0)
    await UnstoredAnswers(tmp_path, "explorer-10").add_evaluated([task], [Attempt(task.id, 9, 1.0)], 0.0)
    files = sorted((tmp_path / "answers").iterdir())
    assert [file.name for file in files] == [f"explorer-{name}.jsonl" for name in ("1.000002", "1.000003", "10.000000")]
    repeats = [json.loads(file.read_text())["experience_id"].rpartition("/")[2] for file in files]
    assert repeats == ["2", "3", "9"]


async def test_answers_of_dropped_groups_and_evaluations_are_lines_of_the_run_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = config(storage=str(tmp_path), **{"reward.on_unknown": "drop_group"})
    settings.folder.mkdir()
    for rewards in ((1.0, 0.0), (1.0, 1.0), (1.0, None)):  # stored, without variance, unknown
        await run_group(make_explorer(settings, tiny_model, QuickEngine(), Taken(), Rewards(*rewards)), settings)
    explorer = make_explorer(settings, tiny_model, QuickEngine("length"), Taken(), Rewards(0.5))
    await explorer.evaluate(1.0)
    file = settings.folder / "answers" / "explorer.000000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    task, *_ = explorer.flow.tasks
    shown = [(each["group_status"], each.get("drop_reason"), each["reward"], each["tokens"]) for each in lines[:4]]
    assert shown == [*[("dropped", "zero_variance", 1.0, 3)] * 2, *[("dropped", "reward_unknown", None, 3)] * 2]
    assert {each["experience_id"] for each in lines[:4]} == {f"a/grpo/0/{task}/{repeat}" for repeat in (0, 1)}
    assert {(each["group_status"], each["reward"], each["stop_reason"]) for each in lines[4:]} == {
        ("evaluation", 0.0, "length")
    }
    assert len({each["task_id"] for each in lines[4:]}) == len(lines[4:]) == 5 and lines[4]["version"] == 0
    assert lines[4]["question"].startswith("Spell this word backward") and lines[4]["answer"] == lines[0]["answer"]

    off = config(storage=str(tmp_path), name="off", **{"monitor.trace": False})
    off.folder.mkdir()
    await make_explorer(off, tiny_model, QuickEngine(), Taken(), Rewards(0.5)).evaluate(1.0)
    assert not any(off.folder.iterdir())
