"""Rows of a live Buffer as Ray Datasets, and Ray Datasets as demonstrations, without passing through the driver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.export import conform, expert_message
from rayrft.buffer.log.row_log import RowRef
from rayrft.data.selection import Selection
from rayrft.data.tables import ordered_blocks
from rayrft.errors import DataError
from rayrft.experience import SCHEMA, Experience, from_batch, to_batch, unpack
from rayrft.runtime.handle import Handle, answer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_Parts = list[tuple[RowRef, np.ndarray]]


def dataset(
    buffer: Handle[Buffer], store: str = "usual", *, columns: Sequence[str] | None = None, where: str | None = None
) -> ray.data.Dataset:
    """Return the current rows of a store as a lazy Ray Dataset with columns of ``experience.SCHEMA``.

    ``store`` is ``usual`` (usual rows that wait for training or are being trained) or ``expert/<name>``; ``columns``
    are those to read, all by default; ``where`` is a condition in SQL: see `Selection`. Later changes of the store do
    not change the dataset, which keeps its blocks in the object store as long as it and the Buffer exist. Reading
    reserves no CPU of the cluster; other operations of Ray Data wait until ``num_cpus`` are free beside the run.

    Raises DataError for an unknown store or column, and for an invalid condition.
    """
    selection = Selection(SCHEMA, columns, where)
    source = _BlockSource(answer(buffer.call(Buffer.partition, store), "buffer"), selection)
    return ray.data.read_datasource(source, num_cpus=0, override_num_blocks=len(source))


def load_dataset(
    buffer: Handle[Buffer], rows: ray.data.Dataset | pa.Table | list[Experience], name: str, *, extend: bool = False
) -> int:
    """Replace the demonstrations ``name`` by these rows, or ``extend`` them by new ones; return how many were stored.

    A Ray Dataset or a table has the columns of ``experience.SCHEMA``, such as those of :func:`dataset` and of
    ``rayrft.data.demonstrations.from_dataset``. Usual rows become expert rows, so that a run's answers can be imitated.
    Raises DataError if there are no rows, a column is missing, or a row is invalid.
    """
    if not _NAME.fullmatch(name):
        remedy = "use letters, digits, '_', '-' and '.', starting with a letter or a digit"
        raise DataError("not a valid name of demonstrations", remedy, field="name", value=name)
    if isinstance(rows, ray.data.Dataset):
        gather = ray.remote(num_cpus=0)(lambda blocks: _message(map(ray.get, blocks), name))
        message = gather.remote(ordered_blocks(rows))
    else:
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([to_batch(rows)])
        message = ray.put(_message([table], name))
    return answer(buffer.call(Buffer.extend if extend else Buffer.load, name, [message]), "buffer")


def newest(buffer: Handle[Buffer], count: int) -> list[Experience]:
    """Return the ``count`` held usual rows that finished last, the latest first."""
    parts = answer(buffer.call(Buffer.partition, "usual"), "buffer")
    return answer(ray.remote(num_cpus=0)(_newest).remote(parts, count), "buffer")


class _BlockSource(Datasource):
    """Reads packed blocks of the object store, one task per block. A task's reference keeps its block there."""

    def __init__(self, parts: _Parts, selection: Selection) -> None:
        super().__init__()
        self._reads: list[_Parts] = [[part] for part in parts] or [[]]  # an empty dataset needs a task for its schema
        self._selection = selection

    def __len__(self) -> int:
        return len(self._reads)

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        del parallelism, data_context  # always one task per block
        tasks = []
        for parts in self._reads:
            count = None if self._selection.filters else sum(len(rows) for _, rows in parts)
            metadata = BlockMetadata(num_rows=count, size_bytes=None, input_files=None, exec_stats=None)
            read = partial(_read, parts, self._selection)
            tasks.append(ReadTask(read, metadata, self._selection.schema, per_task_row_limit))
        return tasks


def _read(parts: _Parts, selection: Selection) -> Iterable[pa.Table]:
    batches = [selection.apply(unpack(ray.get(ref)), rows) for ref, rows in parts]
    return [pa.Table.from_batches(batches, selection.schema)]


def _message(tables: Iterable[pa.Table], name: str) -> pa.Buffer:
    """Pack tables into one message of demonstrations."""
    field = f"demonstrations.{name}"
    conformed = [conform(table, field) for table in tables if len(table)]
    if not conformed:
        raise DataError("there are no rows", "give a dataset that is not empty", field=field)
    return expert_message(pa.concat_tables(conformed))


def _newest(parts: _Parts, count: int) -> list[Experience]:
    """Find the newest rows; runs in a task. Reads only the times of the others."""
    places, times = list[tuple[pa.RecordBatch, int]](), [np.zeros(0)]
    for ref, rows in parts:
        batch = unpack(ray.get(ref))
        places += [(batch, row) for row in rows.tolist()]
        times.append(batch.column("finished_at").fill_null(0.0).to_numpy()[rows])
    order = np.argsort(np.concatenate(times), kind="stable")[::-1][:count].tolist()
    return [row for batch, at in map(places.__getitem__, order) for row in from_batch(batch.slice(at, 1))]
