"""Applications as workflows: they run unmodified, rows have what was sampled, and one that fails costs its attempt."""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import AbstractAsyncContextManager
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
from rayrft.explorer.workflows.base import build_workflow
from rayrft.runtime.serving.http import ApiError
from tests.endpoint.scripted import Ran, Say, running
from tests.errors import about
from tests.explorer.scripted import config

APPLICATIONS = "tests.endpoint.applications"


def using(
    folder: Path, agent: str, say: Say = lambda prompt: "dog", options: Any = None, **settings: Any
) -> AbstractAsyncContextManager[Ran]:
    """Run an application. "chosen" is the one that the question begins with."""
    name = agent if ":" in agent else f"{APPLICATIONS}:{agent}"
    return running(folder, "agent", {"agent": name, **(options or {})}, say, **settings)


def calls_a_tool(prompt: str) -> str:
    return "red" if "blue" in prompt else '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def is_made_to_call(prompt: str) -> str:
    return "red" if "blue" in prompt else '{"name": "look", "arguments": {}}'


def sampled(row: Experience) -> list[int]:
    return [int(token) for token, acted in zip(row.token_ids, row.action_mask, strict=True) if acted]


async def test_the_calls_of_a_loop_with_tools_are_one_row_as_it_was_sampled(tiny_model: Path) -> None:
    limits = {"model.max_length": 400, "explorer.sampling.max_tokens": 80}
    async with using(tiny_model, "calls_tools", calls_a_tool, **limits) as ran:
        ran.policy.version = 4
        rollout = await ran(n=2)
        assert rollout.problem is None and len(rollout.rows) == 2
        for row in rollout.rows:
            first, second = ran.policy.sampled[0], ran.policy.sampled[-1]
            assert sampled(row) == [*first.token_ids, *second.token_ids]
            assert [turn["role"] for turn in row.turns] == ["user", "assistant", "tool", "assistant"]
            assert (row.reward, row.stop_reason) == (0.25, "stop")
            assert [span.version for span in row.weight_versions] == [4, 4]
        assert [row.experience_id for row in rollout.rows] == ["group/0", "group/1"]
        assert ran.scored == [] and len(ran.policy.requests[0].prompt) == rollout.rows[0].prompt_length


async def test_a_forced_call_follows_its_schema_and_is_not_trained(tiny_model: Path) -> None:
    limits = {"model.max_length": 400, "explorer.sampling.max_tokens": 80}
    async with using(tiny_model, "must_call", is_made_to_call, **limits) as ran:
        rollout = await ran()
        assert rollout.problem is None
        [row], [forced, free] = rollout.rows, ran.policy.requests
        assert json.loads(forced.sampling.json_schema)["properties"]["name"] == {"const": "look"}
        assert free.sampling.json_schema == "" and sampled(row) == [*ran.policy.sampled[1].token_ids]
        assert [turn["role"] for turn in row.turns] == ["user", "assistant", "tool", "assistant"]


async def test_rewards_are_posted_or_returned_or_scored_and_other_calls_are_other_rows(
    tiny_model: Path,
) -> None:
    async with using(tiny_model, "chosen") as ran:
        for agent, reward, scored, rows in [
            ("rates_itself", 0.75, [], 1),
            ("streams", 13.0, ["streamed: dog"], 1),
            ("returns_nothing", 3.0, ["dog"], 1),
            ("asks_twice", 1.0, [], 2),
            ("asks_for_three", 3.0, [], 3),
        ]:
            rollout = await ran(f"{agent} cat")
            assert rollout.problem is None
            assert [row.reward for row in rollout.rows] == [reward] * rows and ran.scored == scored
            ids = ["group/0"] if rows == 1 else [f"group/0/{number}" for number in range(rows)]
            assert [row.experience_id for row in rollout.rows] == ids
            assert rollout.results[0].components == ({"style": 1.0} if agent == "rates_itself" else {})
            ran.scored.clear()
        assert {request.sampling.temperature for request in ran.policy.requests} == {1.0}  # whatever it asks for


