"""A whole run in one process that may be killed at any moment: real stages, Buffer, rank and checkpoints.

Stand-ins are the engines (answers follow from task, seed and weights) and what carries calls between actors.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
import torch.distributed as dist

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.events import GroupReport
from rayrft.buffer.leases import Lease
from rayrft.buffer.schedule import Ticket
from rayrft.config import RunConfig, StageConfig, load_config
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.run_folder import write_config
from rayrft.core.steering import Steering, histories
from rayrft.core.supervision import Stopped
from rayrft.core.train_loop import TrainLoop
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import RowsFailed, StorageError
from rayrft.experience import Experience, VersionSpan, pack, to_batch, unpack
from rayrft.explorer.explorer import Timings
from rayrft.monitor.recorder import Recorder
from rayrft.runtime.handle import Handle
from rayrft.trainer.api import RankApi, RankCall, RankSetup
from rayrft.trainer.rank import Rank
from rayrft.trainer.trainer import Trainer, ask_ranks
from tests.buffer.in_process import ObjectTable
from tests.core.given import restarts
from tests.scripted import remote

Wishes = Mapping[int, list[tuple[Any, ...]]]
TASKS = 40
VOCABULARY = 50


class OneRank:
    """The Trainer actor with its one rank in this process. Notes which rows each step was trained on."""

    def __init__(
        self, config: RunConfig, pipe: Connection, steering: Steering, wishes: Wishes, stop: asyncio.Event
    ) -> None:
        self._pipe, self._steering, self._wishes, self._stop = pipe, steering, wishes, stop
        self._folder = config.folder
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._written: dict[Path, asyncio.Future[str | None]] = {}
        setup = RankSetup(Handle("trainer", self), config, config.trainer, str(config.model.path))
        self.rank = Rank(setup, 0, torch.device("cpu"))
        self.wrote = type("Method", (), {"remote": self._wrote})

    async def call_ranks(self, call: RankCall) -> list[Any]:
        async with self._lock:
            answer = None
            if call.method == "train":
                self._note(*call.args)
                self._asked = asyncio.ensure_future(self._wish(call.args[0].step + 1))
            if call.method == "save":  # Hugging Face folders are not what a run resumes from
                self._of(*call.args).set_result(None)
            else:
                answer = await asyncio.to_thread(getattr(self.rank, call.method), *call.args, **call.kwargs)
            self._pipe.send(call.method)
            return [answer]

    async def _wish(self, step: int) -> None:
        """Ask for what the user does in this step, unless it was done before the run was killed."""
        done = {change.step for changes in histories(self._folder).values() for change in changes}
        for request, *arguments in self._wishes.get(step, []) if step not in done else []:
            if request == "stop":
                self._stop.set()
            else:
                await self._steering.ask(request, *arguments)

    async def written(self, folder: Path) -> None:
        problem = await self._of(folder)
        assert problem is None, problem
        self._pipe.send("written")

    def _wrote(self, rank: int, folder: Path, problem: str | None) -> None:
        self._loop.call_soon_threadsafe(lambda: self._of(folder).set_result(problem))

    def _of(self, folder: Path) -> asyncio.Future[str | None]:
        return self._written.setdefault(folder, self._loop.create_future())

    def _note(self, lease: Lease) -> None:
        ids = []
        for part in lease.shares[0].parts:
            [message] = ray.get([part.ref])
            ids += unpack(message).column("experience_id").take(pa.array(part.rows)).to_pylist()
        with (self._folder / "trained.jsonl").open("a") as file:
            file.write(json.dumps([lease.step, ids]) + "\n")


class ScriptedExplorer:
    """An explorer whose answers are drawn by task and seed and rewarded by the present weights."""

    def __init__(self, buffer: Handle[Buffer], trainer: Handle[Trainer], pipe: Connection, poison: int | None) -> None:
        self._buffer, self._trainer, self._pipe, self._poisoned = buffer, trainer, pipe, poison
        self._writer = BufferWriter(buffer)
        self._name, self._calls = f"explorer-{os.getpid()}", 0  # of this life: the one before was given up

    async def explore(self, stage: StageConfig, producer: str) -> None:
        while tickets := await self._admit(stage):
            self._pipe.send("admitted")
            await asyncio.gather(*(self._group(stage, ticket) for ticket in tickets))

    async def _admit(self, stage: StageConfig) -> list[Ticket]:
        self._calls += 1
        return await self._buffer.call(Buffer.admit, self._name, self._calls, stage.groups)

    async def adjust(self, config: RunConfig) -> None: ...

    async def timings(self) -> Timings:
        return Timings()

    async def _group(self, stage: StageConfig, ticket: Ticket) -> None:
        chance = np.random.default_rng([int(ticket.task or 0), ticket.sequence])
        name = f"{stage.name}/{ticket.sequence}/{ticket.task}"
        if chance.random() < 0.2:
            return await self._buffer.call(Buffer.drop, ticket, {"zero_variance": 2}, GroupReport(rows=2))
        rows = [chance.integers(1, VOCABULARY, size=chance.integers(4, 12)) for _ in range(2)]
        scores = (await ask_ranks(self._trainer, RankApi.score, [row.tolist() for row in rows]))[0]
        means = [float(np.mean(each)) for each in scores]
        group = []
        for number, (row, score) in enumerate(zip(rows, scores, strict=True)):
            mask = np.ones(len(row), np.uint8)
            mask[0] = 0
            if ticket.sequence == self._poisoned and number == 1:
                row[-1] = VOCABULARY  # this Buffer knows of no limits, and the model has no such token
            logprobs, spans = np.array([0.0, *score], np.float32), (VersionSpan(1, len(row), ticket.version),)
            tokens, more = row.astype(np.int32), {"weight_versions": spans, "reward": means[number]}
            group.append(Experience(f"{name}/{number}", name, str(ticket.task), tokens, 1, mask, logprobs, **more))
        report = GroupReport(rows=2, reward_sum=sum(means), scored=2)
        await self._writer.put(to_batch(group), report, ticket=ticket)
        self._pipe.send("put")


def demonstrations() -> list[Experience]:
    chance = np.random.default_rng(5)
    rows = []
    for number in range(12):
        ids = chance.integers(1, VOCABULARY, size=8).astype(np.int32)
        mask = np.array([0, 0, 1, 1, 1, 1, 1, 1], np.uint8)
        name = f"gold/{number}"
        rows.append(Experience(name, name, "", ids, 2, mask, np.zeros(8, np.float32), source="expert"))
    return rows


def run(config: RunConfig, pipe: Connection, poisoned: int | None = None, wishes: Wishes | None = None) -> None:
    """Begin the run, or go on with it, to its end. ``pipe`` gets what was just done, for a reader that may kill.

    In the group of the ticket ``poisoned`` there is a row on which every step fails. ``wishes`` are the requests that a
    user makes during the steps of these numbers."""
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    dist.init_process_group("gloo", rank=0, world_size=1)
    asyncio.run(_run(config, pipe, poisoned, wishes or {}))


async def _run(config: RunConfig, pipe: Connection, poisoned: int | None, wishes: Wishes) -> None:
    ObjectTable(pytest.MonkeyPatch())
    checkpoints = Checkpoints(config.folder, config.checkpoint)
    progress = checkpoints.latest()
    if progress is None:
        progress = Progress("run")
        checkpoints.mark_beginning(progress)
    if (config.folder / "changes.jsonl").exists():
        config = load_config(config.folder / "config.yaml")
    write_config(config)
    steering, stop = Steering(config, progress, lambda _: None), asyncio.Event()
    config = steering.config
    tasks = TaskSetSpec([str(number) for number in range(TASKS)], [0] * TASKS, [1.0], sampler="shuffled", seed=3)
    try:
        buffer = remote(Buffer("run", config.buffer_folder, config.buffer, 0, tasks, logged=progress.logged))
    except StorageError as error:
        return pipe.send(type(error).__name__)
    local = OneRank(config, pipe, steering, wishes, stop)
    trainer = remote(local)
    explorer = remote(ScriptedExplorer(buffer, trainer, pipe, poisoned))
    await buffer.call(Buffer.load, "gold", [pack(to_batch(demonstrations()))])
    recorder = Recorder(config, progress.records)
    loop = TrainLoop(config, buffer, trainer, [explorer], recorder, progress, stop, restarts(), steering=steering)
    await loop.restore()
    pipe.send("up")
    try:
        await loop.run()
    except Stopped:
        return pipe.send("stopped")
    except RowsFailed as failed:
        await loop.blame(failed)  # as the Master does
        pipe.send(failed.value)
        return
    ledger = (await buffer.call(Buffer.stats)).ledger
    (config.folder / "end.json").write_text(json.dumps({"trained": ledger.trained, "held": ledger.held}))
    weights = [p.detach().full_tensor().flatten() for p in local.rank.learner.policy.parameters()]
    torch.save(torch.cat(weights), config.folder / "weights.pt")
    pipe.send("end")
