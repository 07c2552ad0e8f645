"""Operators on training batches: from the lease that the Buffer gave to the one that is trained.

The rows of all ranks go through the operators at once, in an order that does not depend on the ranks, and are dealt
again. So the same lease gives the same batch, also after a restart.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.buffer.leases import Lease, Unit, deal
from rayrft.buffer.validation import find_faults
from rayrft.config import RunConfig
from rayrft.config.pipelines import PipelinesConfig
from rayrft.errors import ConfigError, OperatorFailed
from rayrft.experience import SCHEMA, list_column, pack, unpack
from rayrft.pipelines.operator import Context, with_column
from rayrft.pipelines.operators.batches import BATCHES
from rayrft.pipelines.report import OperatorLog, OperatorStats
from rayrft.pipelines.run.groups import GroupChain, GroupResult, LocalOperators
from rayrft.runtime.ray_api import ray

_FIXED = ("experience_id", "group_id", "task_id", "source", "pair_id", "chosen", "place", "step", "trained")
"""Columns that no operator may change."""
_FAILURES_IN_A_ROW = 3
"""Consecutive batches on which operators may fail before the run is stopped."""


@dataclass(frozen=True)
class ProcessedLease:
    """The lease to train, and the work of operators. ``problem``: why the lease is unchanged, if they failed."""

    lease: Lease
    operators: dict[str, OperatorStats] = field(default_factory=dict)
    problem: str | None = None


def batch_chain(config: RunConfig, model: str | None) -> GroupChain:
    """Return a run's operators on batches, deterministic ones without model calls; ``model`` is a folder or id."""
    return GroupChain(
        config.pipelines.batch,
        BATCHES,
        "pipelines.batch",
        "a training batch",
        Context((), model),
        tuple(config.plugins),
        "place",
        _FIXED,
        whole=True,
    )


def check_batches(config: RunConfig, model: str | None) -> None:
    """Raise ConfigError if an operator cannot work on batches."""
    for link in batch_chain(config, model).build():
        if link.operator.kind == "synthesise":
            remedy = "make rows in pipelines.experiences, as demonstrations"
            raise ConfigError("makes rows, which a batch cannot take", remedy, field=link.field, value=link.name)


@dataclass(frozen=True)
class _Row:
    """A row of a batch. ``own``: it is a row of a group, which holds those of its rows that are not trained, too."""

    ref: Any
    row: int
    mini_batch: int
    own: bool
    trained: bool
    weight: float
    alone: bool


