"""Operators on groups and batches of a run: in processes of this node, or in actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.pipelines import OperatorConfig, PipelinesConfig
from rayrft.config.reward import RewardModelsConfig
from rayrft.errors import ActorDied, ActorUnreachable, CallFailed, ConfigError, EndpointFailed, OperatorFailed
from rayrft.experience import Task
from rayrft.pipelines.chain import ChainLink, Outcome, build_chain, differences
from rayrft.pipelines.operator import Context
from rayrft.pipelines.run import host
from rayrft.pipelines.run.host import START_S, OperatorHost, OperatorProcess, asked_by, operator_pool, packed, unpacked
from rayrft.pipelines.run.models import ModelServer, OpenModels, open_models, running_engines
from rayrft.registry import load_plugins
from rayrft.rewards.scorer import Models
from rayrft.runtime.actor_pool import ActorPool
from rayrft.runtime.handle import Handle, Watched, once
from rayrft.runtime.processes.calls import CallQueue, QueuedCall
from rayrft.runtime.processes.worker import Worker

_MOST_GROUPS = 32
"""Groups of a batch: many groups end together, and a call takes a millisecond."""


@dataclass(frozen=True)
class GroupResult:
    """The result of operators on rows: the places of ``kept`` rows, the columns of these that have ``changed``, the
    rows ``made``, and what each operator did up to the last one that had rows."""

    kept: list[int]
    changed: pa.RecordBatch
    made: pa.RecordBatch | None
    outcomes: list[Outcome]


@dataclass(frozen=True)
class GroupChain:
    """Operators for groups of rows of a schema, in their order, to be built in any process.

    ``key`` is the column that identifies rows, and no operator may declare that it writes ``fixed`` columns.
    ``whole``: all rows come at once, so that operators may look at all rows; they are built again for each batch.
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

    def build(self) -> list[ChainLink]:
        """Build them. Raises ConfigError if one does not fit, or needs more than it sees."""
        load_plugins(self.plugins)
        links = build_chain(self.operators, self.schema, field=self.field, origin=self.origin, context=self.context)
        for link in links:
            if link.operator.scope == "all" and not self.whole:
                problem = "looks at all rows, and sees one group at a time here"
                remedy = "use it in pipelines.tasks, in pipelines.batch, or with `rayrft data process` on the run"
                raise ConfigError(problem, remedy, field=link.field, value=link.name)
            for name in sorted(set(link.operator.writes) & {*self.fixed}):
                problem = "would change what was sampled"
                raise ConfigError(problem, "leave this operator out", field=link.field, value=name)
        return links


class GroupHost(OperatorHost):
    """The operators of a run, in their process. Rows that are left out are returned without values."""

    def __init__(self, chain: GroupChain, leave_out: bool) -> None:
        super().__init__(chain.build, 0, leave_out)
        self._key, self._whole = chain.key, chain.whole

    def max_batch(self) -> int:
        """Return how many groups may be processed together: one if an operator would mix them."""
        grouped = [link.operator for link in self._links if link.operator.scope == "group"]
        mixes = self._whole or any(each.group_by != "group_id" for each in grouped)
        return 1 if mixes else _MOST_GROUPS

    def process(self, messages: list[bytes]) -> tuple[list[int], bytes, bytes | None, list[Outcome]]:
        """Apply all operators to groups together; return the fields of their `GroupResult`, packed."""
        before = pa.concat_batches([unpacked(message) for message in messages])
        self._rows, outcomes = before, list[Outcome]()
        for number, link in enumerate(self._links):
            if link.operator.scope == "all":
                link.operator.observe(self._rows)
                link.operator.settle()
            outcomes.append(self.apply(number))
            if not outcomes[-1].given:
                break
        kept, changed, made = group_difference(before, self._rows, self._key)
        return kept, packed(changed), None if made is None else packed(made), outcomes

    def apply(self, number: int, message: bytes | None = None) -> Outcome:
        outcome = super().apply(number, message)
        return replace(outcome, left_out=[replace(each, values={}) for each in outcome.left_out])


def _split_by_group(together: GroupResult, groups: list[pa.RecordBatch], key: str) -> list[GroupResult]:
    """Return the results by group; their outcomes add up to those of all."""
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
        outcomes = []
        for each in together.outcomes:  # all counts are the first group's
            left_out = [gone for gone in each.left_out if row_of.get(gone.row, 0) == number]
            outcomes.append(replace(each, left_out=left_out) if not number else Outcome(0, 0, 0, 0, 0.0, left_out))
        places = kept[mine] - (ends[number] - rows.num_rows)
        changed = together.changed.take(pa.array(mine))
        added = made.take(pa.array(new)) if made is not None and len(new) else None
        found.append(GroupResult(places.tolist(), changed, added, outcomes))
    return found


def group_difference(
    before: pa.RecordBatch, after: pa.RecordBatch, key: str
) -> tuple[list[int], pa.RecordBatch, pa.RecordBatch | None]:
    """Return the places of the rows that remain, their changed columns, and new rows."""
    places = {name: place for place, name in enumerate(before.column(key).to_pylist())}
    found = [places.get(name) for name in after.column(key).to_pylist()]
    kept, made = [place for place in found if place is not None], None
    if len(kept) < len(found):
        own = pa.array([place is not None for place in found], pa.bool_())
        after, made = after.filter(own), after.filter(pc.invert(own))
    if kept != list(range(before.num_rows)):
        before = before.take(pa.array(kept, pa.int64()))
    changed = [name for name in before.schema.names if differences(before.column(name), after.column(name))]
    return kept, after.select(changed), made


