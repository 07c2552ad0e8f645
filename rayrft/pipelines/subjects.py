"""Operators that ask models and rewards, and the tasks of their rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rayrft.config.base import Section
from rayrft.data.formats import as_text, finite, is_json
from rayrft.errors import ConfigError, nearest
from rayrft.experience import Task, json_digest
from rayrft.pipelines.operator import Applied, O, Operator, is_text
from rayrft.pipelines.rows import id_column, last_answer
from rayrft.pipelines.run.models import RemoteModels
from rayrft.rewards import RewardResult, Transcript

_models = RemoteModels(None)


async def scored(task: Task, responses: Sequence[str]) -> list[RewardResult]:
    """Return the rewards of answers to a task."""
    return await _models.score(task, [Transcript.of(task, response) for response in responses])


def request_seed(row: str, seed: int, *place: object) -> int:
    """Return the seed of a request of an operator with this seed about a row."""
    return int(json_digest([row, str(seed), *map(str, place)])[:8], 16) >> 1


@dataclass(frozen=True)
class Subject:
    """A row as a task, with the answer that it holds and its reward."""

    row: str
    task: Task
    response: str | None = None
    reward: float | None = None


class SubjectOptions(Section):
    """Where rows have their tasks. Experiences have them in the run."""

    question: str = "question"
    answer: str = "answer"
    """The right answer, as rewards take it."""
    domain: str = "domain"
    """The optional column with the domain, which selects the reward that checks answers."""


def check_subjects(options: SubjectOptions, schema: pa.Schema, columns: Collection[str] = ()) -> None:
    """Raise ConfigError unless rows are experiences or tasks; ``columns`` are further options naming texts."""
    if is_experience(schema):
        return
    for option in ("question", "answer", *(["domain"] if options.domain in schema.names else []), *columns):
        name = getattr(options, option)
        column = schema.field(name) if name in schema.names else None
        if column is None or is_json(column) or not is_text(column.type):
            problem = f"there is no such column of texts, only {', '.join(schema.names)}"
            raise ConfigError(problem, nearest(name, schema.names), field=option, value=name)


def is_experience(schema: pa.Schema) -> bool:
    return id_column(schema) == "experience_id"


async def subjects(rows: pa.RecordBatch, options: SubjectOptions, response: str | None = None) -> list[Subject | None]:
    """Return the tasks of rows; None for an experience whose task is not known, and for a row without a question or an
    answer. ``response`` is the column with what was answered; of experiences, that is what was said last."""
    names = rows.column(id_column(rows.schema)).to_pylist()
    given = rows.to_pylist(maps_as_pydicts="lossy")
    if is_experience(rows.schema):
        known = _models.tasks(list({row["task_id"] for row in given}))
        return [_experienced(name, known.get(row["task_id"]), row) for name, row in zip(names, given, strict=True)]
    return [_subject(name, row, options, response) for name, row in zip(names, given, strict=True)]


def _experienced(name: str, task: Task | None, row: dict[str, Any]) -> Subject | None:
    return None if task is None else Subject(name, task, last_answer(row["turns"]), row["reward"])


def _subject(name: str, row: dict[str, Any], options: SubjectOptions, response: str | None) -> Subject | None:
    question, answer = row[options.question], row[options.answer]
    if not question or answer is None:
        return None
    metadata = {key: value for key, value in row.items() if value is not None}
    given = metadata.pop("metadata", None)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = {"metadata": given}
    metadata |= given if isinstance(given, dict) else {}
    domain = as_text(metadata.get(options.domain) or "own", options.domain)
    task = Task(name, question, answer, domain, system=row.get("system"), metadata=metadata)
    return Subject(name, task, row[response] if response else None, finite(row.get("reward")))


class AskingOperator(Operator[O]):
    """An operator that asks, for all rows of a batch at once: a subclass implements `work` instead of `apply`.

    The result of a request depends on the row's id and the options alone, as far as the model's answers do.
    """

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return asyncio.run(self.work(rows))

    async def work(self, rows: pa.RecordBatch) -> Applied:
        """Work on a batch, as `apply` does."""
        raise NotImplementedError
