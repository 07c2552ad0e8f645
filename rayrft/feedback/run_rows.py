"""The run whose answers are judged: rows from its log, and its Buffer while it is running."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.dataset import load_dataset
from rayrft.buffer.reader import Archive
from rayrft.config import FolderConfig
from rayrft.data.demonstrations import expert_row
from rayrft.data.task_sources import read_held_out, read_source
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError, RunNotFound
from rayrft.experience import Experience, field_values
from rayrft.feedback.items import SHOWN, ShownAnswer, ShownGroup
from rayrft.feedback.judgements import Judgement
from rayrft.runtime.handle import Handle, answer, find_actor


class RunRows:
    """The rows of a run in a folder, of which at most ``most`` groups are shown. ``buffer`` is the name of its Buffer's
    actor; None where no cluster can be reached. The methods block, and are called in threads."""

    def __init__(self, folder: Path, config: FolderConfig, buffer: str | None, most: int, demonstrations: str) -> None:
        self._folder, self._config, self._buffer = folder, config, buffer
        self._most, self._name = most, demonstrations
        self._lock = threading.Lock()
        self._archive: Archive | None = None
        self._tokenizer: ChatTokenizer | None = None

    def running(self) -> bool:
        """Return whether the run has a Buffer that takes feedback."""
        with contextlib.suppress(RunNotFound):
            return bool(self._running_buffer())
        return False

    def groups(self) -> list[ShownGroup]:
        """Return the groups to judge, as they are now: those that wait for training, then the latest, without rows that
        do not end with the model. Raises StorageError."""
        archive = Archive.of_run(self._folder)
        with self._lock:
            self._archive = archive
        rows = read_shown(archive, self._most)
        shown = (row for row in rows if row[2].turns and row[2].turns[-1].get("role") == "assistant")
        groups = groupby(shown, key=lambda row: row[:2])
        return [ShownGroup(group, task, tuple(answer for *_, answer in rows)) for (group, task), rows in groups]

    def find(self, experience_id: str) -> ShownAnswer:
        """Return a row. Raises DataError if there is none."""
        found = self._read().find(experience_id)
        return ShownAnswer.of(vars(found.experience), found.group_status == "ready")

    def references(self) -> dict[str, str]:
        """Return the reference answers by task id. Raises a RayrftError if they cannot be read."""
        found: dict[str, str] = {}
        for number, source in enumerate(self._config.tasks.sources if self._config.tasks else []):
            field = f"tasks.sources.{number}"
            found |= {task.id: task.answer for task in read_source(source, field)}
            if source.has_held_out:
                found |= {task.id: task.answer for task in read_held_out(source, field)}
        return found | {task.id: task.answer for task in self._read().added_tasks}

    def feedback(self, experience_id: str, reward: float | None, labels: dict[str, str]) -> None:
        """Change a row before it is trained. Raises RunNotFound or ActorDied if the run's Buffer is not there, and the
        errors of `Buffer.feedback`."""
        answer(self._running_buffer().call(Buffer.feedback, experience_id, reward, labels), "buffer")

    def demonstrate(self, judgement: Judgement) -> str:
        """Give the run an edited answer to imitate, once; return the demonstration's experience id. Raises DataError if
        the Buffer refuses it, and RunNotFound or ActorDied if the Buffer is not there."""
        assert judgement.edit is not None  # known to the caller
        row = self._read().find(judgement.rows[0]).experience
        with self._lock:
            if self._tokenizer is None:
                model = self._config.model
                path = self._folder / "model" if model.tiny is not None else str(model.path)
                self._tokenizer = ChatTokenizer(path, template=model.template)
        made = edited_row(row, judgement, self._name, self._tokenizer.response(judgement.edit))
        load_dataset(self._running_buffer(), [made], self._name, extend=True)
        return made.experience_id

    def withdraw(self, demonstration: str) -> None:
        """Stop the run from drawing a demonstration. Raises RunNotFound or ActorDied if its Buffer is not there."""
        name, _, _ = demonstration.partition("/")
        answer(self._running_buffer().call(Buffer.withdraw, name, [demonstration]), "buffer")

    def _read(self) -> Archive:
        with self._lock:
            if self._archive is None:
                self._archive = Archive.of_run(self._folder)
            return self._archive

    def _running_buffer(self) -> Handle[Buffer]:
        ended = (self._folder / "summary.json").exists()  # an ending run kills its actors one by one
        found = None if self._buffer is None or ended else find_actor(self._buffer)
        if found is None:
            raise RunNotFound("the run is not running, so it has no Buffer", field="run", value=str(self._folder))
        return found


def edited_row(row: Experience, judgement: Judgement, name: str, response: list[int]) -> Experience:
    """Return the demonstration of an edited answer, ``response`` in tokens, to what led to its row's last one."""
    produced = np.flatnonzero(row.action_mask)
    if not len(produced):
        raise DataError("the row has no answer", field="experience_id", value=row.experience_id)
    breaks = np.flatnonzero(np.diff(produced) > 1)
    start = int(produced[breaks[-1] + 1] if len(breaks) else produced[0])
    ids = [*row.token_ids[:start].tolist(), *response]
    mask = [0] * start + [1] * len(response)
    turns = [*row.turns[:-1], {"role": "assistant", "content": judgement.edit or ""}]
    made = f"{name}/{judgement.id}"
    return expert_row(made, made, ids, mask, turns, task_id=row.task_id, images=row.images)


def read_shown(archive: Archive, newest: int | None = None) -> Iterator[tuple[str, str, ShownAnswer]]:
    """Iterate over the usual rows of a log: group id, task id, and answer; for ``newest`` see `Archive.rows`."""
    columns = ["group_id", "task_id", "group_status", *SHOWN]
    for batch in archive.rows("usual", columns=columns, skip_damaged=True, newest=newest):
        for values in zip(*field_values(batch).values(), strict=True):
            row = dict(zip(batch.schema.names, values, strict=True))
            yield row["group_id"], row["task_id"], ShownAnswer.of(row, row["group_status"] == "ready")
