"""A group on its way through the operators on experiences: what stays, what is left out, what is made, what fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrft.buffer.events import GroupReport
from rayrft.buffer.schedule import Ticket
from rayrft.errors import ConfigError, OperatorFailed, RayrftError
from rayrft.experience import Experience, Task, from_batch, unpack
from rayrft.explorer.explorer import Explorer
from rayrft.explorer.scoring import ScoredGroup, with_verified
from rayrft.pipelines.experiences import VERIFIED, Verified, _seen, experience_chain
from rayrft.pipelines.report import OperatorStats
from rayrft.pipelines.run.groups import GroupHost, OperatorActor
from rayrft.rewards import RewardResult
from tests.buffer.rows import group
from tests.errors import about
from tests.explorer.scripted import QuickEngine, Rewards, Taken, config, make_explorer
from tests.pipelines.asked import Scripted

PLUGIN = Path(__file__).with_name("verifying.py")


class Kept(Taken):
    """Stands for the Buffer, with demonstrations that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, list[Experience]] = {}

    async def extend(self, name: str, payload: list[Any]) -> int:
        self.made.setdefault(name, []).extend(from_batch(unpack(payload[0])))
        return len(self.made[name])


class Verifying:
    """An Explorer whose groups of two, of rewards 1 and 0 unless told otherwise, go through these operators."""

    def __init__(self, tiny_model: Path, operators: list[Any], *rewards: float, **overrides: Any) -> None:
        operators = [{"name": each} if isinstance(each, str) else each for each in operators]
        settings = {"pipelines.experiences": operators, "plugins": [str(PLUGIN)], **overrides}
        if any(each["name"] in ("expert_rows", "best_against_worst") for each in operators):
            settings["pipelines.made"] = "found"
        self.config, self.taken = config(**settings), Kept()
        given = Rewards(*rewards or (1.0, 0.0) * 3)
        self.explorer: Explorer = make_explorer(self.config, tiny_model, QuickEngine(), self.taken, given)  # type: ignore[arg-type]
        self.explorer.flow.writer = self.taken  # type: ignore[assignment]

    async def __aenter__(self) -> Verifying:
        assert self.explorer.flow.pipeline is not None
        await self.explorer.flow.pipeline.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.explorer.flow.pipeline is not None
        await self.explorer.flow.pipeline._operators.close()  # type: ignore[attr-defined]

    async def group(self) -> Kept:
        stage = self.config.stages[0]
        await self.explorer.flow.run(
            stage, stage.algorithm.build(), Ticket(0, 0, 0, next(iter(self.explorer.flow.tasks)))
        )
        return self.taken

    def stats(self) -> dict[str, OperatorStats]:
        assert self.explorer.flow.pipeline is not None
        return self.explorer.flow.pipeline.take_stats()


async def test_rows_that_stay_are_verified_and_the_others_are_counted_by_operator_and_reason(tiny_model: Path) -> None:
    async with Verifying(tiny_model, ["worth"], **{"explorer.drop_zero_variance": False}) as verifying:
        taken = await verifying.group()
        stats = verifying.stats()["worth"]
    assert [row.reward for row in taken.rows] == [1.0] and taken.rows[0].status == VERIFIED
    assert taken.dropped == {"worth: too low": 1}
    assert (taken.report.rows, taken.report.reward_sum) == (2, 1.0), "what was sampled counts as it was"
    assert (stats.taken, stats.left_out, stats.failed) == (2, 1, 0) and stats.seconds > 0


async def test_a_group_of_which_nothing_is_left_is_dropped_and_counted(tiny_model: Path) -> None:
    async with Verifying(tiny_model, [{"name": "worth", "least": 2.0}]) as verifying:
        taken = await verifying.group()
    assert taken.rows == [] and taken.dropped == {"worth: too low": 2} and taken.report.rows == 2


async def test_operators_see_what_the_task_says(tiny_model: Path) -> None:
    async with Verifying(tiny_model, ["asked"]) as verifying:
        task = next(iter(verifying.explorer.flow.tasks.values()))
        taken = await verifying.group()
    [reason] = taken.dropped
    said = f"{task.question}, {task.answer}, {task.domain}, {task.difficulty}"
    assert reason == "asked: " + said.replace(": ", " ")


