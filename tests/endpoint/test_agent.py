"""Applications as workflows: they run unmodified, rows have what was sampled, and one that fails costs its attempt."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayrft.endpoint import attempts
from rayrft.endpoint.agent import Agent
from rayrft.endpoint.attempts import ApplicationAttempt
from rayrft.errors import ActorDied, ConfigError
from rayrft.experience import Experience, from_batch, to_batch
from rayrft.explorer.calls import Parking
from rayrft.explorer.engines.exchange import Completion, Request, Sampling
from rayrft.explorer.workflows import register_workflow
from rayrft.explorer.workflows.base import build_workflow
from rayrft.runtime.serving.http import ApiError
from tests.endpoint.scripted import Ran, running
from tests.errors import about
from tests.explorer.scripted import config

pytestmark = pytest.mark.asyncio(loop_scope="module")
APPLICATIONS = "tests.endpoint.applications"
LIMITS = {"model.max_length": 400, "explorer.sampling.max_tokens": 80}


@pytest.fixture(scope="module")
async def run(tiny_model: Path) -> AsyncIterator[Callable[..., Ran]]:
    """Runners whose workflow calls the application that a question begins with, in the same processes: the first one
    takes seconds to import a client."""
    agent = Agent(f"{APPLICATIONS}:chosen")
    register_workflow("calls_the_chosen_one")(lambda: agent)
    yield partial(Ran, tiny_model, "calls_the_chosen_one", {}, **LIMITS)
    await agent.close()


def calls_a_tool(prompt: str) -> str:
    return "red" if "blue" in prompt else '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def is_made_to_call(prompt: str) -> str:
    return "red" if "blue" in prompt else '{"name": "look", "arguments": {}}'


def sampled(row: Experience) -> list[int]:
    return [int(token) for token, acted in zip(row.token_ids, row.action_mask, strict=True) if acted]


Run = Callable[..., Ran]


async def test_the_calls_of_a_loop_with_tools_are_one_row_as_it_was_sampled(run: Run) -> None:
    ran = run(calls_a_tool)
    ran.policy.version = 4
    rollout = await ran("calls_tools cat", n=2)
    assert rollout.problem is None and len(rollout.rows) == 2
    for row in rollout.rows:
        first, second = ran.policy.sampled[0], ran.policy.sampled[-1]
        assert sampled(row) == [*first.token_ids, *second.token_ids]
        assert [turn["role"] for turn in row.turns] == ["user", "assistant", "tool", "assistant"]
        assert (row.reward, row.stop_reason) == (0.25, "stop")
        assert [span.version for span in row.weight_versions] == [4, 4]
    assert [row.experience_id for row in rollout.rows] == ["group/0", "group/1"]
    assert ran.scored == [] and len(ran.policy.requests[0].prompt) == rollout.rows[0].prompt_length


async def test_a_forced_call_follows_its_schema_and_is_not_trained(run: Run) -> None:
    ran = run(is_made_to_call)
    rollout = await ran("must_call cat")
    assert rollout.problem is None
    [row], [forced, free] = rollout.rows, ran.policy.requests
    assert json.loads(forced.sampling.json_schema)["properties"]["name"] == {"const": "look"}
    assert free.sampling.json_schema == "" and sampled(row) == [*ran.policy.sampled[1].token_ids]
    assert [turn["role"] for turn in row.turns] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("agent", "reward", "scored", "rows"),
    [
        ("rates_itself", 0.75, [], 1),
        ("streams", 13.0, ["streamed: dog"], 1),
        ("returns_nothing", 3.0, ["dog"], 1),
        ("asks_twice", 1.0, [], 2),
        ("asks_for_three", 3.0, [], 3),
    ],
)
async def test_rewards_are_posted_or_returned_or_scored_and_other_calls_are_other_rows(
    agent: str, reward: float, scored: list[str], rows: int, run: Run
) -> None:
    rollout = await (ran := run())(f"{agent} cat")
    assert rollout.problem is None
    assert [row.reward for row in rollout.rows] == [reward] * rows and ran.scored == scored
    ids = ["group/0"] if rows == 1 else [f"group/0/{number}" for number in range(rows)]
    assert [row.experience_id for row in rollout.rows] == ids
    assert rollout.results[0].components == ({"style": 1.0} if agent == "rates_itself" else {})
    assert {request.sampling.temperature for request in ran.policy.requests} == {1.0}  # whatever it asks for


async def test_a_process_serves_attempt_after_attempt_with_a_client_from_its_import(tiny_model: Path) -> None:
    options = {"agent": "tests.endpoint.client_at_import:main", "processes": 1}
    async with running(tiny_model, "agent", options) as ran:
        rollout = await ran(n=3)
        assert rollout.problem is None and len({row.reward for row in rollout.rows}) == 1  # the pid
        said = sorted(row.turns[0]["content"] for row in rollout.rows)
        assert said == ["cat 1", "cat 2", "cat 3"] and all(len(row.turns) == 2 for row in rollout.rows)


@pytest.mark.parametrize(
    ("agent", "problem"),
    [("raises", "customer"), ("never_asks", "no call of the model"), ("returns_a_list", "['right']")],
)
async def test_an_application_that_fails_costs_its_attempt(agent: str, problem: str, run: Run) -> None:
    rollout = await run()(f"{agent} cat", n=2)
    assert rollout.failed == {"workflow_error": 2} and problem in str(rollout.problem)


async def test_an_application_that_hangs_or_exits_costs_its_attempt_and_its_process_for_which_others_wait_at_no_cost(
    tiny_model: Path,
) -> None:
    """The first attempt has the only process until its deadline is over; the others begin after it."""
    options = {"agent": f"{APPLICATIONS}:chosen", "processes": 1}
    async with running(tiny_model, "agent", options, **{"explorer.deadline_s": 5.0}) as ran:
        ran.policy.holding.clear()
        agents = ("returns_nothing", "returns_nothing", "exits")
        attempted = [asyncio.create_task(ran(f"{agent} cat")) for agent in agents]
        while len(ran.policy.requests) < 2:  # the policy has no event for it
            assert not all(each.done() for each in attempted), "nothing else is asked"
            await asyncio.sleep(0.01)
        ran.policy.holding.set()
        hung, waited, exited = await asyncio.gather(*attempted)
        assert hung.failed == {"timeout": 1} and "explorer.deadline_s" in str(hung.problem)
        assert ran.policy.aborted == 1 and len(waited.rows) == 1
        assert exited.failed == {"workflow_error": 1} and "exit code 3" in str(exited.problem)
        async with asyncio.timeout(20):  # the endpoints of processes that are gone are gone, too
            while ran.workflow._server.apps:
                gc.collect()
                await asyncio.sleep(0.01)


async def test_an_application_that_floods_its_model_fails_at_the_bound_and_others_are_answered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MOST_CALLS", 20)
    ran = run()
    flooded, rollout = await asyncio.gather(ran("floods cat"), ran("asks_twice cat"))
    assert flooded.failed == {"workflow_error": 1} and "more than 20 calls" in str(flooded.problem)
    assert rollout.problem is None and rollout.rows and len(ran.policy.requests) <= 20 + 2


async def test_a_dead_engine_ends_the_run_though_the_application_catches_everything(run: Run) -> None:
    ran = run()
    ran.policy.error = ActorDied("gone", field="engine-0")
    with pytest.raises(ActorDied, check=about("engine-0")):
        await ran("catches_everything cat")


async def test_an_application_without_room_for_an_answer_ends_its_row_for_length(run: Run) -> None:
    rollout = await run()("talks_on cat")
    [row] = rollout.rows
    assert row.stop_reason == "length" and len(row.turns) > 4 and not rollout.failed


@pytest.mark.parametrize("agent", ["returns_nothing", "sees_alternatives"])
async def test_a_parked_attempt_goes_on_from_the_tokens_that_it_has(agent: str, run: Run) -> None:
    ran = run(lambda prompt: "abcdefgh"[len(prompt.split("|>")[-1]) :])
    begun: list[Experience] = []
    for version in range(10):
        ran.policy.version = version
        rollout = await ran(f"{agent} cat", parking=Parking(5, begun))
        if rollout.rows:
            break
        begun = from_batch(to_batch(rollout.parked))
    [row] = rollout.rows
    assert row.reward == (len(sampled(row)) if agent == "sees_alternatives" else len("abcdefgh"))
    assert version == 3 and sampled(row) == [token for each in ran.policy.sampled for token in each.token_ids]
    assert {span.version for span in row.weight_versions} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "agent",
    [APPLICATIONS, f"{APPLICATIONS}:nope", "tests.errors:nope", "tests.endpoint.no:main", "no.package:main", ":main"],
)
async def test_an_application_that_cannot_be_imported_is_an_error_before_the_start(agent: str) -> None:
    with pytest.raises(ConfigError, check=about("agent")):
        Agent(agent)
    settings = config(**{"explorer.workflow_options": {"agent": {"agent": agent}}})
    with pytest.raises(ConfigError, check=about("explorer.workflow_options.agent.agent")):
        build_workflow("agent", settings.explorer)
    with pytest.raises(TypeError, match="processes"):
        Agent("tests.endpoint.applications:raises", processes=0)
    with pytest.raises(ConfigError, match="tool_calls"):
        Agent("tests.endpoint.applications:raises", tool_calls="xml")


async def test_a_call_of_an_attempt_that_ends_meanwhile_is_told_so() -> None:
    class Ending:
        async def generate(self, *_: Any) -> Completion:
            raise asyncio.CancelledError

    with pytest.raises(ApiError, match="has ended") as caught:
        await ApplicationAttempt(Ending()).generate(Request([1], 2, Sampling(1.0, 4, (2,))))  # type: ignore[arg-type]
    assert caught.value.status == 409
