"""The operator that keeps what is evaluated on out of what is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section
from rayrft.data.tables import open_table
from rayrft.errors import ConfigError, DataError, nearest
from rayrft.pipelines import hashing
from rayrft.pipelines.operator import Applied, Context, Operator, Wants, register_operator

_SHORTEST = 8
"""Words below which an evaluation task's question counts only as a whole."""
_SHOWN = 80


class EvaluationFile(Section):
    """A file of evaluation tasks."""

    path: Path
    question: str = "question"
    answer: str | None = "answer"
    """The names of its columns."""


class DecontaminateOptions(Section):
    """Options of `Decontaminate`."""

    columns: tuple[str, ...] = Field(("question", "answer"), min_length=1)
    """Columns in which evaluation tasks are looked for, each by itself."""
    answer: str | None = "answer"
    """The column that is compared with the evaluation tasks' answers."""
    against: tuple[EvaluationFile, ...] = ()
    """Files of evaluation tasks, besides the evaluation sets of the run, or of ``--config``."""
    ngram: int = Field(13, ge=_SHORTEST)
    """So many words in a row that an evaluation task has, too, are a hit (Brown et al. 2020, appendix C)."""
    common: int = Field(10, ge=1)
    """n-grams of more different rows, or of more evaluation tasks, are no evidence: they belong to a template."""


@register_operator("decontaminate")
class Decontaminate(Operator[DecontaminateOptions]):
    """Leave out rows that show an evaluation task. A row is a hit if

    * one of its columns is the question of an evaluation task, word for word; or
    * it shares ``ngram`` words in a row with its question or answer, or all of a question of 8 words or more; or
    * it shares 8 words in a row with its question, and has the same answer.

    Words are those of `rayrft.pipelines.hashing`: case and punctuation do not count, and half of the words in a row
    must have a letter, for calculations such as 48 / 2 = 24 are everywhere.
    """

    kind = "clean"
    scope = "all"
    Options = DecontaminateOptions

    def __init__(self, options: DecontaminateOptions, context: Context) -> None:
        super().__init__(options, context)
        for number, file in enumerate(options.against):
            if not file.path.is_file():
                remedy = "give a JSONL or Parquet file"
                raise ConfigError("no such file", field=f"against.{number}.path", value=str(file.path), remedy=remedy)
        if not options.against and not context.evaluation:
            remedy = "name files in 'against', or a config with evaluation sets"
            raise ConfigError("there is no evaluation task to compare with", field="against", remedy=remedy)

    @property
    def reads(self) -> Mapping[str, Wants]:
        return dict.fromkeys(self.options.columns, "text")

    def prepare(self) -> None:
        tasks = [(task.question, task.answer, f"evaluation task {task.id}") for task in self.context.evaluation]
        for file in self.options.against:
            tasks += _read(file)
        self._shown = [f"{name} {question[:_SHOWN]!r}" for question, _, name in tasks]
        self._index = _Index(tasks, self.options.ngram, self.options.common)

    def observe(self, rows: pa.RecordBatch) -> None:
        for column in self.options.columns:
            self._index.count(*hashing.words(rows.column(column)))

    def settle(self) -> None:
        self._index.drop_common()

    def apply(self, rows: pa.RecordBatch) -> Applied:
        answers = np.zeros(rows.num_rows, np.uint64)
        if self.options.answer is not None and self.options.answer in rows.schema.names:
            answers = _answers(rows.column(self.options.answer))
        reasons: list[str | None] = [None] * rows.num_rows
        for column in self.options.columns:
            for row, why, task in self._index.hits(*hashing.words(rows.column(column)), answers):
                reasons[row] = reasons[row] or f"{why}: {self._shown[task]}"
        return Applied(rows, reasons)


def _answers(column: pa.Array) -> np.ndarray:
    """Hash the answers, of which only the part after a last #### counts."""
    texts = [str(text or "").rpartition("####")[2] for text in column.to_pylist()]
    return hashing.whole(*hashing.words(pa.array(texts, pa.string())))


