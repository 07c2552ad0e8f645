"""The folder of a run: its creation, its config, and checks that it belongs to the run."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator
from itertools import chain, count, zip_longest
from pathlib import Path

from rayrft.buffer.log.storage import Storage
from rayrft.config import RunConfig, dump_config
from rayrft.config.load import plugin_copy
from rayrft.data.task_splits import COUNTS, TASKS_FILE, TaskSplits
from rayrft.errors import ConfigError, DataError
from rayrft.files import atomic_file


def open_folder(config: RunConfig, splits: TaskSplits | None = None) -> None:
    """Create the run folder with its config and tasks; an older run's folder of that name is renamed by its date.
    Raises ConfigError if the folder of that name is not a run's."""
    folder = config.folder
    with writing(folder):
        if folder.exists():
            names = {path.name for path in folder.iterdir()}
            if names and not names & {"config.yaml", TASKS_FILE}:
                problem, remedy = "a folder that is not a run's has this name", "choose another name or storage"
                raise ConfigError(problem, remedy, field="name", value=str(folder))
            ended = datetime.datetime.fromtimestamp(folder.stat().st_mtime)
            dated = folder.with_name(f"{folder.name}-{ended:%Y%m%d-%H%M%S}")
            same_second = (dated.with_name(f"{dated.name}-{number}") for number in count(2))
            folder.rename(next(name for name in chain([dated], same_second) if not name.exists()))
        (folder / "checkpoints").mkdir(parents=True)
        (folder / TASKS_FILE).write_text(json.dumps(splits.ids if splits is not None else {}))
    write_config(config)


def write_config(config: RunConfig) -> None:
    """Write ``config.yaml`` atomically, and copies of the plug-ins for `read_config` to find if they are moved."""
    kept = config.folder / "plugins"
    with writing(config.folder):
        with atomic_file(config.folder / "config.yaml") as draft:
            draft.write_text(dump_config(config))
        copies = {plugin_copy(kept, number, path): path.read_bytes() for number, path in enumerate(config.plugins)}
        for path in {*kept.glob("*")} - copies.keys():
            path.unlink()
        for path, source in copies.items():
            kept.mkdir(exist_ok=True)
            path.write_bytes(source)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise an OSError inside a ``with`` as a ConfigError."""
    try:
        yield
    except OSError as error:
        problem, remedy = f"cannot be written: {error.strerror}", "choose another storage, or fix its permissions"
        raise ConfigError(problem, remedy, field="storage", value=str(folder)) from None


def check_same_tasks(config: RunConfig, splits: TaskSplits) -> None:
    """Raise DataError at the first task that differs from the run's start: draws and statistics go by position."""
    file = config.folder / TASKS_FILE
    try:
        before = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", "start a new run", field="run", value=str(file)) from None
    now, questions = splits.ids, {task.id: task.question[:60] for task in splits.all}
    for counts in (before, now):  # which follow from the tasks, and earlier releases did not write
        counts.pop(COUNTS, None)
    for name in [*before, *now]:
        for number, (old, new) in enumerate(zip_longest(before.get(name, []), now.get(name, [])), start=1):
            if old != new:
                same = sorted(chain(*before.values())) == sorted(chain(*now.values()))
                change = "the same tasks are in another order than" if same else "the tasks differ from those"
                found = f"{name} task {number} was {old} and is {new} ({questions.get(new)!r})"
                remedy = "give the tasks that the run was started with, in their order, or start a new run"
                raise DataError(f"{change} at the run's start: {found}", remedy, field="tasks.sources")


def check_log(config: RunConfig) -> None:
    """Raise unless the Buffer's storage is writable and holds no other run's log."""
    storage = Storage(config.buffer_folder)
    if any(name.startswith(("journal", "snapshot")) for name in storage.files()):
        problem, remedy = "contains the log of an earlier run", "choose another name or storage, or move the log away"
        raise ConfigError(problem, remedy, field="buffer.storage", value=str(config.buffer_folder))
    storage.create()
    storage.write("writable", b"")
    storage.delete("writable")
