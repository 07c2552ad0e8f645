"""Demonstrations: named sets of rows, one file per set, drawn in whole epochs.

A set may grow: rows are appended to its file, and existing rows keep their numbers. A replacement is written to
another file, because earlier leases still need the old rows.
"""

from __future__ import annotations

import asyncio
import zlib
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayrft.buffer.events import Extent
from rayrft.buffer.expert_cursor import DemonstrationKind
from rayrft.buffer.log.row_log import RowRef
from rayrft.buffer.log.segments import read_log_rows, with_schema
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.state import State
from rayrft.buffer.validation import lengths_of
from rayrft.errors import DataError
from rayrft.runtime.handle import put_object


@dataclass(frozen=True)
class ExpertBlock:
    """Demonstrations in the object store, and their numbers of tokens by row. Those of a set that has grown since the
    lease are the same up to there."""

    ref: RowRef
    tokens: np.ndarray


class ExpertBlocks:
    """The demonstrations of a run, as listed in ``state``."""

    def __init__(self, storage: Storage, state: State) -> None:
        self._storage = storage
        self._state = state
        self._blocks: dict[str, ExpertBlock] = {}
        self._names: dict[str, tuple[list[str], set[str]]] = {}
        """The ids of rows, in order and as a set, by file."""

    async def write(self, name: str, batch: pa.RecordBatch) -> Extent:
        """Write demonstrations to a file of their own, which is named after their checksum."""
        data = with_schema(batch.serialize())
        extent = Extent(zlib.crc32(data)).grown(batch.num_rows, data)
        known = self._state.contents.experts.get(name)
        if known is not None and known.loaded == extent:  # its file has grown since
            return extent
        await asyncio.to_thread(self._storage.write, expert_file(name, extent), data)
        return extent

    async def append(self, name: str, extent: Extent | None, batch: pa.RecordBatch) -> Extent:
        """Append demonstrations to their file, or write one if there is none; return its new extent."""
        if extent is None:
            return await self.write(name, batch)
        file, data = expert_file(name, extent), batch.serialize()

        def append() -> None:
            self._storage.cut(file, extent.nbytes)  # what a crash has left of an append
            with closing(self._storage.open(file, extent.nbytes)) as grown:
                grown.append(data)
                grown.sync()

        await asyncio.to_thread(append)
        if file in self._names:
            ordered, known = self._names[file]
            ordered += (names := batch.column("experience_id").to_pylist())
            known.update(names)
        return extent.grown(batch.num_rows, data)

    async def get(self, name: str, extent: Extent, rows: int | None = None) -> ExpertBlock:
        """Return a set's demonstrations, at least the first ``rows`` (default: all), read from its file if need be."""
        file = expert_file(name, extent)
        if file not in self._blocks or len(self._blocks[file].tokens) < (extent.rows if rows is None else rows):
            batch = await asyncio.to_thread(read_log_rows, self._storage, file, extent)
            ref = await asyncio.to_thread(put_object, batch.serialize())
            self._blocks[file] = ExpertBlock(ref, lengths_of(batch.column("token_ids")))
        return self._blocks[file]

    async def names(self, name: str, extent: Extent) -> tuple[list[str], set[str]]:
        """Return the experience ids of the demonstrations, by row and as a set, read from their file once."""
        file = expert_file(name, extent)
        if file not in self._names or len(self._names[file][0]) < extent.rows:
            batch = await asyncio.to_thread(read_log_rows, self._storage, file, extent)
            names = batch.column("experience_id").to_pylist()
            self._names[file] = names, {*names}
        return self._names[file]

    async def whole(self, store: str) -> tuple[RowRef, np.ndarray]:
        """Return the block of the current demonstrations in ``expert/<name>``, and the indices of the rows that may be
        drawn. Raises DataError for an unknown store."""
        name = store.removeprefix("expert/")
        if store not in self._state.contents.stores:
            raise DataError("no such store", f"one of {self._state.contents.stores}", field="store", value=store)
        cursor = self._state.contents.experts[name]
        block = await self.get(name, cursor.extent)
        return block.ref, np.setdiff1d(np.arange(len(block.tokens)), cursor.excluded)

    async def sweep(self) -> None:
        """Delete replaced demonstrations that no lease needs any more."""
        leases = self._state.training.leases.values()
        needed = {expert_file(name, cursor.extent) for name, cursor in self._state.contents.experts.items()}
        needed |= {expert_file(lease.demonstrations, lease.extent) for lease in leases if lease.demonstrations}
        for file in (await asyncio.to_thread(self._storage.files)).keys() - needed:
            if file.startswith("expert-"):
                self._blocks.pop(file, None)
                self._names.pop(file, None)
                await asyncio.to_thread(self._storage.delete, file)


def in_units(names: list[str], unit: int, wanted: set[str]) -> np.ndarray:
    """Return whether a row is in a unit (``unit`` consecutive rows) with one of the wanted ids; shape ``[rows]``."""
    found = np.array([name in wanted for name in names], bool)
    return np.repeat(found.reshape(-1, unit).any(1), unit)


def demonstration_kind(batch: pa.RecordBatch) -> DemonstrationKind:
    """Return the kind of demonstrations. Every two rows of preference pairs are one pair, the chosen side first.

    Raises DataError if they are of several kinds.
    """
    names, chosen = batch.column("pair_id").to_pylist(), batch.column("chosen").to_pylist()
    if any(names):
        if names[::2] != names[1::2] or None in names or chosen != [True, False] * (len(names) // 2):
            problem = "only some rows form preference pairs: every two rows must be one pair, the chosen side first"
            raise DataError(problem, "keep pairs and other rows under different names", field="demonstrations")
        return 2, False
    labelled = [label is not None for label in chosen]
    if any(labelled) and not all(labelled):
        remedy = "keep labelled and other rows under different names"
        raise DataError("only some rows have a label, good or bad", remedy, field="demonstrations")
    return 1, any(labelled)


def check_kind(name: str, found: DemonstrationKind, wanted: DemonstrationKind) -> None:
    """Raise DataError unless demonstrations are what a stage needs. SFT takes neither pairs nor labelled answers, or it
    would imitate the rejected and the bad ones."""
    if found != wanted:
        is_, needed = _KINDS[found], _KINDS[wanted]
        problem = f"these are {is_[0]}, and the stage's algorithm needs {needed[0]}"
        raise DataError(problem, f"give {needed[1]}, or use {is_[2]}", field="demonstrations", value=name)


_KINDS = {
    (1, False): ("conversations to imitate", "rows without 'chosen', 'rejected' and 'label'", "sft"),
    (2, False): ("preference pairs", "rows with 'chosen' and 'rejected'", "a preference loss such as dpo"),
    (1, True): ("answers labelled good or bad", "rows with 'label'", "a loss of labelled answers such as kto"),
}
"""What demonstrations are called, what their rows have, and what trains on them."""


def expert_file(name: str, extent: Extent) -> str:
    """Return the name of a set's file. It has the checksum of what the set began with, which its extents keep."""
    return f"expert-{name}-{extent.segment:08x}.arrow"
