"""Workflows that may block: their rows are those of the event loop, and what they do costs nobody else."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied
from rayrft.experience import Experience, Task
from rayrft.explorer.engines.auxiliary import AuxiliaryModel
from rayrft.explorer.engines.exchange import Completion, Request, Session
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.rollout import Runner
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows import build_workflow, isolated, register_workflow
from rayrft.pipelines.run.models import RemoteChat
from rayrft.rewards import RewardResult, Transcript
from rayrft.rewards.judge import ChatModel, OpenAIModel
from tests.errors import about
from tests.explorer.scripted import TASK, Engines, Room, config, visit

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
async def troubled() -> AsyncIterator[str]:
    """The name of a workflow whose processes tests share: the first one takes seconds to start."""
    settings = config(**{"explorer.workflow_processes": 3}).explorer
    workflow: Any = build_workflow("tests.explorer.blocking:Troubled", settings)
    register_workflow("troubled_in_processes")(lambda: workflow)
    yield "troubled_in_processes"
    await workflow.close()


def runner_of(model: Path, engines: Engines, workflow: str, **overrides: Any) -> Runner:
    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        return [RewardResult(float(len(each.response))) for each in transcripts]

    known = {"auxiliary.judge": {"model": "some/model"}, "explorer.workflow": workflow}
    settings, tokenizer = config(**{**known, **overrides}), ChatTokenizer(model)
    judge = AuxiliaryModel("judge", settings.auxiliary["judge"], tokenizer, engines.generate)
    return Runner(settings, tokenizer, engines, score, {"judge": judge})


def trouble(*troubles: str, place: Path = Path()) -> Task:
    return Task.create("test", TASK.question, "x", metadata={"troubles": troubles, "place": str(place)})


class Slow(Engines):
    """Never answers the first of the later prompts, and others of them when that was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.later, self.aborted = 0, asyncio.Event()

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
        if self.requests and request.prompt != self.requests[0][0]:
            self.later += 1
            try:
                await (asyncio.Event() if self.later == 1 else self.aborted).wait()
            finally:
                self.aborted.set()
        return await super().generate(request, sessions)


def content(row: Experience) -> Any:
    return (
        *(row.experience_id, row.token_ids.tolist(), row.action_mask.tolist(), row.logprobs.tolist()),
        *(row.weight_versions, row.turns, row.reward, row.reward_components, row.stop_reason, row.metrics),
    )


async def test_rows_are_those_of_the_same_workflow_in_the_event_loop(tiny_model: Path) -> None:
    found = []
    for name in ("Thorough", "InProcess"):
        workflow = f"tests.explorer.blocking:{name}"
        settings = {
            "model.max_length": 400,
            "explorer.environment": visit("")["explorer.environment"],
            "explorer.workflow_options": {workflow: {"hint": "Really?"}},
        }
        runner = runner_of(tiny_model, Engines(), workflow, **settings)
        rollouts = [await runner.run(TASK, group, 2, 1.0) for group in ("first", "second")]
        found.append([content(row) for rollout in rollouts for row in rollout.rows])
        assert all(rollout.problem is None for rollout in rollouts)
        built = runner.workflow(workflow)
        assert isinstance(built, isolated.IsolatedWorkflow) == (name == "InProcess")
        if isinstance(built, isolated.IsolatedWorkflow):
            await built.close()
    in_loop, in_process = found
    assert len(in_loop) == 8 and in_process == in_loop
    assert Room.opened == 0


@pytest.mark.parametrize(
    ("handle", "known", "kept"),
    [
        (isolated.RemoteModel, Model, {"tokenizer", "queued", "recorded", "started"}),
        (isolated.RemoteTrajectory, Trajectory, {"record", "step_rewards_by_token", "prompted", "to_experience"}),
        (isolated.RemoteAuxiliary, AuxiliaryModel, set()),
        (isolated.RemoteEnvironment, EnvironmentClient, {"lease"}),
        (RemoteChat, ChatModel, set()),
    ],
)
async def test_a_handle_has_all_that_its_object_has_with_its_signatures(
    handle: type, known: type, kept: set[str]
) -> None:
    """Except ``kept``, which the Explorer alone uses."""
    source = inspect.getsource(known)
    attributes = {name for name in re.findall(r"^        self\.([a-z]\w*)(?:: .*?)? = ", source, re.M)}
    names = {name for name in vars(known) if not name.startswith("_")} | attributes
    assert {name for name in vars(handle) if not name.startswith("_")} == names - kept
    for name in names - kept:
        if callable(method := getattr(known, name, None)):
            assert _parameters(getattr(handle, name)) == _parameters(method), name


