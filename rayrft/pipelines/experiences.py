"""What is done with a group of own rows between its reward and the Buffer: from raw to verified rows.

A group at a time goes through the operators, in processes that keep them: on the Explorer's node, or in actors on any.
Rows that stay are verified; those that are left out are counted, by operator and reason; those that are made become
demonstrations.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rayrft.actor_pool import ActorPool
from rayrft.config.pipelines import OperatorConfig, PipelinesConfig
from rayrft.errors import ActorDied, CallFailed, ConfigError, OperatorFailed, OperatorTimeout
from rayrft.experience import SCHEMA, Experience, Task, from_batch, to_batch
from rayrft.handle import Handle
from rayrft.pipelines.chain import Link, Outcome, build_chain
from rayrft.pipelines.operator import Context, with_column
from rayrft.pipelines.report import reason_of
from rayrft.pipelines.runner import _ANSWER_BYTES, _START_S, Applier, _Far
from rayrft.processes import ProcessPool, Worker
from rayrft.registry import load_plugins

log = logging.getLogger(__name__)

EXPERIENCES = pa.schema(
    [
        *SCHEMA,
        pa.field("question", pa.string()),
        pa.field("answer", pa.string()),
        pa.field("domain", pa.string()),
        pa.field("difficulty", pa.float64()),
    ]
)
"""The columns that operators on experiences see: those of `experience.SCHEMA`, and what the task says."""

VERIFIED = "verified"
"""Status of rows that went through operators."""
_SAMPLED = ("experience_id", "group_id", "task_id", "token_ids", "logprobs", "weight_versions", "source")
"""Columns that say what was sampled, which no operator may change."""
_STARTS = 3
"""How often in a row a process is started that dies."""


@dataclass(frozen=True)
class OperatorStats:
    """What an operator did since it was last asked: rows that came, rows left out, changed and made, seconds."""

    taken: int = 0
    left_out: int = 0
    changed: int = 0
    made: int = 0
    failed: int = 0
    """Rows left out as it raised, was too slow, or died."""
    seconds: float = 0.0

    def __add__(self, other: OperatorStats) -> OperatorStats:
        return OperatorStats(*(one + two for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Verified:
    """What became of a group of rows."""

    rows: list[Experience]
    """Those that stay, in their order."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows by ``operator: reason``."""
    made: pa.RecordBatch | None = None
    """Demonstrations."""
    problem: str | None = None
    """The last error of an operator."""


class Operators(Protocol):
    """Operators that work on groups, here or elsewhere."""

    async def open(self) -> None:
        """Start them. Raises ConfigError if they cannot be started."""

    async def apply(self, rows: pa.RecordBatch) -> Worked:
        """Work on a group. Raises OperatorFailed."""
        ...


@dataclass(frozen=True)
class Worked:
    """A group after all operators, or none of its rows, and what each of those that it came to did."""

    rows: pa.RecordBatch
    outcomes: list[Outcome]


@dataclass(frozen=True)
class GroupChain:
    """Operators for groups of rows of a schema, in their order, to be built in any process.

    ``every_row``: operators that look at all rows may be among them, for a whole batch comes at once.
    """

    operators: Sequence[OperatorConfig]
    schema: pa.Schema
    field: str
    origin: str
    context: Context
    plugins: tuple[Path, ...] = ()
    every_row: bool = False

    def build(self) -> list[Link]:
        """Build them. Raises ConfigError if one does not fit, or needs more than it sees."""
        load_plugins(self.plugins)
        links = build_chain(self.operators, self.schema, field=self.field, origin=self.origin, context=self.context)
        for link in links:
            if link.operator.scope == "all" and not self.every_row:
                raise ConfigError(
                    "looks at all rows, and sees one group at a time here",
                    field=link.field,
                    value=link.name,
                    remedy="use it in pipelines.tasks, in pipelines.batch, or with `rayrft data process` on the run",
                )
            for name in set(link.operator.writes) & {*_SAMPLED}:
                raise ConfigError(
                    "would change what was sampled", field=link.field, value=name, remedy="leave this operator out"
                )
        return links


def check_experiences(config: PipelinesConfig, context: Context, plugins: Sequence[Path]) -> None:
    """Raise ConfigError if one of the operators on experiences does not fit, or if nothing is said of rows that one
    makes."""
    links = experience_chain(config, context, plugins).build()
    makers = [link for link in links if link.operator.kind == "synthesise"]
    if makers and config.made is None:
        remedy = "name the demonstrations that they become, which a stage may train on: pipelines.made: found"
        raise ConfigError(
            "makes rows, and nothing is said of what becomes of them", field=makers[0].field, remedy=remedy
        )
    if config.made is not None and not makers:
        remedy = "add one, such as expert_rows, or leave 'made' out"
        raise ConfigError("no operator makes rows", field="pipelines.made", value=config.made, remedy=remedy)


def experience_chain(config: PipelinesConfig, context: Context, plugins: Sequence[Path]) -> GroupChain:
    """Return the operators on experiences of a config."""
    return GroupChain(config.experiences, EXPERIENCES, "pipelines.experiences", "experiences", context, tuple(plugins))


