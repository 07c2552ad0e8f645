"""Rows that become tasks, from where people have them: files, data sets of the Hugging Face hub, Ray Data."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.config.base import resolved
from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.formats import Row, open_rows
from rayrft.data.tables import quiet_ray_data
from rayrft.errors import DataError, nearest

if TYPE_CHECKING:
    import datasets

_BATCH_ROWS = 1000


@dataclass(frozen=True)
class TaskRows:
    """Numbered rows, which are read as they are asked for.

    ``name`` is part of the tasks' ids, errors name ``origin`` and the key ``field``, images are relative to ``base``.
    """

    name: str
    origin: str
    field: str
    base: Path
    rows: Generator[tuple[int, Row], None, None]


def file_rows(config: TaskSourceConfig, field: str, key: str = "path") -> TaskRows:
    """Return the rows of the file, folder of files or saved data set whose path the config has at ``key``."""
    path, place = getattr(config, key), f"{field}.{key}"
    return TaskRows(path.name, str(path), place, path, open_rows(path, place).rows())


def split_rows(config: TaskSourceConfig, field: str, key: str = "split") -> TaskRows:
    """Return the rows of a split of a data set, whose name the config has at ``key``.

    Raises DataError if the data set cannot be loaded, which says why, or has no such split.
    """
    name, split = str(config.dataset), str(getattr(config, key))
    splits = _load(config, field)
    if split not in splits:
        raise DataError(f"{name} has no such split", nearest(split, splits), field=f"{field}.{key}", value=split)
    return TaskRows(name, f"split {split!r} of {name}", f"{field}.{key}", Path(name), _rows_of(splits[split]))


def ray_rows(config: TaskSourceConfig, field: str) -> TaskRows:
    """Return the rows of a Ray Dataset, which the function ``read`` makes of ``options``, in its order.

    Raises DataError if there is no such function, it raises, or it gives no Dataset.
    """
    name = str(config.read)
    return TaskRows(name, name, f"{field}.read", Path("rows"), _rows_by_ray(name, config, field))


def _rows_of(split: datasets.Dataset) -> Generator[tuple[int, Row], None, None]:
    # As Arrow, so that features such as images and audio are not decoded.
    tables = split.with_format("arrow").iter(_BATCH_ROWS)
    yield from enumerate((row for table in tables for row in table.to_pylist()), start=1)


def _load(config: TaskSourceConfig, field: str) -> dict[str, datasets.Dataset]:
    """Load all splits by name: of a folder that ``save_to_disk`` wrote, or of a data set of the hub or a copy of one,
    from the cache if they are in it."""
    import datasets

    name = str(config.dataset)
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file():
            return dict(datasets.DatasetDict.load_from_disk(name))
        if (folder / "state.json").is_file():
            return {config.split: datasets.Dataset.load_from_disk(name)}
        return dict(datasets.load_dataset(name, config.config, revision=config.revision))
    except (ValueError, RuntimeError, OSError, datasets.exceptions.DatasetsError) as error:
        raise _unloadable(error, config, field) from None


_COPY = "give a folder with a copy, or files of its rows (source: file)"
_REMEDIES = {
    "gated": "ask for access on its page, and give the token of your account in HF_TOKEN, or by: hf auth login",
    "doesn't exist on the Hub": f"check its id; if it is private, give a token in HF_TOKEN; or {_COPY}",
    "scripts are no longer supported": f"name a revision without the script (refs/convert/parquet), or {_COPY}",
}
"""What helps, by words of the error: `datasets` has no other mark of the causes."""


def _unloadable(error: Exception, config: TaskSourceConfig, field: str) -> DataError:
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
        message, remedy = cause, "give its id on the Hugging Face hub, or a folder with a copy; check its files"
    return DataError(f"the data set cannot be loaded: {message}", remedy, field=f"{field}.{key}", value=value)


def _rows_by_ray(name: str, config: TaskSourceConfig, field: str) -> Generator[tuple[int, Row], None, None]:
    import ray.data
    from ray.exceptions import RayError

    read = _read_function(name, f"{field}.read")
    # Statistics and cursors of a resumed run refer to tasks by number: the order is kept.
    with quiet_ray_data():
        try:
            data = read(**resolved(config.options))
            if not isinstance(data, ray.data.Dataset):
                problem = f"gives a {type(data).__name__}, and no Dataset of Ray"
                raise DataError(problem, "return what ray.data.read_… gives", field=f"{field}.read", value=name)
            yield from enumerate(data.iter_rows(), start=1)
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
    if not module:
        if attribute not in known:
            raise DataError("ray.data has no such function", nearest(attribute, known), field=field, value=name)
        return getattr(ray.data, attribute)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        remedy = "give package.module:function that can be imported, or a function of ray.data"
        raise DataError(f"cannot be imported: {error}", remedy, field=field, value=name) from None