@pytest.mark.parametrize("model", [AuxiliaryModel, OpenAIModel])
async def test_every_chat_model_takes_the_same(model: type[ChatModel]) -> None:
    assert _parameters(model.chat) == _parameters(ChatModel.chat)
    assert _parameters(model.with_seed) == _parameters(ChatModel.with_seed)


def _parameters(method: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]


async def test_one_that_blocks_does_not_stop_the_event_loop(troubled: str, tiny_model: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    runner = runner_of(tiny_model, Engines(), troubled)
    blocked = asyncio.create_task(runner.run(trouble("blocks", place=pipe), "blocked", 2, 1.0))
    free = await runner.run(trouble(), "free", 1, 1.0)
    assert len(free.rows) == 1 and not blocked.done()
    await asyncio.to_thread(pipe.write_text, "go on")  # once it is read
    assert len((await blocked).rows) == 2


async def test_one_that_hangs_ends_at_its_deadline_with_all_that_it_started(
    troubled: str, tiny_model: Path, tmp_path: Path
) -> None:
    place = tmp_path / "pids"
    runner = runner_of(tiny_model, Engines(), troubled, **{"explorer.deadline_s": 3.0})
    rollout = await runner.run(trouble("hangs", place=place), "group", 2, 1.0)
    assert len(rollout.rows) == 1 and rollout.failed == {"timeout": 1}
    pids = {int(pid) for pid in place.read_text().split()}
    assert len(pids) == 2
    async with asyncio.timeout(20):
        while pids & {*psutil.pids()}:  # noqa: ASYNC110 - nobody tells of the end of a process
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("left", ["leaves a thread that asks", "leaves a thread that waits"])
async def test_one_that_leaves_a_thread_behind_delays_no_other(left: str, troubled: str, tiny_model: Path) -> None:
    runner = runner_of(tiny_model, Slow() if "waits" in left else Engines(), troubled)
    async with asyncio.timeout(120):  # a process that is waited for costs 60 s, three times
        for number in range(3):
            rollout = await runner.run(trouble(left), f"group-{number}", 3, 1.0)
            assert len(rollout.rows) == 3 and not rollout.failed


async def test_one_that_fails_costs_itself_and_says_why(
    troubled: str, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problems = ("exit code 3", "KeyError: 'nothing here'", "must return a Trajectory")
    runner = runner_of(tiny_model, Engines(), troubled)
    rollout = await runner.run(trouble("exits", "raises", "returns nothing"), "group", 4, 1.0)
    assert [row.repeat for row in rollout.rows] == ["0"] and rollout.failed == {"workflow_error": 3}
    told = [record.getMessage() for record in caplog.records]
    assert all(any(problem in text for text in told) for problem in problems), told
    assert len((await runner.run(trouble(), "next", 1, 1.0)).rows) == 1


async def test_one_whose_context_is_full_keeps_what_it_has(troubled: str, tiny_model: Path) -> None:
    rollout = await runner_of(tiny_model, Engines(), troubled).run(trouble("is full"), "group", 2, 1.0)
    short, full = rollout.rows
    assert (short.stop_reason, full.stop_reason) == ("stop", "length") and rollout.failed == {}
    assert len(short.token_ids) < len(full.token_ids) <= 64


@pytest.mark.parametrize(
    ("caught", "messages"),
    [("catches what is full", None), ("catches what is too long", 2), ("is in no room", 2), ("gives up", 3)],
)
async def test_it_may_catch_errors_and_give_up_answers(
    caught: str, messages: int | None, troubled: str, tiny_model: Path
) -> None:
    engines = Slow() if caught == "gives up" else Engines()
    settings = {"explorer.environment": visit("reset")["explorer.environment"], "explorer.deadline_s": 20.0}
    rollout = await runner_of(tiny_model, engines, troubled, **settings).run(trouble(caught), "group", 2, 1.0)
    assert rollout.failed == {} and [row.metrics.get("caught") for row in rollout.rows] == [None, 1.0]
    assert messages is None or [len(row.turns) for row in rollout.rows] == [2, messages]


async def test_a_dead_engine_ends_the_run_whatever_the_workflow_makes_of_it(troubled: str, tiny_model: Path) -> None:
    class Dead(Engines):
        async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
            raise ActorDied("gone", field="engine-0")

    with pytest.raises(ActorDied, check=about("engine-0")):
        await runner_of(tiny_model, Dead(), troubled).run(trouble("catches all"), "group", 2, 1.0)
