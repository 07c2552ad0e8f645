"""Operators that work in a run, batch after batch: in processes of their own or in actors."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.pipelines import OperatorConfig, PipelinesConfig
from rayrft.config.reward import RewardModelsConfig
from rayrft.errors import ActorDied, ActorUnreachable, CallFailed, ConfigError, EndpointFailed, OperatorFailed
from rayrft.experience import Task
from rayrft.pipelines.chain import Link, Outcome, build_chain, same_values
from rayrft.pipelines.operator import Context
from rayrft.pipelines.run.answering import Answerer, answering, running
from rayrft.pipelines.run.process import (
    ANSWER_BYTES,
    START_S,
    Answers,
    Applier,
    Far,
    asked_by,
    packed,
    segments,
    unpacked,
)
from rayrft.registry import load_plugins
from rayrft.rewards.pool import Models
from rayrft.runtime.actor_pool import ActorPool
from rayrft.runtime.handle import Handle
from rayrft.runtime.processes.pool import ProcessPool, Worker

_STARTS = 3
"""How often in a row a process is started that dies."""
_AT_ONCE = 32
"""The most groups that a process works on at a time: many end together, and a call takes a millisecond."""
_SHARE = 0.25
"""Those that are worked on together are to be done in this share of the deadline, which is that of a group."""


@dataclass(frozen=True)
class Worked:
    """What operators made of rows: the ``kept`` ones by their places, the columns of these that have ``changed``, rows
    that were ``made``, and what each operator did that rows came to."""

    kept: list[int]
    changed: pa.RecordBatch
    made: pa.RecordBatch | None
    outcomes: list[Outcome]


class Operators(Protocol):
    """Operators that work on groups, here or elsewhere."""

    async def open(self) -> None:
        """Start them. Raises ConfigError if they cannot be started."""

    async def apply(self, rows: pa.RecordBatch, task: Task) -> Worked:
        """Work on a group of answers to a task. Raises OperatorFailed."""
        ...


@dataclass(frozen=True)
class GroupChain:
    """Operators for groups of rows of a schema, in their order, to be built in any process.

    ``key`` is the column that tells rows apart, and ``fixed`` are columns that no operator may say it writes.
    ``whole``: all rows come at once, so that those that look at all rows may be among them; they are built anew each
    time.
    """

    operators: Sequence[OperatorConfig]
    schema: pa.Schema
    field: str
    origin: str
    context: Context
    plugins: tuple[Path, ...]
    key: str
    fixed: tuple[str, ...] = ()
    whole: bool = False

    def build(self) -> list[Link]:
        """Build them. Raises ConfigError if one does not fit, or needs more than it sees."""
        load_plugins(self.plugins)
        links = build_chain(self.operators, self.schema, field=self.field, origin=self.origin, context=self.context)
        for link in links:
            if link.operator.scope == "all" and not self.whole:
                raise ConfigError(
                    "looks at all rows, and sees one group at a time here",
                    "use it in pipelines.tasks, in pipelines.batch, or with `rayrft data process` on the run",
                    field=link.field,
                    value=link.name,
                )
            for name in sorted(set(link.operator.writes) & {*self.fixed}):
                raise ConfigError(
                    "would change what was sampled", "leave this operator out", field=link.field, value=name
                )
        return links


class _RunApplier(Applier):
    """The operators, in the process that applies them in a run. What it left out comes without values."""

    def work(self, messages: list[bytes], key: str) -> tuple[list[int], bytes, bytes | None, list[Outcome]]:
        """Apply all operators to groups, at once; return what `Worked` has of them together, packed. ``key`` is the
        column that tells rows apart."""
        before = pa.concat_batches([unpacked(message) for message in messages])
        self._rows, outcomes = before, list[Outcome]()
        for number, link in enumerate(self._links):
            if link.operator.scope == "all":
                self.observe(number)
                self.settle(number)
            outcomes.append(self.apply(number))
            if not outcomes[-1].given:
                break
        kept, changed, made = _difference(before, self._rows, key)
        return kept, packed(changed), None if made is None else packed(made), outcomes

    def apply(self, number: int) -> Outcome:
        outcome = super().apply(number)
        return replace(outcome, left_out=[replace(each, values={}) for each in outcome.left_out])


def _apart(together: Worked, groups: list[pa.RecordBatch], key: str) -> list[Worked]:
    """Return what operators made of each of several groups, whose outcomes add up to those of all."""
    ends = np.cumsum([rows.num_rows for rows in groups])
    kept = np.array(together.kept, np.int64)
    of_row = np.searchsorted(ends, kept, side="right")
    whose = {name: number for number, rows in enumerate(groups) for name in rows.column("group_id").to_pylist()}
    row_of = {name: number for number, rows in enumerate(groups) for name in rows.column(key).to_pylist()}
    made = together.made
    of_made = np.array([whose.get(name, 0) for name in made.column("group_id").to_pylist()] if made is not None else [])
    found = []
    for number, rows in enumerate(groups):
        mine, new = np.flatnonzero(of_row == number), np.flatnonzero(of_made == number)
        outcomes = [_share(outcome, number, row_of) for outcome in together.outcomes]
        found.append(
            Worked(
                (kept[mine] - (ends[number] - rows.num_rows)).tolist(),
                together.changed.take(pa.array(mine)),
                made.take(pa.array(new)) if made is not None and len(new) else None,
                outcomes,
            )
        )
    return found


def _share(outcome: Outcome, number: int, row_of: Mapping[str, int]) -> Outcome:
    """Return what is left out of a group, and to the first one everything else that is only counted."""
    mine = [each for each in outcome.left_out if row_of.get(each.row, 0) == number]
    return replace(outcome, left_out=mine) if not number else Outcome(0, 0, 0, 0, 0.0, mine)


def _difference(
    before: pa.RecordBatch, after: pa.RecordBatch, key: str
) -> tuple[list[int], pa.RecordBatch, pa.RecordBatch | None]:
    """Return the places of the rows that are there after, the columns of them that are others, and new rows."""
    places = {name: place for place, name in enumerate(before.column(key).to_pylist())}
    found = [places.get(name) for name in after.column(key).to_pylist()]
    kept, made = [place for place in found if place is not None], None
    if len(kept) < len(found):
        own = pa.array([place is not None for place in found], pa.bool_())
        after, made = after.filter(own), after.filter(pc.invert(own))
    if kept != list(range(before.num_rows)):
        before = before.take(pa.array(kept, pa.int64()))
    changed = [name for name in before.schema.names if not same_values(before.column(name), after.column(name))]
    return kept, after.select(changed), made


@dataclass
class _Call:
    rows: pa.RecordBatch
    done: asyncio.Future[Worked]
    failed: bool = False
    """Whether it was made before: to find which operator failed, it is made one by one."""


class LocalOperators:
    """Operators in processes of this node. Groups that wait for one are worked on together, if operators tell them
    apart; where that fails, each alone, so that none harms another."""

    def __init__(self, chain: GroupChain, config: PipelinesConfig, answers: Answers | None = None) -> None:
        """``answers`` has what answers operators that ask."""
        self._answers, self._answering = answers, AsyncExitStack()
        self._answerer: Answerer | None = None
        self._links, self._workers, self._deadline_s = chain.build(), config.workers, config.deadline_s
        self._whole, self._key = chain.whole, chain.key
        grouped = [link.operator for link in self._links if link.operator.scope == "group"]
        self._alone = chain.whole or any(each.group_by != "group_id" for each in grouped)
        """Whether groups that wait are not worked on together: such operators would take them for one."""
        self._pool = ProcessPool(
            partial(_RunApplier, chain.build, 0, config.on_error == "leave_out"),
            processes=config.workers + chain.whole,
            plugins=chain.plugins,
            spares=int(chain.whole),
            answer_limit=ANSWER_BYTES,
            start_s=START_S,
            inherit=True,
        )
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._working: list[asyncio.Task[None]] = []
        self._usual_s: float | None = None
        """Of recent groups, each by its share of those that were worked on together."""
        self._error: ConfigError | None = None
        """Why no process can be started any more."""

    async def open(self) -> None:
        """Start the processes. Raises ConfigError if they cannot be started."""
        asks, scores = asked_by(self._links)
        if self._answers is not None and (asks or scores):
            self._answerer = await self._answering.enter_async_context(self._answers(asks, scores))
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._workers)]
        self._working = [asyncio.create_task(self._work(each)) for each in ready]
        await asyncio.gather(*ready)

    async def close(self) -> None:
        """End the processes."""
        for each in self._working:
            each.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        await self._pool.close()
        await self._answering.aclose()

    async def apply(self, rows: pa.RecordBatch, task: Task | None = None) -> Worked:
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
                        await self._make(worker, await self._take())
                        if self._whole:
                            break
            except CallFailed as error:
                starts += 1
                if starts == _STARTS:
                    return self._fail(error, ready)

    async def _take(self) -> list[_Call]:
        """Wait for a group, and return it with others that wait; one that was made before, alone."""
        most = min(_AT_ONCE, int(_SHARE * self._deadline_s / self._usual_s)) if self._usual_s else 1
        calls = list[_Call]()
        while not calls or not (calls[0].failed or self._alone or self._calls.empty() or len(calls) >= most):
            call = await self._calls.get()
            if call.done.done():  # nobody waits any more
                continue
            if calls and call.failed:
                self._calls.put_nowait(call)
                break
            calls.append(call)
        return calls

    async def _make(self, worker: Worker, calls: list[_Call]) -> None:
        try:
            if calls[0].failed:
                made = [await self._one_by_one(worker, calls[0].rows)]
            else:
                made = await self._at_once(worker, [call.rows for call in calls])
        except (CallFailed, ActorDied, EndpointFailed):  # of whichever operator, or of a model that it asks
            for call in calls:
                call.failed = True
                self._calls.put_nowait(call)
        except Exception as error:  # OperatorFailed, or whatever what answers raised: it is raised in the callers
            for call in calls:
                if not call.done.done():
                    call.done.set_exception(error)
        else:
            for call, worked in zip(calls, made, strict=True):
                if not call.done.done():
                    call.done.set_result(worked)

    async def _at_once(self, worker: Worker, groups: list[pa.RecordBatch]) -> list[Worked]:
        """Apply all operators to groups in one call. Raises CallFailed if any fails, and ActorDied or EndpointFailed if
        a model does that they ask."""
        call = partial(self._answerer.call, worker) if self._answerer is not None else worker.call
        messages, started = [packed(rows) for rows in groups], time.perf_counter()
        kept, changed, made, outcomes = await call("work", messages, self._key, deadline_s=self._deadline_s)
        took = (time.perf_counter() - started) / len(groups)
        self._usual_s = took if self._usual_s is None else 0.9 * self._usual_s + 0.1 * took
        together = Worked(kept, unpacked(changed), None if made is None else unpacked(made), outcomes)
        return [together] if len(groups) == 1 else _apart(together, groups, self._key)

    async def _one_by_one(self, worker: Worker, rows: pa.RecordBatch) -> Worked:
        """Apply operators, each in a call of its own. Raises OperatorFailed, which names the one that fails."""
        far, outcomes, after = Far(worker, self._links, self._deadline_s, self._answerer), list[Outcome](), rows

        def note(number: int, outcome: Outcome) -> None:
            outcomes.append(outcome)

        for numbers in segments(self._links):
            if self._links[numbers[0]].operator.scope == "all":
                await far.observe(numbers[0], after)
                await far.settle(numbers[0], 1)
            parts = [batch async for batch in far.apply(numbers, after, note)]
            if not parts:
                after = pa.RecordBatch.from_pylist([], schema=self._links[-1].gives)
                break
            [after] = parts
        return Worked(*_difference(rows, after, self._key), outcomes)

    def _fail(self, error: CallFailed, ready: asyncio.Future[None]) -> None:
        """Raise the error in all calls, now and later."""
        self._error = ConfigError(
            f"the operators cannot be started: {error}",
            "see the cause, and the operators' options",
            field=self._links[0].field,
        )
        waiting: list[asyncio.Future[None] | asyncio.Future[Worked]] = [ready]
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait().done)
        for each in waiting:
            if not each.done():
                each.set_exception(self._error)


@dataclass(frozen=True)
class Asked:
    """What operators in an actor may ask: the auxiliary ``models`` of the run, and its rewards."""

    models: Models | None
    auxiliary: Mapping[str, AuxiliaryConfig]
    reward: RewardModelsConfig


class OperatorActor:
    """The actor: operators, with their processes, on any node."""

    def __init__(self, chain: GroupChain, config: PipelinesConfig, asked: Asked) -> None:
        self._tasks: dict[str, Task] = {}
        """Of the groups that are worked on."""
        self._asked = Counter[str]()
        answers = partial(
            answering,
            engines=running(asked.models() if asked.models is not None else {}, asked.auxiliary),
            endpoints=config.endpoints,
            reward=asked.reward,
            plugins=chain.plugins,
            tasks=self._tasks.get,
            answer_s=config.answer_s,
        )
        self._operators = LocalOperators(chain, config, answers)

    async def start(self) -> None:
        """Start the processes. Raises ConfigError if they cannot be started."""
        await self._operators.open()

    async def apply(self, rows: pa.RecordBatch, task: Task) -> Worked:
        """Work on a group of answers to a task. Raises OperatorFailed."""
        self._tasks[task.id] = task
        self._asked[task.id] += 1
        try:
            return await self._operators.apply(rows)
        finally:
            self._asked[task.id] -= 1
            if not self._asked[task.id]:
                del self._asked[task.id], self._tasks[task.id]


class ActorOperators:
    """Operators in actors: each group is worked on by the one that has the fewest rows to do."""

    def __init__(self, create: Callable[[], Handle[OperatorActor]], count: int) -> None:
        self._actors = ActorPool(create, lambda actor: actor.call(OperatorActor.start), count)

    async def open(self) -> None:
        """Start the actors. Raises ConfigError if operators cannot be started."""
        await self._actors.open()

    async def apply(self, rows: pa.RecordBatch, task: Task) -> Worked:
        """Work on a group. Raises OperatorFailed, also if two actors died of it, or were not reached."""
        try:
            worked, _ = await self._actors.call(
                lambda actor: actor.call(OperatorActor.apply, rows, task), owed=rows.num_rows
            )
        except (ActorDied, ActorUnreachable) as error:
            problem = f"the actors that it was given to failed: {error.problem}"
            raise OperatorFailed(problem, error.remedy, field="pipelines.experiences") from error
        return worked