async def test_a_reward_that_an_operator_gives_and_a_priority_reach_the_buffer(tiny_model: Path) -> None:
    async with Verifying(tiny_model, ["bonus", "by_reward"]) as verifying:
        taken = await verifying.group()
    assert [row.reward for row in taken.rows] == [1.25, 0.25] and [row.priority for row in taken.rows] == [2.25, 1.25]


async def test_operators_have_answers_scored_as_the_explorer_has_them(tiny_model: Path) -> None:
    async with Verifying(tiny_model, ["scored_again"], 1.0, 0.0, 0.5, 0.75) as verifying:
        taken = await verifying.group()
    assert [row.reward for row in taken.rows] == [0.5, 0.75]


async def test_operators_in_an_actor_ask_the_models_that_it_is_given_and_know_the_task(tiny_model: Path) -> None:
    judge = Scripted(lambda messages, seed: '{"reason": "", "grade": 7}' if "tac" in str(messages) else "nothing")
    operators = [{"name": "judged", "model": "judge", "column": "response", "least": 5.0}, {"name": "scored_again"}]
    settings = config(
        **{
            "pipelines.experiences": operators,
            "plugins": [str(PLUGIN)],
            "auxiliary": {"judge": {"model": str(tiny_model)}},
            "reward.name": "exact",
        }
    )
    access = lambda: {"judge": judge}, settings.auxiliary, settings.scoring
    chain = experience_chain(settings, str(tiny_model))
    actor = OperatorActor(chain, settings.pipelines, *access)
    await actor.start()
    task = Task.create("test", "Spell cat backward", "tac")
    rows = [
        replace(row, task_id=task.id, turns=({"role": "assistant", "content": said},))
        for row, said in zip(group(1), ("tac", "cat"), strict=True)
    ]
    worked = await actor.apply(_seen(task, rows), task)
    await actor._operators.close()
    assert worked.kept == [0] and worked.changed.column("reward").to_pylist() == [1.0] and not actor._tasks


def test_a_reward_that_an_operator_gives_counts_before_shaping_and_others_stay_what_they_were_before_it() -> None:
    first, second, third = (replace(row, reward=np.float32(0.9).item()) for row in group(1, 3))
    scored = ScoredGroup([first, second, third], Counter(), GroupReport(), raw_rewards=[1.0, 1.0, 0.0])
    given = Verified([replace(second, reward=0.25), third], Counter({"worth: too low": 1}))
    verified = with_verified(scored, given)
    assert verified.raw_rewards == [0.25, 0.0] and verified.dropped == {"worth: too low": 1}


async def test_groups_that_operators_have_made_equal_are_dropped_as_such(tiny_model: Path) -> None:
    async with Verifying(tiny_model, ["worth"]) as verifying:
        taken = await verifying.group()
    assert taken.rows == [] and taken.dropped == {"worth: too low": 1, "zero_variance": 1}


@pytest.mark.parametrize("name, pair", [("expert_rows", None), ("best_against_worst", True)])
async def test_rows_that_are_made_become_demonstrations_with_their_parents(
    tiny_model: Path, name: str, pair: bool | None
) -> None:
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
        stats = verifying.stats()
    assert len(taken.rows) == taken.report.rows == 2 and not taken.dropped and not taken.made
    assert (stats["expert_rows"].made, stats["expression"].taken, stats["expression"].left_out) == (1, 3, 1)


