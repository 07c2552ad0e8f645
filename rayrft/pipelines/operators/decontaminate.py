"""The operator that keeps what is evaluated on out of what is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section
from rayrft.data.formats import answer_text, broken_rows
from rayrft.data.tables import open_table
from rayrft.errors import ConfigError, DataError, nearest
from rayrft.pipelines.operator import Applied, Context, Operator, TextColumns, register_operator, values_of
from rayrft.pipelines.operators import hashing
from rayrft.pipelines.rows import texts

_SHORTEST = 8
"""Words in a row that are a hit if the answer is the same."""
_SHOWN = 80
_Words = tuple[hashing.U64, hashing.I64]


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
        self._answers = [_answer(answer) for _, answer, _ in tasks]
        texts = [hashing.words(pa.array([task[at] for task in tasks], pa.string())) for at in (0, 1)]
        lengths = sorted({_SHORTEST, self.options.ngram}, reverse=True)
        self._indices = [_Index(texts[: 1 + (each == lengths[0])], each, self.options.common) for each in lengths]
        self._seen = set[int]()
        self._wholes = dict[object, int]()
        for task, (question, _, _) in enumerate(tasks):
            self._wholes |= dict.fromkeys(_forms(question, self._answers[task]), task)

    def observe(self, rows: pa.RecordBatch) -> None:
        self._rows += rows.num_rows
        for hashes, offsets in (hashing.words(rows.column(column)) for column in self.options.columns):
            found, fresh = [index.find((hashes, offsets)) for index in self._indices], set[int]()
            for row in sorted({row for _, rows in found for row in rows.tolist()}):
                # Rows with the same words count once.
                if (text := hash(hashes[offsets[row] : offsets[row + 1]].tobytes())) not in self._seen:
                    self._seen.add(text)
                    fresh.add(row)
            for index, (places, having) in zip(self._indices, found, strict=True):
                new = np.array([row in fresh for row in having.tolist()], bool)
                index.count(places[new], having[new])

    def settle(self) -> None:
        for index in self._indices:
            index.keep(index.rows <= min(self.options.common, max(2, self._rows // 10)))

    def apply(self, rows: pa.RecordBatch) -> Applied:
        column, reasons = self.options.answer, list[str | None]()
        given = values_of(rows, column) if column is not None and column in rows.schema.names else [""] * rows.num_rows
        answers = list(map(_answer, given))
        for text, answer in zip(texts(rows, self.options.columns[0]), answers, strict=True):
            whole = next((self._wholes[form] for form in _forms(text, answer) if form in self._wholes), None)
            reasons.append(None if whole is None else f"is an evaluation task: {self._shown[whole]}")
        for words in (hashing.words(rows.column(column)) for column in self.options.columns):
            for index in self._indices:
                same = "" if index.length == self.options.ngram else " and the answer"
                for row, tasks in index.hits(words):
                    if same:
                        own = answers[row]
                        tasks = [each for each in tasks if len(own) > 1 and own == self._answers[each]]
                    if tasks and reasons[row] is None:
                        why = f"shares {index.length} words{same} with an evaluation task"
                        reasons[row] = f"{why}: {self._shown[tasks[0]]}"
        return Applied(rows, reasons)


def _answer(text: str | None) -> str:
    """Return an answer in plain form: the part after a last ####."""
    return (text or "").rpartition("####")[2].replace(",", "").strip(" .\n")


def _forms(question: str, answer: str) -> Iterator[object]:
    """Iterate over the forms in which a question is that of an evaluation task."""
    plain = " ".join(question.split())
    if plain:
        yield plain
        yield plain.casefold().strip(" .?!"), answer


class _Index:
    """n-grams of one length of the evaluation tasks, in a sorted array, and how many different rows have each."""

    def __init__(self, texts: list[_Words], length: int, common: int) -> None:
        """n-grams of more than ``common`` evaluation tasks are not kept."""
        self.length = length
        found, owners = zip(*(_informative_ngrams(*each, length) for each in texts), strict=True)
        pairs = np.unique(np.stack([np.concatenate(found), np.concatenate(owners).astype(np.uint64)]), axis=1)
        self._grams, self._starts, counts = np.unique(pairs[0], return_index=True, return_counts=True)
        self._owners, self._ends = pairs[1], self._starts + counts
        self.rows = np.zeros(len(counts), np.int64)
        self.keep(counts <= common)

    def count(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Count rows by the places of the n-grams that they have."""
        pairs = np.unique(np.stack([places, rows]), axis=1)
        np.add.at(self.rows, pairs[0], 1)

    def keep(self, kept: np.ndarray) -> None:
        """Forget the other n-grams."""
        self._grams = self._grams[kept]
        self._starts = self._starts[kept]
        self._ends = self._ends[kept]
        self.rows = self.rows[kept]

    def hits(self, words: _Words) -> Iterator[tuple[int, list[int]]]:
        """Iterate over the n-grams of rows that evaluation tasks have, too: the row, and the tasks."""
        for place, row in zip(*(each.tolist() for each in self.find(words)), strict=True):
            yield row, self._owners[self._starts[place] : self._ends[place]].tolist()

    def find(self, words: _Words) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of n-grams of rows in the sorted ones, and the rows."""
        found, rows = _informative_ngrams(*words, self.length)
        if not len(self._grams):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.clip(np.searchsorted(self._grams, found), 0, len(self._grams) - 1)
        there = self._grams[places] == found
        return places[there], rows[there]


def _informative_ngrams(hashes: np.ndarray, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return n-grams of which half of the words have a letter, and the texts that they are of. Where most of these are
    ideographs, n-grams are twice as long, for two of them are about a word."""
    found = []
    for size, ideographic in ((length, False), (2 * length, True)):
        grams, bounds = hashing.ngrams(hashes, offsets, size)
        letters = hashing.count_words(hashes, offsets, size, hashing.kernels.LETTER)
        ideographs = hashing.count_words(hashes, offsets, size, hashing.kernels.IDEOGRAPH)
        informative = (2 * letters >= size) & ((2 * ideographs >= letters) == ideographic)
        found.append((grams[informative], np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[informative]))
    return np.concatenate([grams for grams, _ in found]), np.concatenate([texts for _, texts in found])


def _read(file: EvaluationFile) -> list[tuple[str, str, str]]:
    table = open_table(file.path)
    if table.broken:
        total = len(table.broken) + (table.rows or 0)
        raise broken_rows(table.broken, total, "correct or remove them", field="against", value=str(file.path))
    for name in filter(None, (file.question, file.answer)):
        if name not in table.schema.names:
            remedy = nearest(name, table.schema.names)
            raise DataError("no such column in the evaluation file", remedy, field=str(file.path), value=name)
    tasks = list[tuple[str, str, str]]()
    for batch in table.batches(10_000):
        questions = values_of(batch, file.question)
        answers = values_of(batch, file.answer) if file.answer is not None else [""] * len(questions)
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True), start=len(tasks) + 1):
            try:
                shown = "" if question is None else answer_text(question, file.question)
                truth = "" if answer is None else answer_text(answer, str(file.answer))
            except DataError as error:
                raise DataError(f"row {number}: {error.problem}", error.remedy, field=str(file.path)) from None
            tasks.append((shown, truth, f"{file.path.name} {number}"))
    return tasks
