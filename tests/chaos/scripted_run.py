"""A whole run in a `World`: the real Master and its parts, with scripted engines and ranks.

The weights of a rank are the rows that it was trained on, step by step; so the weights at the end tell which rows those
were, and their digest, from which log-probs follow, tells whether an engine holds those of its version.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
from ray.exceptions import ObjectLostError

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.leases import Lease
from rayrft.core.bundles import Bundles
from rayrft.experience import Task, from_batch, unpack
from rayrft.explorer.engines.engine import EngineWeights, RolloutEngine
from rayrft.explorer.engines.exchange import Answering, Capacity, Completion, Request, Stream
from rayrft.pipelines.chain import Outcome
from rayrft.pipelines.run.groups import GroupResult, OperatorActor
from rayrft.runtime.handle import Handle, Watched
from rayrft.trainer.api import Mailbox, RankSetup
from rayrft.trainer.blame import device_failed
from rayrft.trainer.result import FirstUpdate, StepMetrics, StepResult
from rayrft.trainer.trainer import Trainer
from rayrft.weights.messages import Link, SendReport
from tests.chaos.simulated import Life, Ref, World, sent

LOAD_S, _ANSWER_S, _TRAIN_S, _SEND_S, _WRITE_S = 0.2, 0.05, 0.03, 0.03, 0.05
"""Longest times of what engines and ranks do."""


@dataclass
class Service:
    """What a process of a rollout engine has done since it had weights."""

    since: int
    """The number of steps then."""
    until: int = 0
    """The number of steps at its end."""
    answers: int = 0


class Cluster:
    """What the processes of a run share beside their calls: links, collectives of ranks, and notes for the test."""

    def __init__(self, world: World, max_staleness: int) -> None:
        self.world, self.max_staleness = world, max_staleness
        self.links: dict[str, Transfer] = {}
        self.moments: dict[str, asyncio.Event] = {}
        self.steps = 0
        """Steps taken, with those that are repeated."""
        self.weights: dict[int, list[list[str]]] = {}
        """The latest weights, by rank."""
        self.digests: dict[int, str] = {}
        """Of the weights that engines have had, by version."""
        self.accepted: dict[str, int] = {}
        """Rows that the Buffer has acknowledged, by group."""
        self.services: dict[Life, Service] = {}
        self.check: Callable[[RankSetup, Lease], None] = lambda setup, lease: None
        """Raises what a rank fails with on a batch."""
        self.engine: type[Any] = ScriptedEngine
        self.rank: type[ScriptedRank] = ScriptedRank
        self.gpus: Any = None
        """What such engines and ranks share beside."""
        self.failed_starts = 0
        """Engines that did not start, as the memory of their GPU changed meanwhile."""
        world.on_end.append(self._ended)
        world.on_result.append(self._note)

    async def takes(self, longest_s: float) -> None:
        await asyncio.sleep(self.world.chance.uniform(0, longest_s))

    def happens(self, moment: str) -> None:
        self.moments.pop(moment, asyncio.Event()).set()

    async def until(self, moment: str) -> None:
        await self.moments.setdefault(moment, asyncio.Event()).wait()

    def transfer(self, link: Link) -> Transfer:
        return self.links.setdefault(link.secret, Transfer(link.senders + link.receivers))

    def _note(self, life: Life, method: str, arguments: Any, result: Any) -> None:
        if method == "put" and isinstance(life.target, Buffer):
            stored = (entry for entry, faults in zip(arguments[0], result, strict=True) if not faults)
            self.accepted |= {entry.group_id: entry.rows for entry in stored}

    def _ended(self, life: Life) -> None:
        if life in self.services:
            self.services[life].until = self.steps
        if isinstance(life.target, Buffer):
            life.target.store.storage.unlock()
        for transfer in self.links.values():
            transfer.leave(life)


class Meeting:
    """A number of processes that wait for each other: each gives a value, and gets all of them, by place. If one
    leaves, the others fail."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.broken = False
        self._changed = asyncio.Event()

    async def gather(self, values: dict[int, Any], place: int, value: Any) -> dict[int, Any]:
        values[place] = value
        self.change()
        while len(values) < self.count and not self.broken:
            await self._changed.wait()
        if self.broken:
            raise RuntimeError("connection closed by peer")
        return values

    def change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Transfer(Meeting):
    """A link between ranks and engines."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._ends: dict[int, Life] = {}
        self._rounds: dict[int, dict[int, Any]] = {}

    async def join(self, place: int, life: Life, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self.gather(self._ends, place, life), timeout_s)
        except TimeoutError:
            raise RuntimeError("timed out: a peer has not come") from None

    async def exchange(self, number: int, place: int, value: Any) -> Any:
        """Take part in a round; return the value of the first rank."""
        return (await self.gather(self._rounds.setdefault(number, {}), place, value))[0]

    def leave(self, life: Life | None) -> None:
        if life is None or life in self._ends.values():
            self.broken = True
            self.change()


class ScriptedEngine(Answering, Watched):
    """Answers with tokens of the prompt that are drawn by the request's seed, and labels them by the version that it
    holds. Log-probs follow from the weights."""

    def __init__(self, cluster: Cluster, life: Life) -> None:
        super().__init__()
        self._cluster, self._life = cluster, life
        self._version, self._digest = 0, ""
        self.running = asyncio.Event()
        self.running.set()
        self._link: Transfer | None = None

    async def start(self, *_: Any, **settings: Any) -> None:
        await self._cluster.takes(LOAD_S)

    async def capacity(self) -> Capacity:
        return Capacity(answers=8)

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        chance = random.Random(request.sampling.seed)
        await self.running.wait()
        first = self._version
        await self._cluster.takes(_ANSWER_S)
        await self.running.wait()
        if self._life in self._cluster.services:
            self._cluster.services[self._life].answers += request.n
        return [self._answer(request, chance, first) for _ in range(request.n)]

    async def score(self, token_ids: list[int], images: tuple[str, ...] = ()) -> list[float]:
        await self._cluster.takes(_SEND_S)
        return scores(self._digest, token_ids)

    async def connect(self, link: Link, first: int) -> None:
        if self._link is not None:
            self._link.leave(None)
        self._link, self._place = self._cluster.transfer(link), link.senders + first
        await self._link.join(self._place, self._life, link.timeout_s)

    async def respond(self) -> int:
        return self._version

    async def pause(self, keep_cache: bool = False) -> None:
        await self._cluster.takes(_SEND_S)
        self.running.clear()

    async def receive(self, number: int, version: int) -> EngineWeights:
        assert self._link is not None and not self.running.is_set()  # it is connected and paused
        digest = await self._link.exchange(2 * number, self._place, "")
        await self._cluster.takes(_SEND_S)
        await self._link.exchange(2 * number + 1, self._place, "")
        if version < self._version and self._life.name.startswith("engine"):  # evaluations may be repeated
            self._cluster.world.problems.append(f"{self._life.name} goes from version {self._version} to {version}")
        if self._cluster.digests.setdefault(version, digest) != digest:
            self._cluster.world.problems.append(f"{self._life.name} gets other weights of version {version}")
        self._version, self._digest = version, digest
        if self._life.name.startswith("engine"):
            self._cluster.services.setdefault(self._life, Service(self._cluster.steps))
        self.running.set()
        return EngineWeights(version, (digest,))

    async def resume(self) -> None:
        self.running.set()

    def _answer(self, request: Request, chance: random.Random, first: int) -> Completion:
        sampling = request.sampling
        ordinary = sorted(set(request.prompt) - set(sampling.stop_token_ids))
        ids = (*chance.choices(ordinary, k=chance.randrange(1, sampling.max_tokens)), sampling.stop_token_ids[0])
        spans = ((0, 1, first), (1, len(ids), self._version)) if first != self._version else ((0, len(ids), first),)
        return Completion(ids, (-1.0,) * len(ids), spans, "stop")


def scores(digest: str, token_ids: list[int]) -> list[float]:
    return [-1.0 - int(digest[:4] or "0", 16) / 65536] * (len(token_ids) - 1)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


class ScriptedTrainer(Trainer):
    """The Trainer, of scripted ranks: the death of one ends the others, and is what Ray Train raises."""

    def __init__(self, cluster: Cluster, life: Life, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cluster, self._life = cluster, life

    async def _fit_blocking(self, folder: Path, setup: RankSetup) -> None:  # type: ignore[override]
        world, count = self._cluster.world, setup.config.ranks
        group = Meeting(count)
        ranks = [
            world.create(
                f"rank-{index}",
                lambda life, index=index: self._cluster.rank(self._cluster, life, index, group, setup),
                owner=self._life,
            )
            for index in range(count)
        ]
        try:
            await asyncio.gather(*(rank.call(ScriptedRank.run, setup.trainer) for rank in ranks))
        finally:
            for rank in ranks:
                rank.kill()


class ScriptedRank:
    """A rank whose weights are the ids of the rows that it has trained."""

    def __init__(self, cluster: Cluster, life: Life, index: int, group: Meeting, setup: RankSetup) -> None:
        self._cluster, self._life, self._index, self._group, self._setup = cluster, life, index, group, setup
        self._rounds: dict[int, dict[int, Any]] = vars(group).setdefault("rounds", {})
        self._round = 0
        self._weights: list[list[str]] = []
        self._link: Transfer | None = None

    async def run(self, trainer: Handle[Mailbox]) -> None:
        self._trainer = trainer
        try:
            await self.load()
            number, answer = 0, None
            self.release()
            await trainer.call(Mailbox.ready, self._index, None)
            while (call := await trainer.call(Mailbox.next_call, self._index, number, answer)) is not None:
                self._cluster.happens(call.method)
                number, answer = number + 1, await getattr(self, call.method)(*call.args, **call.kwargs)
                self.release()
        except Exception as error:
            failed = device_failed(error, self._index, "the node", self._setup.config) or error
            await trainer.call(Mailbox.failed, self._index, failed)
            raise

    async def load(self) -> None:
        await self._cluster.takes(LOAD_S)

    def release(self) -> None:
        """A rank does so after each call."""

    async def open_stage(self, algorithm: Any, stage: Any, weights: Path | None) -> None:
        await self._all()

    async def adjust(self, algorithm: Any, stage: Any, temperature: float) -> None:
        await self._all()

    async def train(self, lease: Lease) -> StepResult | None:
        lost, usual = False, list[str]()
        try:
            for part in lease.shares[self._index].parts:
                rows = from_batch(unpack(await part.ref).take(pa.array(part.rows)))
                for row in rows:
                    oldest = min((span.version for span in row.weight_versions), default=lease.step)
                    if row.source == "usual" and lease.step - oldest > self._cluster.max_staleness:
                        self._cluster.world.problems.append(f"step {lease.step} trains {row.experience_id} of {oldest}")
                usual += [row.experience_id for row in rows if row.source == "usual"]
        except ObjectLostError:
            lost = True
        await self._cluster.takes(_TRAIN_S)
        if any((await self._all(lost)).values()):
            return None
        self._cluster.check(self._setup, lease)
        if lease.step != len(self._weights):
            self._cluster.world.problems.append(f"step {lease.step} is trained on weights of {len(self._weights)}")
        self._weights.append(sorted(usual))
        self._cluster.weights[self._index] = self._weights
        self._cluster.steps = max(self._cluster.steps, lease.step + 1)
        metrics = StepMetrics(**{each.name: 0 for each in fields(StepMetrics)})
        return StepResult(metrics, FirstUpdate(0.0, 0.0), {}, 0.0, len(usual))

    async def rank_pairs(self, blocks: Any) -> None:
        raise NotImplementedError

    async def locate(self, timeout_s: float) -> tuple[str, int] | None:
        return None if self._index else ("host", 1)

    async def connect(self, link: Link) -> str | None:
        if self._link is not None:
            self._link.leave(None)
        self._link = self._cluster.transfer(link)
        return await self._unless_broken(self._link.join(self._index, self._life, link.timeout_s))

    async def send(self, number: int, version: int, bucket_bytes: int) -> SendReport:
        assert self._link is not None  # connect comes first
        digest = hashlib.sha1(json.dumps(self._weights).encode()).hexdigest()
        problem = await self._unless_broken(self._link.exchange(2 * number, self._index, digest))
        await self._cluster.takes(_SEND_S)
        problem = problem or await self._unless_broken(self._link.exchange(2 * number + 1, self._index, digest))
        if problem:
            self._link.leave(None)
        return SendReport(digest, 16, problem)

    async def score(self, sequences: list[list[int]], images: Any = None) -> list[list[float]]:
        digest = hashlib.sha1(json.dumps(self._weights).encode()).hexdigest()
        return [scores(digest, each) for each in sequences]

    async def save(self, folder: Path) -> None:
        await self._all()
        self._exporting = asyncio.ensure_future(self._write(folder, "model", "weights"))

    async def checkpoint(self, folder: Path) -> None:
        name, weights = f"rank-{self._index}.json", json.dumps(self._weights)
        self._writing = asyncio.ensure_future(self._write(folder, name, weights))

    async def restore(self, folder: Path, whole: bool) -> None:
        await self._cluster.takes(_WRITE_S)
        self._weights = json.loads((folder / f"rank-{self._index}.json").read_text())
        await self._all()

    async def _write(self, folder: Path, name: str, weights: str) -> None:
        await self._cluster.takes(_WRITE_S)
        write(folder / name, weights)
        await self._trainer.call(Mailbox.wrote, self._index, folder, None)

    async def _all(self, value: Any = None) -> dict[int, Any]:
        """Wait for all ranks; return the value of each. A rank alone hangs, until the death of the other ends it."""
        self._round += 1
        return await self._group.gather(self._rounds.setdefault(self._round, {}), self._index, value)

    async def _unless_broken(self, work: Any) -> str | None:
        try:
            await work
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return None


class ScriptedOperators(Watched):
    """Operators that leave a group as it is."""

    def __init__(self, cluster: Cluster, life: Life, *_: Any) -> None:
        self._cluster = cluster

    async def open(self) -> None:
        await self._cluster.takes(LOAD_S)

    async def apply(self, rows: pa.RecordBatch, task: Task) -> GroupResult:
        await self._cluster.takes(_SEND_S)
        count = rows.num_rows
        return GroupResult([*range(count)], rows.select([]), None, [Outcome(count, count, 0, 0, 0.0)])


@dataclass
class ScriptedPlacement:
    """Creates the actors of a run in a `World`, but for those that a Master before this one has left."""

    cluster: Cluster
    parts: list[Bundles]

    def __post_init__(self) -> None:
        self._found = {actor.name for actor in self.cluster.world.living}

    def reserve(self, *_: Any) -> None: ...

    @property
    def ranks(self) -> None: ...

    @property
    def nodes(self) -> set[str]:
        return set()

    def node_of(self, name: str, bundle: int) -> str:
        return f"node-{bundle + 1}"

    def extend(self, name: str, bundle: int) -> None: ...

    def shrink(self, name: str, bundle: int) -> None: ...

    def count(self, name: str) -> int:
        return next(part.count for part in self.parts if part.name == name)

    def actor(self, cls: Any, part: str, *, name: str | None = None, bundle: int = -1, restarts: int = 0) -> Any:
        world, name = self.cluster.world, name or part
        left = name in self._found and not self._found.discard(name)
        scripted: dict[Any, Any] = {
            RolloutEngine: self.cluster.engine,
            Trainer: ScriptedTrainer,
            OperatorActor: ScriptedOperators,
        }

        def create(*arguments: Any, **keywords: Any) -> Handle[Any]:
            if left and (handle := world.handle(name)) is not None:
                return handle
            arguments, keywords = sent((arguments, keywords), None)

            def make(life: Life) -> Any:
                given, named = sent((arguments, keywords), life)
                given = [each.get() if isinstance(each, Ref) else each for each in given]
                if cls in scripted:
                    return scripted[cls](self.cluster, life, *given, **named)
                return cls(*given, **named)

            return world.create(name, make, restarts=bool(restarts))

        return create

    def remove(self) -> None:
        for actor in self.cluster.world.living:
            if actor.name != "master":
                actor.kill(restart=False)