class _Index:
    """n-grams of the evaluation tasks, in sorted arrays, and how many different rows have each."""

    def __init__(self, tasks: Sequence[tuple[str, str, str]], ngram: int, common: int) -> None:
        self._ngram, self._common = ngram, common
        questions = hashing.words(pa.array([task[0] for task in tasks], pa.string()))
        answers = hashing.words(pa.array([task[1] for task in tasks], pa.string()))
        self.answers = _answers(pa.array([task[1] for task in tasks], pa.string()))
        self._wholes, self._whole_tasks = _sorted(hashing.whole(*questions), np.arange(len(tasks)))
        sizes = np.diff(questions[1])
        self._grams: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for length in sorted({_SHORTEST, ngram, *np.clip(sizes, _SHORTEST, ngram).tolist()}):
            found, owners = _telling(*questions, length)
            if length == ngram:
                more, more_owners = _telling(*answers, length)
                found, owners = np.concatenate([found, more]), np.concatenate([owners, more_owners])
            elif length > _SHORTEST:
                short = sizes[owners] == length
                found, owners = found[short], owners[short]
            self._grams[length] = _sorted(*_rare(found, owners, common))
        self._short = sizes == _SHORTEST
        self._rows = {length: np.zeros(len(grams), np.int64) for length, (grams, _) in self._grams.items()}
        self._seen: set[int] = set()

    def count(self, hashes: np.ndarray, offsets: np.ndarray) -> None:
        """Count the n-grams of rows, those of rows with the same words once."""
        found = {length: self._places(hashes, offsets, length) for length in self._grams}
        texts = hashing.whole(hashes, offsets)
        fresh = {row: int(texts[row]) not in self._seen for _, rows in found.values() for row in set(rows.tolist())}
        distinct: set[int] = set()
        for row in sorted(fresh):
            fresh[row] = fresh[row] and int(texts[row]) not in distinct
            distinct.add(int(texts[row]))
        self._seen |= distinct
        for length, (places, rows) in found.items():
            new = np.array([fresh[row] for row in rows.tolist()], bool)
            pairs = np.unique(np.stack([places[new], rows[new]]), axis=1)
            np.add.at(self._rows[length], pairs[0], 1)

    def drop_common(self) -> None:
        """Forget n-grams that too many rows have."""
        for length, (grams, owners) in self._grams.items():
            keep = self._rows[length] <= self._common
            self._grams[length] = grams[keep], owners[keep]

    def hits(self, hashes: np.ndarray, offsets: np.ndarray, answers: np.ndarray) -> Iterator[tuple[int, str, int]]:
        """Iterate over hits: the row, why, and the evaluation task."""
        texts = hashing.whole(hashes, offsets)
        places = np.clip(np.searchsorted(self._wholes, texts), 0, max(len(self._wholes) - 1, 0))
        for row in np.flatnonzero((texts != 0) & (self._wholes[places] == texts)) if len(self._wholes) else ():
            yield int(row), "is an evaluation task", int(self._whole_tasks[places[row]])
        for length in sorted(self._grams, reverse=True):
            owners = self._grams[length][1]
            found, rows = self._places(hashes, offsets, length)
            for place, row in zip(found.tolist(), rows.tolist(), strict=True):
                task = int(owners[place])
                same = answers[row] != 0 and answers[row] == self.answers[task]
                if length > _SHORTEST or length == self._ngram or self._short[task]:
                    yield row, f"shares {length} words with an evaluation task", task
                elif same:
                    yield row, f"shares {length} words and the answer with an evaluation task", task

    def _places(self, hashes: np.ndarray, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of n-grams of rows in the sorted ones, and the rows."""
        grams = self._grams[length][0]
        found, rows = _telling(hashes, offsets, length)
        if not len(grams):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.clip(np.searchsorted(grams, found), 0, len(grams) - 1)
        there = grams[places] == found
        return places[there], rows[there]


def _telling(hashes: np.ndarray, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return n-grams of which half of the words have a letter, and the texts that they are of."""
    grams, bounds = hashing.ngrams(hashes, offsets, length)
    telling = 2 * hashing.letters(hashes, offsets, length) >= length
    return grams[telling], np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[telling]


def _rare(grams: np.ndarray, owners: np.ndarray, common: int) -> tuple[np.ndarray, np.ndarray]:
    """Return n-grams of at most ``common`` evaluation tasks, each once, with the first of them."""
    order = np.lexsort((owners, grams))
    grams, owners = grams[order], owners[order]
    fresh = np.ones(len(grams), bool)  # not the same n-gram of the same task again
    fresh[1:] = (grams[1:] != grams[:-1]) | (owners[1:] != owners[:-1])
    found, first, counts = np.unique(grams[fresh], return_index=True, return_counts=True)
    rare = counts <= common
    return found[rare], owners[fresh][first[rare]]


def _sorted(values: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(values, kind="stable")
    return values[order], owners[order]


def _read(file: EvaluationFile) -> list[tuple[str, str, str]]:
    table = open_table(file.path)
    for name in filter(None, (file.question, file.answer)):
        if name not in table.schema.names:
            remedy = nearest(name, table.schema.names)
            raise DataError("no such column in the evaluation file", field=str(file.path), value=name, remedy=remedy)
    tasks, number = [], 0
    for batch in table.batches(10_000):
        questions = batch.column(file.question).to_pylist()
        answers = batch.column(file.answer).to_pylist() if file.answer is not None else [""] * len(questions)
        for question, answer in zip(questions, answers, strict=True):
            number += 1
            tasks.append((str(question or ""), str(answer if answer is not None else ""), f"{file.path.name} {number}"))
    return tasks