class LocalOperators:
    """Operators in processes of this node. Groups that wait for a process are processed together if the operators tell
    them apart; if that fails, each alone, so that no group harms another."""

    def __init__(self, chain: GroupChain, config: PipelinesConfig, models: OpenModels | None = None) -> None:
        """``models`` opens the models that operators ask."""
        self._open_models, self._opened = models, AsyncExitStack()
        self._models: ModelServer | None = None
        self._links, self._key, self._deadline_s = chain.build(), chain.key, config.deadline_s
        create, why = partial(GroupHost, chain, config.on_error == "leave_out"), "the operators cannot be started"
        remedy = "see the cause, and the operators' options"
        self._calls = CallQueue[pa.RecordBatch, GroupResult](
            operator_pool(create, chain.plugins, processes=config.workers + chain.whole, spares=int(chain.whole)),
            self._make,
            workers=config.workers,
            spare=0,
            deadline_s=config.deadline_s,
            start_s=START_S,
            failure=lambda error: ConfigError(f"{why}: {error}", remedy, field=self._links[0].field),
            again=(CallFailed, ActorDied, EndpointFailed),
            fresh=chain.whole,
        )

    async def open(self) -> None:
        """Start the processes. Raises ConfigError if they cannot be started."""
        asks, scores = asked_by(self._links)
        if self._open_models is not None and (asks or scores):
            self._models = await self._opened.enter_async_context(self._open_models(asks, scores))
        await self._calls.open()

    async def close(self) -> None:
        """End the processes."""
        await self._calls.close()
        await self._opened.aclose()

    async def apply(self, rows: pa.RecordBatch, task: Task | None = None) -> GroupResult:
        """Process a group. Raises OperatorFailed if an operator raises, dies, is late, or returns what does not fit."""
        return await self._calls.put(rows).done

    async def _make(
        self, worker: Worker, calls: Sequence[QueuedCall[pa.RecordBatch, GroupResult]]
    ) -> list[GroupResult]:
        """Process groups in one call; a group that failed before, operator by operator."""
        if calls[0].tries > 1:
            return [await self._one_by_one(worker, calls[0].argument)]
        groups = [each.argument for each in calls]
        messages, serve = [packed(rows) for rows in groups], self._models.serve if self._models is not None else None
        found = await worker.call("process", messages, deadline_s=self._deadline_s, serve=serve)
        kept, changed, made, outcomes = found
        together = GroupResult(kept, unpacked(changed), None if made is None else unpacked(made), outcomes)
        return [together] if len(groups) == 1 else _split_by_group(together, groups, self._key)

    async def _one_by_one(self, worker: Worker, rows: pa.RecordBatch) -> GroupResult:
        """Apply each operator in another call. Raises OperatorFailed, which names the one that fails."""
        process = OperatorProcess(worker, [link.field for link in self._links], self._deadline_s, self._models)
        outcomes, message = list[tuple[int, Outcome]](), packed(rows)
        for numbers in host.segments(self._links):
            if self._links[numbers[0]].operator.scope == "all":
                await process.observe(numbers[0], message)
                await process.finish(numbers[0], 1)
            left = await process.apply(numbers, message, outcomes.append)
            message = packed(pa.RecordBatch.from_pylist([], self._links[-1].gives)) if left is None else left
            if left is None:
                break
        return GroupResult(*group_difference(rows, unpacked(message), self._key), [each for _, each in outcomes])


class OperatorActor(LocalOperators, Watched):
    """The actor: operators with their processes, on any node. They may ask the ``auxiliary`` models that ``models``
    opens, and have answers scored by ``reward``."""

    def __init__(
        self,
        chain: GroupChain,
        config: PipelinesConfig,
        models: Models | None,
        auxiliary: Mapping[str, AuxiliaryConfig],
        reward: RewardModelsConfig,
    ) -> None:
        self._tasks = list[Task]()
        """Of the groups in flight."""
        opens = partial(
            open_models,
            engines=running_engines(models() if models is not None else {}, auxiliary),
            endpoints=config.endpoints,
            reward=reward,
            plugins=chain.plugins,
            tasks=lambda task_id: next((task for task in self._tasks if task.id == task_id), None),
            answer_s=config.answer_s,
        )
        super().__init__(chain, config, opens)

    @once
    async def open(self) -> None:
        await super().open()

    async def apply(self, rows: pa.RecordBatch, task: Task) -> GroupResult:  # type: ignore[override]  # it is known
        await self.open()  # the call may have been sent to a predecessor that has died
        self._tasks.append(task)
        try:
            return await super().apply(rows, task)
        finally:
            self._tasks.remove(task)


class ActorOperators(ActorPool[OperatorActor]):
    """Operators in actors that Ray restarts: a group goes to the actor with the fewest rows in flight."""

    def __init__(self, actors: Sequence[Handle[OperatorActor]]) -> None:
        create, count = iter(actors).__next__, len(actors)
        super().__init__(create, lambda actor: actor.call(OperatorActor.open), count, "operators", restarted=True)

    async def apply(self, rows: pa.RecordBatch, task: Task) -> GroupResult:
        """Process a group. Raises OperatorFailed, also if every actor that was tried failed."""
        try:
            result, _ = await self.call(lambda actor: actor.call(OperatorActor.apply, rows, task), load=rows.num_rows)
        except (ActorDied, ActorUnreachable) as error:
            problem = f"its actors failed: {error.problem}"
            raise OperatorFailed(problem, error.remedy, field="pipelines.experiences") from error
        return result


Operators = LocalOperators | ActorOperators
"""Operators on groups, in this process or in actors."""