class BatchPipeline:
    """Sends the leases of a run through the ``operators`` on batches, which are to be opened before, one by one."""

    def __init__(self, config: PipelinesConfig, chain: GroupChain) -> None:
        self._stops = config.on_error == "stop"
        self.operators = LocalOperators(chain, config)
        self._log = OperatorLog(chain.build(), "pipelines.batch")
        self._failures = 0

    async def process(self, lease: Lease) -> ProcessedLease:
        """Return the lease with its rows as the operators change them.

        A batch on which they fail is trained unchanged, and the problem is returned. Raises OperatorFailed if
        ``on_error`` is ``stop``, or after too many of them in a row, and Ray's ObjectLostError if a block is gone.
        """
        refs = list({part.ref: None for share in lease.shares for part in share.parts})
        blocks = dict(zip(refs, [unpack(each) for each in await asyncio.gather(*refs)], strict=True))
        together = _rows(lease, blocks)
        given = _batch([row for rows in together for row in rows], blocks, lease.step)
        try:
            worked = await self.operators.apply(given)
            block, kept = self._settle(worked, given)
        except OperatorFailed as error:
            self._failures += 1
            self._log.fail(error, given.num_rows)
            if self._stops or self._failures == _FAILURES_IN_A_ROW:
                raise
            return ProcessedLease(lease, self._log.take(), str(error))
        self._failures = 0
        _, problem = self._log.add(worked.outcomes)
        units = _units(together, block, kept, ray.put(pack(block.select(SCHEMA.names).cast(SCHEMA))))
        shares = deal(units, len(lease.shares), lease.attention)
        usual = sum(unit.rows for unit in chain(*units) if unit.group[1])
        expert = sum(unit.rows for unit in chain(*units) if not unit.group[1])
        dealt = replace(lease, shares=shares, usual_rows=usual, expert_rows=expert)
        return ProcessedLease(dealt, self._log.take(), problem)

    def _settle(self, worked: GroupResult, given: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
        """Return all rows of the batch, the kept ones as operators have changed them, and whether each is trained.

        Raises OperatorFailed if the operators return an invalid batch, or no row to train.
        """
        places, stayed = np.array(worked.kept, np.int64), given.take(pa.array(worked.kept, pa.int64()))
        if worked.made is not None:
            raise self._log.wrong("operators returned a row that is not in the batch")
        self._log.check(worked.kept, worked.changed.schema.names, _FIXED)
        after = stayed
        for name in worked.changed.schema.names:
            after = with_column(after, name, worked.changed.column(name))
        for whole, cut in zip(*(list_column(of.column("token_ids")) for of in (stayed, after)), strict=True):
            assert whole is not None and cut is not None  # not nullable in the schema
            if not np.array_equal(whole[: len(cut)], cut):
                raise self._log.wrong("operators may only truncate token_ids")
        weights = after.column("weight").to_numpy(zero_copy_only=False)
        if not np.isfinite(weights).all() or (weights < 0).any():
            raise self._log.wrong("operators gave a row a weight that is negative or not finite")
        masks = list_column(after.column("action_mask"))
        acts = np.array([mask is not None and mask.any() for mask in masks], bool)
        trained = np.zeros(given.num_rows, bool)
        trained[places] = after.column("trained").to_numpy(zero_copy_only=False) & acts
        pairs = given.column("pair_id").to_pylist()
        for place in range(len(pairs) - 1):
            if pairs[place] is not None and pairs[place] == pairs[place + 1]:
                trained[place : place + 2] = trained[place : place + 2].all()
        if not trained.any():
            raise self._log.wrong("operators left no row of the batch to train")
        used = np.flatnonzero(trained[places])
        if faults := find_faults(after.take(pa.array(used)).select(SCHEMA.names)):
            raise self._log.wrong(f"operators made a row invalid: {next(iter(faults.values()))}")
        order = np.arange(given.num_rows)
        order[places[used]] = given.num_rows + used
        both = pa.concat_batches([given, after.select(BATCHES.names).cast(BATCHES)])
        return both.take(pa.array(order)), trained


def _rows(lease: Lease, blocks: dict[Any, pa.RecordBatch]) -> list[list[_Row]]:
    """Return the rows of the batch, in an order of mini-batches and ids: groups of usual rows first, with those of
    their rows that are not trained, and then demonstrations and pairs."""
    groups = dict[tuple[int, str], dict[int, _Row]]()
    experts = list[tuple[int, str, list[_Row]]]()
    for share in lease.shares:
        ends, done = np.cumsum(share.rows), 0
        for part in share.parts:
            block = blocks[part.ref]
            names, ids, pairs = (block.column(name) for name in ("group_id", "experience_id", "pair_id"))
            for i, row in enumerate(part.rows.tolist()):
                mini_batch = int(np.searchsorted(ends, done, side="right"))
                done += 1
                first, count = part.groups[i].tolist()
                made = _Row(part.ref, row, mini_batch, count > 0, True, float(part.weights[i]), bool(part.alone[i]))
                if count:
                    others = replace(made, trained=False, weight=1.0)
                    whole = {place: replace(others, row=place) for place in range(first, first + count)}
                    groups.setdefault((mini_batch, names[row].as_py()), whole)[row] = made
                elif i and experts and len(experts[-1][2]) == 1 and _paired(experts[-1][2][0].row, row, pairs):
                    experts[-1][2].append(made)
                else:
                    experts.append((mini_batch, ids[row].as_py(), [made]))
    own = [list(group.values()) for _, group in sorted(groups.items())]
    return own + [unit for *_, unit in sorted(experts, key=lambda each: each[:2])]


def _paired(one: int, other: int, pairs: pa.Array) -> bool:
    """Return whether two rows of a block are the sides of a pair."""
    return one + 1 == other and pairs[one].is_valid and pairs[one] == pairs[other]


def _batch(rows: list[_Row], blocks: dict[Any, pa.RecordBatch], step: int) -> pa.RecordBatch:
    """Return the rows as operators see them."""
    here: dict[Any, list[int]] = {ref: [] for ref in blocks}
    for place, row in enumerate(rows):
        here[row.ref].append(place)
    parts = [blocks[ref].take(pa.array([rows[at].row for at in of], pa.int64())) for ref, of in here.items()]
    places = [place for of in here.values() for place in of]
    taken = pa.concat_batches(parts).take(pa.array(np.argsort(places)))
    more = {
        "place": np.arange(len(rows)),
        "step": np.full(len(rows), step),
        "trained": [row.trained for row in rows],
        "weight": np.array([row.weight for row in rows], np.float32),
    }
    columns = [*taken.columns, *(pa.array(more[name], BATCHES.field(name).type) for name in more)]
    return pa.RecordBatch.from_arrays(columns, schema=BATCHES)


def _units(together: list[list[_Row]], block: pa.RecordBatch, trained: np.ndarray, ref: Any) -> list[list[Unit]]:
    """Return the units to deal to ranks, by mini-batch; no mini-batch is empty."""
    lengths = block.column("token_ids").value_lengths().to_numpy(zero_copy_only=False)
    weights = block.column("weight").to_numpy(zero_copy_only=False)
    units: dict[int, list[Unit]] = {}
    first = 0
    for rows in together:
        group, size = ((first, len(rows)), 1) if rows[0].own else ((0, 0), len(rows))
        for place in range(first, first + len(rows), size):
            if trained[place]:
                row = rows[place - first]
                tokens = int(lengths[place : place + size].sum())
                unit = Unit(ref, place, size, tokens, float(weights[place]), row.alone, group)
                units.setdefault(row.mini_batch, []).append(unit)
        first += len(rows)
    return [units[number] for number in sorted(units)]