@pytest.mark.parametrize(
    "operators, dropped",
    [
        (["raises_on_wrong"], {"raises_on_wrong: raised LookupError": 1}),
        (["hangs_here"], {"hangs_here: timeout": 2}),
        (["worth", "dies_here"], {"dies_here: failed": 2}),
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


async def test_groups_that_come_together_are_worked_on_together_and_one_that_fails_harms_no_other(
    tiny_model: Path,
) -> None:
    operators = ["bonus", "dies_of_seven", "worth", {"name": "expert_rows", "keep": True, "max_pass_rate": 1.0}]
    async with Verifying(tiny_model, operators) as verifying:
        pipeline = verifying.explorer.flow.pipeline
        assert pipeline is not None
        rewards = [(0.0, float(number % 3 if number != 7 else 7), 1.0) for number in range(1, 60)]
        given = [
            [replace(row, reward=reward) for row, reward in zip(group(number, 3), each, strict=True)]
            for number, each in enumerate(rewards, start=1)
        ]
        task = Task.create("test", "a question", "an answer")
        found = await asyncio.gather(*(pipeline.process(task, rows) for rows in given))
        stats = pipeline.take_stats()
    for number, verified in enumerate(found, start=1):
        if number == 7:
            assert verified.rows == [] and verified.left_out == {"dies_of_seven: failed": 3}
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
    "operators, together",
    [
        (["worth", "outliers"], True),
        (["worth", "pass_rate"], False),
        ([{"name": "pass_rate", "by": "group_id"}], True),
    ],
)
def test_groups_are_processed_together_only_if_operators_tell_them_apart(
    tiny_model: Path, operators: list[Any], together: bool
) -> None:
    named = [{"name": each} if isinstance(each, str) else each for each in operators]
    settings = config(**{"pipelines.experiences": named, "plugins": [str(PLUGIN)]})
    host = GroupHost(experience_chain(settings, str(tiny_model)), leave_out=True)
    assert host.max_batch() == (32 if together else 1)


async def test_what_answers_operators_raises_where_the_group_is_waited_for(tiny_model: Path) -> None:
    class Refuses(Rewards):
        async def score(self, task: Task, transcripts: list[Any]) -> list[Any]:
            if next(self.sampled, None) is None:
                raise ConfigError("no reward scores tasks of this domain", field="reward.domains", value=task.domain)
            return [RewardResult(1.0)] * len(transcripts)

    async with Verifying(tiny_model, ["scored_again"]) as verifying:
        verifying.explorer._rewards = Refuses(1.0, 1.0)  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(ConfigError, match="no reward scores"):
                await verifying.group()


async def test_an_operator_that_always_fails_ends_the_run_with_its_problem(tiny_model: Path) -> None:
    async with Verifying(tiny_model, ["dies_here"]) as verifying:
        with pytest.raises(RayrftError, match=r"consecutive groups failed.*dies_here.*exit code 7"):
            for _ in range(33):
                await verifying.group()


async def test_an_operator_that_fails_ends_the_run_at_once_if_that_is_wanted(tiny_model: Path) -> None:
    async with Verifying(tiny_model, ["raises_on_wrong"], **{"pipelines.on_error": "stop"}) as verifying:
        with pytest.raises(OperatorFailed, match="no such thing"):
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
def test_operators_that_do_not_fit_are_refused_before_anything_starts(
    operators: list[str], made: str | None, field: str, problem: str
) -> None:
    from rayrft.pipelines.experiences import check_experiences

    settings = config(
        **{
            "pipelines.experiences": [{"name": each} for each in operators],
            "pipelines.made": made,
            "plugins": [str(PLUGIN)],
        }
    )
    with pytest.raises(ConfigError, match=problem) as raised:
        check_experiences(settings, None)
    assert str(raised.value.field).startswith(field)


@pytest.mark.parametrize("operators", [[], [{"name": "worth"}]])
def test_groups_are_not_drawn_by_a_priority_that_no_operator_writes(operators: list[dict[str, Any]]) -> None:
    from rayrft.pipelines.experiences import check_experiences

    sampler = {"buffer.sampler": {"name": "priority", "score": "priority"}, "plugins": [str(PLUGIN)]}
    with pytest.raises(ConfigError, check=about("buffer.sampler.score", "priority")):
        check_experiences(config(**sampler, **{"pipelines.experiences": operators}), None)
    check_experiences(config(**sampler, **{"pipelines.experiences": [*operators, {"name": "by_reward"}]}), None)