async def test_a_process_serves_attempt_after_attempt_with_a_client_from_its_import(tiny_model: Path) -> None:
    async with using(tiny_model, "tests.endpoint.client_at_import:main", options={"processes": 1}) as ran:
        rollout = await ran(n=3)
        assert rollout.problem is None and len({row.reward for row in rollout.rows}) == 1  # the pid
        said = sorted(row.turns[0]["content"] for row in rollout.rows)
        assert said == ["cat 1", "cat 2", "cat 3"] and all(len(row.turns) == 2 for row in rollout.rows)


async def test_an_application_that_fails_costs_its_attempt(tiny_model: Path) -> None:
    problems = {"raises": "customer", "never_asks": "no call of the model", "returns_a_list": "['right']"}
    async with using(tiny_model, "chosen") as ran:
        for agent, problem in problems.items():
            rollout = await ran(f"{agent} cat", n=2)
            assert rollout.failed == {"workflow_error": 2} and problem in str(rollout.problem)


async def test_an_application_that_exits_or_hangs_costs_its_attempt_and_its_process(tiny_model: Path) -> None:
    async with using(tiny_model, "chosen", **{"explorer.deadline_s": 2.0}) as ran:
        rollout = await ran("exits cat", n=2)
        assert rollout.failed == {"workflow_error": 2} and "exit code 3" in str(rollout.problem)
        rollout = await ran("hangs cat", n=2)
        assert rollout.failed == {"timeout": 2} and "explorer.deadline_s" in str(rollout.problem)
        server = ran.workflow._server
        async with asyncio.timeout(20):  # the endpoints of processes that are gone are gone, too
            while server.apps:
                gc.collect()
                await asyncio.sleep(0.01)


async def test_an_application_that_floods_its_model_fails_at_the_bound_and_others_are_answered(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MOST_CALLS", 20)
    async with using(tiny_model, "chosen") as ran:
        flooded, rollout = await asyncio.gather(ran("floods cat"), ran("asks_twice cat"))
        assert flooded.failed == {"workflow_error": 1} and "more than 20 calls" in str(flooded.problem)
        assert rollout.problem is None and rollout.rows and len(ran.policy.requests) <= 20 + 2


async def test_a_dead_engine_ends_the_run_though_the_application_catches_everything(tiny_model: Path) -> None:
    async with using(tiny_model, "catches_everything") as ran:
        ran.policy.error = ActorDied("gone", field="engine-0")
        with pytest.raises(ActorDied, check=about("engine-0")):
            await ran()


async def test_an_application_without_room_for_an_answer_ends_its_row_for_length(tiny_model: Path) -> None:
    async with using(tiny_model, "talks_on") as ran:
        rollout = await ran()
        [row] = rollout.rows
        assert row.stop_reason == "length" and len(row.turns) > 4 and not rollout.failed


@pytest.mark.parametrize("agent", ["returns_nothing", "sees_alternatives"])
async def test_a_parked_attempt_goes_on_from_the_tokens_that_it_has(tiny_model: Path, agent: str) -> None:
    async with using(tiny_model, agent, lambda prompt: "abcdefgh"[len(prompt.split("|>")[-1]) :]) as ran:
        begun: list[Experience] = []
        for version in range(10):
            ran.policy.version = version
            rollout = await ran(parking=Parking(5, begun))
            if rollout.rows:
                break
            begun = from_batch(to_batch(rollout.parked))
        [row] = rollout.rows
        assert row.reward == (len(sampled(row)) if agent == "sees_alternatives" else len("abcdefgh"))
        assert version == 3 and sampled(row) == [token for each in ran.policy.sampled for token in each.token_ids]
        assert {span.version for span in row.weight_versions} == {0, 1, 2, 3}


async def test_waiting_for_a_process_spends_no_deadline(tiny_model: Path) -> None:
    """The first attempt has the only process until its deadline is over; the second one begins after it."""
    settings = {"explorer.deadline_s": 5.0}
    async with using(tiny_model, "calls_tools", options={"processes": 1}, **settings) as ran:
        ran.policy.holding.clear()
        running_both = asyncio.create_task(ran(n=2))
        while len(ran.policy.requests) < 2:  # noqa: ASYNC110 - the policy has no event for it
            await asyncio.sleep(0.01)
        ran.policy.holding.set()
        rollout = await running_both
        assert len(rollout.rows) == 1 and rollout.failed == {"timeout": 1}
        assert ran.policy.aborted == 1


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