class _GroupApplier(Applier):
    """The operators, in the process that applies them. What it left out comes without values."""

    def apply(self, number: int) -> Outcome:
        outcome = super().apply(number)
        return replace(outcome, left_out=[replace(each, values={}) for each in outcome.left_out])


@dataclass
class _Call:
    rows: pa.RecordBatch
    done: asyncio.Future[Worked]


class LocalOperators:
    """Operators in processes of this node, each of which works on one group at a time."""

    def __init__(self, chain: GroupChain, config: PipelinesConfig) -> None:
        self._links, self._workers, self._deadline_s = chain.build(), config.workers, config.deadline_s
        self._pool = ProcessPool(
            partial(_GroupApplier, chain.build, 0, config.on_error == "leave_out"),
            processes=config.workers,
            plugins=chain.plugins,
            spares=0,
            answer_limit=_ANSWER_BYTES,
            start_s=_START_S,
        )
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._working: list[asyncio.Task[None]] = []
        self._error: ConfigError | None = None
        """Why no process can be started any more."""

    async def open(self) -> None:
        """Start the processes. Raises ConfigError if they cannot be started."""
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._workers)]
        self._working = [asyncio.create_task(self._work(each)) for each in ready]
        await asyncio.gather(*ready)

    async def close(self) -> None:
        """End the processes."""
        for each in self._working:
            each.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        await self._pool.close()

    async def apply(self, rows: pa.RecordBatch) -> Worked:
        """Work on a group. Raises OperatorFailed if an operator raises, ends its process, is not done within the
        deadline, or returns what does not fit."""
        if self._error is not None:
            raise self._error
        call = _Call(rows, asyncio.get_running_loop().create_future())
        self._calls.put_nowait(call)
        return await call.done

    async def _work(self, ready: asyncio.Future[None]) -> None:
        """Work on groups in one process after another: one that was killed is replaced."""
        starts = 0
        while True:
            try:
                async with self._pool.lease() as worker:
                    starts = 0
                    if not ready.done():
                        ready.set_result(None)
                    while worker.at_rest:
                        await self._make(worker, await self._calls.get())
            except CallFailed as error:
                starts += 1
                if starts == _STARTS:
                    return self._fail(error, ready)

    async def _make(self, worker: Worker, call: _Call) -> None:
        if call.done.done():  # nobody waits any more
            return
        try:
            worked = await self._apply(worker, call.rows)
        except OperatorFailed as error:
            if not call.done.done():
                call.done.set_exception(error)
        else:
            if not call.done.done():
                call.done.set_result(worked)

    async def _apply(self, worker: Worker, rows: pa.RecordBatch) -> Worked:
        far, outcomes = _Far(worker, self._links, self._deadline_s), list[Outcome]()

        def note(number: int, outcome: Outcome) -> None:
            outcomes.append(outcome)

        async for batch in far.apply(range(len(self._links)), rows, note):
            return Worked(batch, outcomes)
        return Worked(pa.RecordBatch.from_pylist([], schema=self._links[-1].gives), outcomes)

    def _fail(self, error: CallFailed, ready: asyncio.Future[None]) -> None:
        """Raise the error in all calls, now and later."""
        self._error = ConfigError(
            f"the operators cannot be started: {error}",
            field=self._links[0].field,
            remedy="see the cause, and the operators' options",
        )
        waiting: list[asyncio.Future[None] | asyncio.Future[Worked]] = [ready]
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait().done)
        for each in waiting:
            if not each.done():
                each.set_exception(self._error)


class OperatorActor:
    """The actor: operators, with their processes, on any node."""

    def __init__(self, chain: GroupChain, config: PipelinesConfig) -> None:
        self._operators = LocalOperators(chain, config)

    async def start(self) -> None:
        """Start the processes. Raises ConfigError if they cannot be started."""
        await self._operators.open()

    async def apply(self, rows: pa.RecordBatch) -> Worked:
        """Work on a group. Raises OperatorFailed."""
        return await self._operators.apply(rows)


class ActorOperators:
    """Operators in actors: each group is worked on by the one that has the fewest rows to do."""

    def __init__(self, create: Callable[[], Handle[OperatorActor]], count: int) -> None:
        def start(actor: Handle[OperatorActor]) -> Awaitable[None]:
            return actor.call(OperatorActor.start)

        self._actors = ActorPool(create, start, count)

    async def open(self) -> None:
        """Start the actors. Raises ConfigError if operators cannot be started."""
        await self._actors.open()

    async def apply(self, rows: pa.RecordBatch) -> Worked:
        """Work on a group. Raises OperatorFailed, also if two actors died of it."""
        try:
            worked, _ = await self._actors.call(lambda actor: actor.call(OperatorActor.apply, rows), owed=rows.num_rows)
        except ActorDied as error:
            raise OperatorFailed(error.problem, field="pipelines.experiences", remedy=error.remedy) from error
        return worked


