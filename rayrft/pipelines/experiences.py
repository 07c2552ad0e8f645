"""Operators on a group of usual rows between its reward and the Buffer: from raw to verified rows.

A group at a time goes through the operators, in processes that keep them, on the Explorer's node or in actors on any.
Rows that stay are verified, those left out are counted by operator and reason, made ones become demonstrations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from rayrft.config import RunConfig
from rayrft.config.pipelines import PipelinesConfig
from rayrft.errors import ConfigError, OperatorFailed
from rayrft.experience import SCHEMA, Experience, Task, field_values, to_batch
from rayrft.pipelines.chain import ChainLink
from rayrft.pipelines.operator import Context
from rayrft.pipelines.report import OperatorLog, OperatorStats
from rayrft.pipelines.rows import last_answer
from rayrft.pipelines.run.groups import GroupChain, GroupResult, Operators

_TEXTS = ("response", "question", "answer", "domain")
EXPERIENCES = pa.schema([*SCHEMA, *(pa.field(name, pa.string()) for name in _TEXTS), ("difficulty", pa.float64())])
"""The columns that operators on experiences see: `experience.SCHEMA`, the last answer, and fields of the task."""

VERIFIED = "verified"
"""Status of rows that went through operators."""
_SAMPLED = ("experience_id", "group_id", "task_id", "token_ids", "logprobs", "weight_versions", "source")
"""Columns that say what was sampled, which no operator may change."""
_WRITABLE = {*SCHEMA.names} - {*_SAMPLED}


@dataclass(frozen=True)
class VerifiedGroup:
    """Result of verifying a group of rows."""

    rows: list[Experience]
    """Those that stay, in their order."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows that were sampled, by ``operator: reason``."""
    made: pa.RecordBatch | None = None
    """Demonstrations."""
    problem: str | None = None
    """The last error of an operator."""


def check_experiences(config: RunConfig, model: str | None) -> None:
    """Raise ConfigError if an operator on experiences does not fit or makes rows without `pipelines.made`, or if none
    writes the priority that groups are drawn by. ``model`` is the folder or id of the run's model."""
    links, made = experience_chain(config, model).build(), config.pipelines.made
    makers = [link for link in links if link.operator.kind == "synthesise"]
    if makers and made is None:
        remedy = "name the demonstrations that they become, which a stage may train on: pipelines.made: found"
        raise ConfigError("makes rows, and pipelines.made is missing", remedy, field=makers[0].field)
    if made is not None and not makers:
        remedy = "add one, such as expert_rows, or leave 'made' out"
        raise ConfigError("no operator makes rows", remedy, field="pipelines.made", value=made)
    actors, devices = config.pipelines.actors, {getattr(link.operator.options, "device", "cpu") for link in links}
    if actors is not None and actors.gpus and devices <= {"cpu"}:
        remedy = "set option device of an operator that has it to cuda, or remove it"
        raise ConfigError("are not used by any operator", remedy, field="pipelines.actors.gpus", value=actors.gpus)
    drawn_by = config.buffer.sampler.score if config.buffer.needs_scores else None
    given = config.mode not in ("both", "explore") or any("priority" in link.operator.writes for link in links)
    if drawn_by == "priority" and not given:
        problem = "no operator on experiences writes a priority"
        remedy = "add a function of your own, of kind 'prioritise', to pipelines.experiences, or use another score"
        raise ConfigError(problem, remedy, field="buffer.sampler.score", value=drawn_by)


def experience_chain(config: RunConfig, model: str | None) -> GroupChain:
    """Return a run's operators on experiences, which may ask its auxiliary models, endpoints and rewards."""
    operators, plugins, place = config.pipelines.experiences, tuple(config.plugins), "pipelines.experiences"
    models = [*config.auxiliary, *config.pipelines.endpoints]
    context = Context((), model, models, scores=True, template=config.model.template)
    return GroupChain(operators, EXPERIENCES, place, "experiences", context, plugins, "experience_id", _SAMPLED)


class ExperiencePipeline:
    """Sends the groups of an Explorer through the operators, wherever they are, and counts by operator."""

    def __init__(self, config: PipelinesConfig, links: Sequence[ChainLink], operators: Operators) -> None:
        self.operators, self._stops = operators, config.on_error == "stop"
        self._log = OperatorLog(links, "pipelines.experiences")

    async def process(self, task: Task, rows: list[Experience]) -> VerifiedGroup:
        """Verify the rows of a group.

        A group on which an operator fails is left out as a whole, unless it looks at single rows: then those are left
        out on which it raises. Raises OperatorFailed if ``on_error`` is ``stop``.
        """
        try:
            worked = await self.operators.apply(experience_batch(task, rows), task)
            kept, made = self._split(worked, rows)
        except OperatorFailed as error:
            if self._stops:
                raise
            reason = self._log.fail(error, len(rows), len(rows))
            return VerifiedGroup([], Counter({reason: len(rows)}), problem=str(error))
        left_out, problem = self._log.add(worked.outcomes, {row.experience_id for row in rows})
        return VerifiedGroup(kept, left_out, made, problem)

    def take_stats(self) -> dict[str, OperatorStats]:
        """Return the counts since the last call by operator."""
        return self._log.take()

    def _split(self, worked: GroupResult, rows: list[Experience]) -> tuple[list[Experience], pa.RecordBatch | None]:
        """Return the sampled rows and the made ones. Raises OperatorFailed for other rows, and for changed samples."""
        self._log.check(worked.kept, worked.changed.schema.names, _SAMPLED)
        if worked.kept != sorted(worked.kept):
            raise self._log.wrong("rows that were sampled are in another order")
        names = [name for name in worked.changed.schema.names if name in _WRITABLE]
        columns = {**field_values(worked.changed.select(names)), "status": [VERIFIED] * len(worked.kept)}
        changes = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        kept = [rows[place].with_fields(**each) for place, each in zip(worked.kept, changes, strict=True)]
        if worked.made is None:
            return kept, None
        if pc.any(pc.equal(worked.made.column("source"), "usual")).as_py():
            raise self._log.wrong("a made row has the source 'usual', as if it had been sampled; give it 'expert'")
        return kept, worked.made.select(SCHEMA.names).cast(SCHEMA)


def experience_batch(task: Task, rows: list[Experience]) -> pa.RecordBatch:
    """Return rows with the columns of `EXPERIENCES`."""
    batch = to_batch(rows)
    more = {
        "response": [last_answer(row.turns) for row in rows],
        **{name: [getattr(task, name)] * len(rows) for name in ("question", "answer", "domain", "difficulty")},
    }
    added = [pa.array(more[column.name], column.type) for column in EXPERIENCES if column.name in more]
    return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=EXPERIENCES)
