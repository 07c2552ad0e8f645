"""The operator that keeps what is evaluated on out of what is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section
from rayrft.data.formats import as_text, broken_rows
from rayrft.data.tables import open_table
from rayrft.errors import ConfigError, DataError, nearest
from rayrft.pipelines.operator import Applied, Context, Operator, TextColumns, register_operator, values_of
from rayrft.pipelines.operators import hashing
from rayrft.pipelines.rows import texts

_SHORTEST = 8
"""Words in a row that are a hit if the answer is the same."""
_SHOWN = 80


class EvaluationFile(Section):
    """A file of evaluation tasks."""

    path: Path
    question: str = "question"
    answer: str | None = "answer"
    """The names of its columns."""


class DecontaminateOptions(Section):
    columns: TextColumns = Field(("question", "answer"), min_length=1)
    """Columns in which evaluation tasks are looked for, each by itself; the first is the question."""
    answer: str | None = "answer"
    """The column that is compared with the evaluation tasks' answers."""
    against: tuple[EvaluationFile, ...] = ()
    """Files of evaluation tasks, besides the evaluation sets of the run, or of ``--config``."""
    ngram: int = Field(13, ge=_SHORTEST)
    """So many words in a row that an evaluation task has, too, are a hit (Brown et al. 2020, appendix C)."""
    common: int = Field(10, ge=1)
    """n-grams of more different rows, or of more evaluation tasks, are not evidence: they belong to a template. In a
    small set, so are those of more than a tenth of its rows, if these are more than two."""


@register_operator("decontaminate")
class Decontaminate(Operator[DecontaminateOptions]):
    """Leave out rows that show an evaluation task. A row is a hit if

    * its first column is the question of an evaluation task, but for white space; with the same answer, also but for
      case and signs at the ends; or
    * it shares ``ngram`` words in a row with its question or answer; or
    * it shares 8 words in a row with its question, and has the same answer, of two characters or more.

    Words are those of `hashing`: case and punctuation do not count, and half of the words in a row must have a letter,
    for calculations such as 48 / 2 = 24 are everywhere.
    """

    kind = "clean"
    scope = "all"

    def __init__(self, options: DecontaminateOptions, context: Context) -> None:
        super().__init__(options, context)
        self._rows = 0
        for number, file in enumerate(options.against):
            if not file.path.is_file():
                remedy = "give a JSONL or Parquet file"
                raise ConfigError("no such file", remedy, field=f"against.{number}.path", value=str(file.path))
        if not options.against and not context.evaluation:
            remedy = "name files in 'against', or a config with evaluation sets"
            raise ConfigError("there is no evaluation task to compare with", remedy, field="against")

    def check(self, schema: pa.Schema) -> None:
        name = self.options.answer
        if "answer" in self.options.model_fields_set and name is not None and name not in schema.names:
            raise ConfigError("no such column", nearest(name, schema.names), field="answer", value=name)

    def prepare(self) -> None:
        tasks = [(task.question, task.answer, f"evaluation task {task.id}") for task in self.context.evaluation]
        for file in self.options.against:
            tasks += _read(file)
        self._shown = [f"{name} {question[:_SHOWN]!r}" for question, _, name in tasks]
        self._index = _Index(tasks, self.options.ngram, self.options.common)
        self._wholes: dict[object, int] = {}
        for task, (question, answer, _) in enumerate(tasks):
            self._wholes |= dict.fromkeys(_forms(question, _answer(answer)), task)

    def observe(self, rows: pa.RecordBatch) -> None:
        self._rows += rows.num_rows
        for column in self.options.columns:
            self._index.count(*hashing.words(rows.column(column)))

    def settle(self) -> None:
        self._index.drop_common(self._rows)

    def apply(self, rows: pa.RecordBatch) -> Applied:
        answers = [""] * rows.num_rows
        if self.options.answer is not None and self.options.answer in rows.schema.names:
            answers = [_answer(value) for value in values_of(rows, self.options.answer)]
        reasons: list[str | None] = []
        for text, answer in zip(texts(rows, self.options.columns[0]), answers, strict=True):
            whole = next((self._wholes[form] for form in _forms(text, answer) if form in self._wholes), None)
            reasons.append(None if whole is None else f"is an evaluation task: {self._shown[whole]}")
        for column in self.options.columns:
            for row, why, task in self._index.hits(*hashing.words(rows.column(column)), answers):
                reasons[row] = reasons[row] or f"{why}: {self._shown[task]}"
        return Applied(rows, reasons)


def _answer(text: object) -> str:
    """Return an answer in plain form: the part after a last ####."""
    return ("" if text is None else str(text)).rpartition("####")[2].replace(",", "").strip(" .\n")


def _forms(question: str, answer: str) -> Iterator[object]:
    """Iterate over the forms in which a question is that of an evaluation task."""
    plain = " ".join(question.split())
    if plain:
        yield plain
        yield plain.casefold().strip(" .?!"), answer