class ExperiencePipeline:
    """Sends the groups of an Explorer through the operators, wherever they are, and counts by operator."""

    def __init__(self, config: PipelinesConfig, links: Sequence[Link], operators: Operators) -> None:
        self._config, self._links, self._operators = config, links, operators
        self._by_operator = [OperatorStats() for _ in links]
        self._logged = set[str]()

    async def open(self) -> None:
        """Start the operators. Raises ConfigError if they cannot be started."""
        await self._operators.open()

    async def process(self, task: Task, rows: list[Experience]) -> Verified:
        """Verify the rows of a group.

        A group on which an operator fails is left out as a whole, unless it looks at single rows: then those are left
        out on which it raises. Raises OperatorFailed if ``on_error`` is ``stop``.
        """
        batch = to_batch(rows)
        for name, value in (
            ("question", task.question),
            ("answer", task.answer),
            ("domain", task.domain),
            ("difficulty", task.difficulty),
        ):
            kind = EXPERIENCES.field(name).type
            batch = batch.append_column(EXPERIENCES.field(name), pa.array([value] * len(rows), kind))
        try:
            worked = await self._operators.apply(batch)
            kept, made = self._split(worked.rows, batch)
        except OperatorFailed as error:
            if self._config.on_error == "stop":
                raise
            return self._failed(error, rows)
        left_out, problem = Counter[str](), None
        for number, outcome in enumerate(worked.outcomes):
            reasons = [each.reason for each in outcome.left_out]
            raised = [reason for reason in reasons if reason.startswith("raised ")]
            problem = f"{self._links[number].field} {raised[-1]}" if raised else problem
            left_out.update(f"{self._links[number].name}: {reason_of(reason)}" for reason in reasons)
            self._by_operator[number] += OperatorStats(
                outcome.taken, len(reasons), outcome.changed, outcome.made, len(raised), outcome.seconds
            )
        if problem is not None:
            self._note(problem)
        return Verified(kept, left_out, made, problem)

    def take_stats(self) -> dict[str, OperatorStats]:
        """Return what was done since the last call, by operator."""
        stats = dict(zip(_names(self._links), self._by_operator, strict=True))
        self._by_operator = [OperatorStats() for _ in self._links]
        return stats

    def _split(self, after: pa.RecordBatch, before: pa.RecordBatch) -> tuple[list[Experience], pa.RecordBatch | None]:
        """Return the rows that were sampled, and those that were made. Raises OperatorFailed if any is neither, or is
        not what was sampled any more."""
        ids = {name: place for place, name in enumerate(before.column("experience_id").to_pylist())}
        places = [ids.get(name) for name in after.column("experience_id").to_pylist()]
        stayed = [place for place in places if place is not None]
        own = pa.array([place is not None for place in places], pa.bool_())
        kept, made = after.filter(own), after.filter(pc.invert(own))
        sampled = before.take(pa.array(stayed, pa.int64()))
        for name in _SAMPLED:
            if not kept.column(name).equals(sampled.column(name)):
                raise self._wrong(f"column {name!r} of a row that was sampled is another one after the operators")
        if stayed != sorted(set(stayed)):
            raise self._wrong("rows that were sampled are there twice, or in another order")
        kept = with_column(kept, "status", pa.array([VERIFIED] * len(stayed), pa.string()))
        rows = from_batch(kept.select(SCHEMA.names).cast(SCHEMA))
        if not made.num_rows:
            return rows, None
        if pc.any(pc.equal(made.column("source"), "usual")).as_py():
            raise self._wrong("a made row has the source 'usual', as if it had been sampled; give it 'expert'")
        return rows, made.select(SCHEMA.names).cast(SCHEMA)

    def _wrong(self, problem: str) -> OperatorFailed:
        return OperatorFailed(problem, field="pipelines.experiences", remedy="correct the operator")

    def _failed(self, error: OperatorFailed, rows: list[Experience]) -> Verified:
        """Leave out a group on which an operator failed, which the error names."""
        number = next((at for at, link in enumerate(self._links) if link.field == error.field), None)
        name = "operators" if number is None else self._links[number].name
        if number is not None:
            self._by_operator[number] += OperatorStats(len(rows), len(rows), failed=len(rows))
        problem = str(error)
        self._note(problem, *getattr(error, "__notes__", ()))
        reason = "timeout" if isinstance(error, OperatorTimeout) else "failed"
        return Verified([], Counter({f"{name}: {reason}": len(rows)}), None, problem)

    def _note(self, problem: str, *details: str) -> None:
        """Log a problem, the first of its kind with its traceback."""
        kind = problem.partition(", on the batch")[0]
        log.warning("\n".join([problem, *details] if kind not in self._logged else [problem]))
        self._logged.add(kind)


def _names(links: Sequence[Link]) -> list[str]:
    """Return the operators' names, with a number where one is there again."""
    seen = Counter[str]()
    names = []
    for link in links:
        seen[link.name] += 1
        names.append(link.name if seen[link.name] == 1 else f"{link.name}-{seen[link.name]}")
    return names
