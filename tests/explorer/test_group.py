"""One group from task to rows: greedy baselines, and workflows of several turns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rayrft.algorithms import build
from rayrft.buffer.schedule import Ticket
from rayrft.data.turns import group_advantages
from rayrft.experience import Experience, Task
from rayrft.explorer.explorer import Explorer
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows import register_workflow
from tests.explorer.scripted import QuickEngine, Rewards, Taken, config, make_explorer


@register_workflow("two_turns")
class TwoTurns:
    """Asks, answers the model with an observation, and asks again; gives a format reward for the first turn."""

    def __init__(self, observation: str = "again") -> None:
        self._observation = observation

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory:
        trajectory = model.start(task.messages)
        await trajectory.act()
        trajectory.step_reward(0.25 * model.repeat)
        trajectory.observe(self._observation)
        await trajectory.act()
        return trajectory


async def explored(tiny_model: Path, engine: QuickEngine, rewards: Rewards, algorithm: Any, **overrides: Any) -> Taken:
    """What one group of two ends as."""
    settings, taken = config(**{"stages.grpo.algorithm": algorithm, **overrides}), Taken()
    explorer: Explorer = make_explorer(settings, tiny_model, engine, taken, rewards)  # type: ignore[arg-type]
    explorer.flow.writer = taken  # type: ignore[assignment]
    stage = settings.stages[0]
    await explorer.flow.run(stage, stage.algorithm.build(), Ticket(0, 0, 0, next(iter(explorer.flow.tasks))))
    return taken


def of_answers(rows: list[Experience], algorithm: Any) -> list[list[float]]:
    """Advantages of the tokens after the prompt, as the trainer computes them."""
    rest = {name: value for name, value in algorithm.items() if name != "name"}
    found = group_advantages(rows, build(algorithm["name"], rest))
    return [values[row.prompt_length :].tolist() for row, values in zip(rows, found, strict=True)]


async def test_remax_asks_for_one_greedy_answer_and_keeps_the_sampled_ones(tiny_model: Path) -> None:
    engine = QuickEngine()
    taken = await explored(tiny_model, engine, Rewards(1.0, 0.0, 0.25), {"name": "remax"})
    assert sorted(engine.asked) == [(1, 0.0), (2, 1.0)]
    assert of_answers(taken.rows, {"name": "remax"}) == [[0.75] * 3, [-0.25] * 3]
    assert taken.report.rows == 2 and taken.report.tokens == 6 and taken.report.reward_sum == 1.0


async def test_every_token_has_its_own_log_prob(tiny_model: Path) -> None:
    taken = await explored(tiny_model, QuickEngine(), Rewards(1.0, 0.0), {"name": "grpo"})
    found = [row.logprobs[row.action_mask == 1].tolist() for row in taken.rows]
    assert found == [[-0.5, -0.625, -0.75]] * 2


async def test_no_greedy_answer_is_asked_for_without_need(tiny_model: Path) -> None:
    engine = QuickEngine()
    await explored(tiny_model, engine, Rewards(1.0, 0.0), {"name": "grpo"})
    assert engine.asked == [(2, 1.0)]


async def test_a_greedy_answer_of_unknown_reward_drops_the_group(tiny_model: Path) -> None:
    taken = await explored(tiny_model, QuickEngine(), Rewards(1.0, 0.0, None), {"name": "remax"})
    assert taken.rows == [] and taken.dropped == {"baseline_unknown": 2} and taken.report.rows == 2


@pytest.mark.parametrize(("worth", "mean", "unknown"), [(1.0, 0.0, 0), (-1.0, -1.0, 0), (None, math.nan, 5)])
async def test_answers_that_are_cut_are_evaluated_as_they_are_trained(
    worth: float | None, mean: float, unknown: int, tiny_model: Path
) -> None:
    explorer: Explorer = make_explorer(config(), tiny_model, QuickEngine("length"), Taken(), Rewards(worth))  # type: ignore[arg-type]
    found = await explorer.evaluate(1.0)
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
async def test_every_turn_of_a_workflow_has_its_advantage(
    algorithm: dict[str, Any], first: float, second: float, tiny_model: Path
) -> None:
    engine = QuickEngine()
    taken = await explored(tiny_model, engine, Rewards(1.0, 0.0), algorithm, **{"explorer.workflow": "two_turns"})
    assert [n for n, _ in engine.asked] == [2, 1, 1] and taken.report.tokens == 12
    for found, sign in zip(of_answers(taken.rows, algorithm), (1, -1), strict=True):
        turns = [*[sign * first] * 3, *[0.0] * (len(found) - 6), *[sign * second] * 3]
        assert len(found) > 6 and found == pytest.approx(turns, abs=1e-5)