class _Index:
    """n-grams of the evaluation tasks, in sorted arrays, and how many different rows have each."""

    def __init__(self, tasks: Sequence[tuple[str, str, str]], ngram: int, common: int) -> None:
        self._ngram, self._common = ngram, common
        questions = hashing.words(pa.array([task[0] for task in tasks], pa.string()))
        answers = hashing.words(pa.array([task[1] for task in tasks], pa.string()))
        self._answers = [_answer(task[1]) for task in tasks]
        self._grams: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """n-grams, and of each where in ``_owners`` the tasks that have it begin and end."""
        self._owners: dict[int, np.ndarray] = {}
        for length in sorted({_SHORTEST, ngram}):
            found, owners = _informative_ngrams(*questions, length)
            if length == ngram:
                more, more_owners = _informative_ngrams(*answers, length)
                found, owners = np.concatenate([found, more]), np.concatenate([owners, more_owners])
            self._grams[length], self._owners[length] = _rare(found, owners, common)
        self._rows = {length: np.zeros(len(grams), np.int64) for length, (grams, _, _) in self._grams.items()}
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

    def drop_common(self, rows: int) -> None:
        """Forget n-grams that too many of so many rows have."""
        most = min(self._common, max(2, rows // 10))
        for length, (grams, starts, ends) in self._grams.items():
            keep = self._rows[length] <= most
            self._grams[length] = grams[keep], starts[keep], ends[keep]

    def hits(self, hashes: np.ndarray, offsets: np.ndarray, answers: Sequence[str]) -> Iterator[tuple[int, str, int]]:
        """Iterate over hits: the row, why, and the evaluation task."""
        for length in sorted(self._grams, reverse=True):
            _, starts, ends = self._grams[length]
            found, rows = self._places(hashes, offsets, length)
            for place, row in zip(found.tolist(), rows.tolist(), strict=True):
                tasks = self._owners[length][starts[place] : ends[place]].tolist()
                if length == self._ngram:
                    yield row, f"shares {length} words with an evaluation task", tasks[0]
                    continue
                same = [task for task in tasks if len(answers[row]) > 1 and answers[row] == self._answers[task]]
                if same:
                    yield row, f"shares {length} words and the answer with an evaluation task", same[0]

    def _places(self, hashes: np.ndarray, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of n-grams of rows in the sorted ones, and the rows."""
        grams = self._grams[length][0]
        found, rows = _informative_ngrams(hashes, offsets, length)
        if not len(grams):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.clip(np.searchsorted(grams, found), 0, len(grams) - 1)
        there = grams[places] == found
        return places[there], rows[there]


def _informative_ngrams(hashes: np.ndarray, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return n-grams of which half of the words have a letter, and the texts that they are of. Where most of these are
    ideographs, n-grams are twice as long, for two of them are about a word."""
    found = []
    for size, ideographic in ((length, False), (2 * length, True)):
        grams, bounds = hashing.ngrams(hashes, offsets, size)
        letters = hashing.count_words(hashes, offsets, size, hashing.LETTER)
        ideographs = hashing.count_words(hashes, offsets, size, hashing.IDEOGRAPH)
        informative = (2 * letters >= size) & ((2 * ideographs >= letters) == ideographic)
        found.append((grams[informative], np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[informative]))
    return np.concatenate([grams for grams, _ in found]), np.concatenate([texts for _, texts in found])


def _rare(
    grams: np.ndarray, owners: np.ndarray, common: int
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Return n-grams of at most ``common`` evaluation tasks, each once, with the start and end of these among the
    owners, which are returned, too."""
    order = np.lexsort((owners, grams))
    grams, owners = grams[order], owners[order]
    fresh = np.ones(len(grams), bool)  # not the same n-gram of the same task again
    fresh[1:] = (grams[1:] != grams[:-1]) | (owners[1:] != owners[:-1])
    found, first, counts = np.unique(grams[fresh], return_index=True, return_counts=True)
    rare = counts <= common
    return (found[rare], first[rare], (first + counts)[rare]), owners[fresh]


def _read(file: EvaluationFile) -> list[tuple[str, str, str]]:
    table = open_table(file.path)
    if table.broken:
        total = len(table.broken) + (table.rows or 0)
        raise broken_rows(table.broken, total, "correct or remove them", field="against", value=str(file.path))
    for name in filter(None, (file.question, file.answer)):
        if name not in table.schema.names:
            remedy = nearest(name, table.schema.names)
            raise DataError("no such column in the evaluation file", remedy, field=str(file.path), value=name)
    tasks, number = [], 0
    for batch in table.batches(10_000):
        questions = values_of(batch, file.question)
        answers = values_of(batch, file.answer) if file.answer is not None else [""] * len(questions)
        for question, answer in zip(questions, answers, strict=True):
            number += 1
            try:
                shown = "" if question is None else as_text(question, file.question)
                truth = "" if answer is None else as_text(answer, str(file.answer))
            except DataError as error:
                problem = f"row {number}: {error.problem}"
                raise DataError(problem, error.remedy, field=str(file.path)) from None
            tasks.append((shown, truth, f"{file.path.name} {number}"))
    return tasks
