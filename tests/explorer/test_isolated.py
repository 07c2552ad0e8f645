"""Workflows that may block: their rows are those of the event loop, and what they do costs nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied, ConfigError
from rayrft.experience import Experience, Task
from rayrft.explorer.engines.auxiliary import AuxiliaryModel
from rayrft.explorer.engines.exchange import Completion, Request, Session
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.rollout import Runner
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows import build_workflow, isolated
from rayrft.pipelines.run.models import RemoteChat
from rayrft.rewards import RewardResult, Transcript
from rayrft.rewards.judge import ChatModel, OpenAIModel
from tests.errors import about
from tests.explorer.scripted import TASK, Engines, Room, config, visit


@contextlib.asynccontextmanager
async def running(tiny_model: Path, engines: Engines, **overrides: Any) -> AsyncIterator[Runner]:
    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        return [RewardResult(float(len(each.response))) for each in transcripts]

    settings, tokenizer = config(**{"auxiliary.judge": {"model": "some/model"}, **overrides}), ChatTokenizer(tiny_model)
    judge = AuxiliaryModel("judge", settings.auxiliary["judge"], tokenizer, engines.generate)
    runner = Runner(settings, tokenizer, engines, score, {"judge": judge})
    try:
        yield runner
    finally:
        workflow = runner.workflow(settings.explorer.workflow)
        if isinstance(workflow, isolated.IsolatedWorkflow):
            await workflow.close()


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


def troubled(trouble: str, place: Path | str = "") -> dict[str, Any]:
    name = "tests.explorer.blocking:Troubled"
    options = {"trouble": trouble, "place": str(place)}
    return {"explorer.workflow": name, "explorer.workflow_options": {name: options}, "explorer.workflow_processes": 3}


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
            "explorer.workflow": workflow,
            "explorer.workflow_options": {workflow: {"hint": "Really?"}},
        }
        async with running(tiny_model, Engines(), **settings) as runner:
            in_processes = isinstance(runner.workflow(workflow), isolated.IsolatedWorkflow)
            rollouts = [await runner.run(TASK, group, 2, 1.0) for group in ("first", "second")]
            found.append([content(row) for rollout in rollouts for row in rollout.rows])
        assert in_processes == (name == "InProcess") and all(rollout.problem is None for rollout in rollouts)
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
def test_a_handle_has_all_that_its_object_has_with_its_signatures(handle: type, known: type, kept: set[str]) -> None:
    """Except ``kept``, which the Explorer alone uses."""
    source = inspect.getsource(known)
    attributes = {name for name in re.findall(r"^        self\.([a-z]\w*)(?:: .*?)? = ", source, re.M)}
    names = {name for name in vars(known) if not name.startswith("_")} | attributes
    assert {name for name in vars(handle) if not name.startswith("_")} == names - kept
    for name in names - kept:
        if callable(method := getattr(known, name, None)):
            assert _parameters(getattr(handle, name)) == _parameters(method), name


@pytest.mark.parametrize("model", [AuxiliaryModel, OpenAIModel])
def test_every_chat_model_takes_the_same(model: type[ChatModel]) -> None:
    assert _parameters(model.chat) == _parameters(ChatModel.chat)
    assert _parameters(model.with_seed) == _parameters(ChatModel.with_seed)


def _parameters(method: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]


async def test_one_that_blocks_does_not_stop_the_event_loop(tiny_model: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    async with running(tiny_model, Engines(), **troubled("blocks", pipe)) as runner:
        blocked = asyncio.create_task(runner.run(TASK, "blocked", 2, 1.0))
        free = await runner.run(TASK, "free", 1, 1.0)
        assert len(free.rows) == 1 and not blocked.done()
        await asyncio.to_thread(pipe.write_text, "go on")  # once it is read
        assert len((await blocked).rows) == 2


async def test_one_that_hangs_ends_at_its_deadline_with_all_that_it_started(tiny_model: Path, tmp_path: Path) -> None:
    place = tmp_path / "pids"
    async with running(tiny_model, Engines(), **troubled("hangs", place), **{"explorer.deadline_s": 1.5}) as runner:
        rollout = await runner.run(TASK, "group", 2, 1.0)
    assert len(rollout.rows) == 1 and rollout.failed == {"timeout": 1}
    pids = {int(pid) for pid in place.read_text().split()}
    assert len(pids) == 2 and not pids & set(psutil.pids())


@pytest.mark.parametrize("trouble", ["leaves a thread that asks", "leaves a thread that waits"])
async def test_one_that_leaves_a_thread_behind_delays_no_other(trouble: str, tiny_model: Path) -> None:
    async with running(tiny_model, Slow() if "waits" in trouble else Engines(), **troubled(trouble)) as runner:
        async with asyncio.timeout(120):  # a process that is waited for costs 60 s, three times
            for number in range(3):
                rollout = await runner.run(TASK, f"group-{number}", 3, 1.0)
                assert len(rollout.rows) == 3 and not rollout.failed


async def test_one_that_fails_costs_itself_and_says_why(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    problems = ("exit code 3", "KeyError: 'nothing here'", "must return a Trajectory")
    async with running(tiny_model, Engines(), **troubled("exits, raises, returns nothing")) as runner:
        rollout = await runner.run(TASK, "group", 4, 1.0)
        assert [row.repeat for row in rollout.rows] == ["0"] and rollout.failed == {"workflow_error": 3}
        told = [record.getMessage() for record in caplog.records]
        assert all(any(problem in text for text in told) for problem in problems), told
        assert len((await runner.run(TASK, "next", 1, 1.0)).rows) == 1


async def test_one_whose_context_is_full_keeps_what_it_has(tiny_model: Path) -> None:
    async with running(tiny_model, Engines(), **troubled("is full")) as runner:
        rollout = await runner.run(TASK, "group", 2, 1.0)
    short, full = rollout.rows
    assert (short.stop_reason, full.stop_reason) == ("stop", "length") and rollout.failed == {}
    assert len(short.token_ids) < len(full.token_ids) <= 64


@pytest.mark.parametrize(
    ("trouble", "messages"),
    [("catches what is full", None), ("catches what is too long", 2), ("is in no room", 2), ("gives up", 3)],
)
async def test_it_may_catch_errors_and_give_up_answers(trouble: str, messages: int | None, tiny_model: Path) -> None:
    engines = Slow() if trouble == "gives up" else Engines()
    settings = {"explorer.environment": visit("reset")["explorer.environment"], "explorer.deadline_s": 20.0}
    async with running(tiny_model, engines, **troubled(trouble), **settings) as runner:
        rollout = await runner.run(TASK, "group", 2, 1.0)
    assert rollout.failed == {} and [row.metrics.get("caught") for row in rollout.rows] == [None, 1.0]
    assert messages is None or [len(row.turns) for row in rollout.rows] == [2, messages]


async def test_a_dead_engine_ends_the_run_whatever_the_workflow_makes_of_it(tiny_model: Path) -> None:
    class Dead(Engines):
        async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
            raise ActorDied("gone", field="engine-0")

    async with running(tiny_model, Dead(), **troubled("catches all")) as runner:
        with pytest.raises(ActorDied, check=about("engine-0")):
            await runner.run(TASK, "group", 2, 1.0)


def test_a_workflow_that_is_no_coroutine_function_is_refused(tiny_model: Path) -> None:
    settings = config(**{"explorer.workflow": "tests.explorer.test_isolated:Plain"})
    with pytest.raises(ConfigError, check=about("explorer.workflow"), match="blocking = True"):
        build_workflow(settings.explorer.workflow, settings.explorer)


class Plain:
    def run(self, task: Task, model: Any, env: Any = None) -> Any:
        return model.start(task.messages)
