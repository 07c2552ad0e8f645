"""Rows from where people have them: files, data sets of the Hugging Face hub, Ray Data."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrft.config.base import resolved
from rayrft.config.rows import RowsConfig
from rayrft.data.formats import ParsedRow, open_rows, rows_of
from rayrft.data.tables import RowSource, open_table, quiet_ray_data, with_json_texts
from rayrft.errors import DataError, nearest

_BATCH_ROWS = 1000


@dataclass(frozen=True)
class NumberedRows:
    """Numbered rows, which are read as they are asked for.

    ``name`` is part of tasks' ids, errors name ``origin`` and the key ``field``, images are relative to ``base``.
    """

    name: str
    origin: str
    field: str
    base: Path
    rows: Generator[tuple[int, ParsedRow], None, None]


def open_source(config: RowsConfig, field: str) -> NumberedRows:
    """Return the rows that a config names. Raises DataError, also while they are read, if they cannot be."""
    read = split_rows if config.dataset is not None else ray_rows if config.read is not None else file_rows
    return read(config, field)


def file_rows(config: RowsConfig, field: str, key: str = "path") -> NumberedRows:
    """Return the rows of the file, folder of files or saved data set whose path the config has at ``key``."""
    path, place = getattr(config, key), f"{field}.{key}"
    return NumberedRows(path.name, str(path), place, path, open_rows(path, place).rows())


def split_rows(config: RowsConfig, field: str, key: str = "split") -> NumberedRows:
    """Return the rows of a split of a data set, whose name the config has at ``key``.

    Raises DataError if the data set cannot be loaded, which says why, or has no such split.
    """
    name, split = str(config.dataset), _split(config, field, key)
    origin = f"split {getattr(config, key)!r} of {name}"
    return NumberedRows(name, origin, f"{field}.{key}", Path(name), _numbered(_split_tables(split, config, field)))


def ray_rows(config: RowsConfig, field: str) -> NumberedRows:
    """Return the rows of a Ray Dataset, which the function ``read`` makes of ``options``, in its order.

    Raises DataError if there is no such function, it raises, or it gives no Dataset.
    """
    name = str(config.read)
    return NumberedRows(name, name, f"{field}.read", Path("rows"), _numbered(_ray_tables(config, field)))


def open_source_table(config: RowsConfig, field: str) -> RowSource:
    """Open the rows that a config names as a table. Raises DataError if they cannot be read."""
    if config.path is not None:
        return open_table(config.path, f"{field}.path")
    if config.read is not None:
        first = next(_ray_tables(config, field, 1), None)
        name, count, read = config.read, None, partial(_ray_tables, config, field)
    else:
        split = _split(config, field, "split")
        first = next(_split_tables(split, config, field, 1), None)
        name, count = str(config.dataset), None if config.streaming else len(split)
        read = partial(_split_tables, split, config, field)
    if first is None:
        raise DataError("it holds no rows", "give one with rows", field=field, value=name)

    def batches(most: int) -> Iterator[pa.RecordBatch]:
        for table in read(most):
            yield from table.combine_chunks().to_batches()

    return with_json_texts(RowSource(name, first.schema, batches, count))


def _numbered(tables: Generator[pa.Table, None, None]) -> Generator[tuple[int, ParsedRow], None, None]:
    with closing(tables):
        yield from enumerate((row for table in tables for row in rows_of(table)), start=1)


def _split(config: RowsConfig, field: str, key: str) -> Any:
    """Return a split as a data set of ``datasets``."""
    splits, split = _load(config, field), getattr(config, key)
    if split not in splits:
        name = config.dataset
        raise DataError(f"{name} has no such split", nearest(split, splits), field=f"{field}.{key}", value=split)
    return splits[split]


def _split_tables(
    split: Any, config: RowsConfig, field: str, most: int = _BATCH_ROWS
) -> Generator[pa.Table, None, None]:
    with _loading(config, field):  # as Arrow, so that features such as images and audio are not decoded
        yield from split.with_format("arrow").iter(most)


def _load(config: RowsConfig, field: str) -> dict[str, Any]:
    """Load all splits by name: of a folder that ``save_to_disk`` wrote, or of a data set of the hub or a copy of one,
    from the cache if they are in it."""
    import datasets

    name = str(config.dataset)
    folder = Path(name)
    with _loading(config, field):
        if (folder / "dataset_dict.json").is_file():
            return dict(datasets.DatasetDict.load_from_disk(name))
        if (folder / "state.json").is_file():
            return {config.split: datasets.Dataset.load_from_disk(name)}
        return dict(datasets.load_dataset(name, config.config, revision=config.revision, streaming=config.streaming))


@contextmanager
def _loading(config: RowsConfig, field: str) -> Iterator[None]:
    import datasets

    try:
        yield
    except (ValueError, RuntimeError, OSError, datasets.exceptions.DatasetsError) as error:
        raise _unloadable(error, config, field) from None


_COPY = "give a folder with a copy, or files of its rows by path:"
_REMEDIES = {
    "gated": "ask for access on its page, and give the token of your account in HF_TOKEN, or by: hf auth login",
    "doesn't exist on the Hub": f"check its id; if it is private, give a token in HF_TOKEN; or {_COPY}",
    "scripts are no longer supported": f"name a revision without the script (refs/convert/parquet), or {_COPY}",
}
"""What helps, by words of the error: `datasets` has no other mark of the causes."""
_OTHER = "give its id on the hub, a token in HF_TOKEN if it is private, or a folder with a copy; check its files"


def _unloadable(error: Exception, config: RowsConfig, field: str) -> DataError:
    """Return the error of a data set that cannot be loaded, with a remedy for its cause."""
    message, cause = (" ".join(str(each).split()) for each in (error, error.__cause__ or error))
    if isinstance(error, ValueError) and "config" in message.lower():  # several and none named, or an unknown one
        problem = f"{config.dataset}: {message}"
        return DataError(problem, "name one of them", field=f"{field}.config", value=config.config)
    key, value = "dataset", config.dataset
    remedy = next((each for words, each in _REMEDIES.items() if words in message), None)
    if message.startswith("Revision"):
        key, value, message, remedy = "revision", config.revision, cause, "name a branch, a tag or a commit of it"
    elif isinstance(error, ConnectionError) and "gated" not in message:
        remedy = f"connect to the network (HF_HUB_OFFLINE unset), load it once into the cache (HF_HOME), or {_COPY}"
    elif remedy is None:
        message, remedy = cause, _OTHER
    return DataError(f"the data set cannot be loaded: {message}", remedy, field=f"{field}.{key}", value=value)


def _ray_tables(config: RowsConfig, field: str, most: int = _BATCH_ROWS) -> Generator[pa.Table, None, None]:
    import ray.data
    from ray.exceptions import RayError

    name = str(config.read)
    read = _read_function(name, f"{field}.read")
    # Statistics and cursors of a resumed run refer to tasks by number: the order is kept.
    with quiet_ray_data():
        try:
            data = read(**resolved(config.options))
            if not isinstance(data, ray.data.Dataset):
                problem = f"gives a {type(data).__name__}, and no Dataset of Ray"
                raise DataError(problem, "return what ray.data.read_… gives", field=f"{field}.read", value=name)
            yield from data.iter_batches(batch_size=most, batch_format="pyarrow")
        except TypeError as error:
            raise DataError(f"{name} refuses the options: {error}", field=f"{field}.options") from None
        except (RayError, ValueError, OSError) as error:
            cause, remedy = getattr(error, "cause", None) or error, "check the arguments and what they name"
            problem = f"the rows cannot be read: {(str(cause).strip() or repr(cause)).splitlines()[-1]}"
            raise DataError(problem, remedy, field=f"{field}.options", value=name) from None


def _read_function(name: str, field: str) -> Any:
    """Return a function by its name in ``ray.data``, or in a module."""
    import ray.data

    module, _, attribute = name.rpartition(":")
    known = [each for each in dir(ray.data) if each.startswith(("read_", "from_")) or each == "range"]
    if not module and attribute not in known:
        raise DataError("ray.data has no such function", nearest(attribute, known), field=field, value=name)
    try:
        return getattr(importlib.import_module(module or "ray.data"), attribute)
    except (ImportError, AttributeError) as error:
        remedy = "give package.module:function that can be imported, or a function of ray.data"
        raise DataError(f"cannot be imported: {error}", remedy, field=field, value=name) from None
