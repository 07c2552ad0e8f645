"""A pipeline on files and other sources of rows: `rayrft data process`; and where made rows come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrft.config.pipelines import PipelineConfig
from rayrft.data.formats import broken_rows, is_json
from rayrft.data.tables import RowSource, TableWriter
from rayrft.errors import DataError
from rayrft.experience import MASKED, Task
from rayrft.files import atomic_file
from rayrft.pipelines.chain import LeftOut
from rayrft.pipelines.experiences import EXPERIENCES
from rayrft.pipelines.operator import Context, build_operator
from rayrft.pipelines.operators.batches import BATCHES
from rayrft.pipelines.report import OperatorReport
from rayrft.pipelines.rows import Ids, fit_columns, id_column, last_answer, lineage
from rayrft.pipelines.run.models import OpenModels
from rayrft.pipelines.run.process import NoteGiven, Pipeline
from rayrft.pipelines.subjects import is_experience
from rayrft.registry import load_plugins


@dataclass(frozen=True)
class ProcessingResult:
    """Result of `process`: the rows written, and the broken ones by source."""

    reports: list[OperatorReport]
    rows: int
    broken: dict[str, Mapping[int, str]] = field(default_factory=dict)


def process(
    sources: Sequence[RowSource],
    config: PipelineConfig,
    out: Path,
    *,
    context: Context | None = None,
    left_out: Path | None = None,
    progress: NoteGiven = lambda operator, rows: None,
    models: OpenModels | None = None,
    tasks: Mapping[str, Task] | None = None,
) -> ProcessingResult:
    """Send the rows of all sources, one after another, through the operators of a pipeline, and write what is left
    to ``out`` (JSONL or Parquet), which appears when all is done.

    ``left_out`` is a JSONL file to write to: what was left out, by which operator and why, and which rows are broken.
    ``models`` opens the models that operators ask. Of experiences they see what they would in a run, too, which is not
    written: ``response``, with ``tasks`` (by id) the columns of these, and the columns of a batch. The rows that a step
    has trained on count as one batch. Raises ConfigError before anything is read if an operator does not fit, DataError
    if sources do not fit each other or a file cannot be written, and OperatorFailed.
    """
    for path in filter(None, (out, left_out)):
        if path.resolve() in {Path(source.name).resolve() for source in sources}:
            raise DataError("would overwrite its input", "give another file", field="out", value=str(path))
    load_plugins(config.plugins)
    if kinds := _kinds(config, context or Context(), sources):
        sources = [each.convert(kinds) if each.convert is not None else each for each in sources]
    for source in sources:
        if source.broken and config.on_broken == "fail":
            remedy, total = "correct them, or set on_broken: skip", len(source.broken) + (source.rows or 0)
            raise broken_rows(source.broken, total, remedy, field="file", value=source.name)
    schema = _common(sources)
    ids, name = Ids(), id_column(schema)
    schema = ids.add(pa.RecordBatch.from_pylist([], schema=schema)).schema
    in_run = _RunColumns(schema, tasks)
    pipeline = Pipeline(
        config.operators,
        in_run.schema,
        origin=", ".join(source.name for source in sources),
        context=context,
        plugins=config.plugins,
        deadline_s=config.deadline_s,
        batch_rows=config.batch_rows,
        samples=config.samples,
        leave_out=config.on_error == "leave_out",
        workers=config.workers,
    )

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in chain.from_iterable(source.batches(config.batch_rows) for source in sources):
            yield in_run.add(fit_columns(ids.add(batch, name), schema))

    broken = {source.name: source.broken for source in sources if source.broken}
    with ExitStack() as stack:
        names = [each for each in pipeline.schema.names if each not in in_run.added]
        writer = stack.enter_context(TableWriter(out, pa.schema([pipeline.schema.field(each) for each in names])))
        note = _left_out_writer(left_out, stack) if left_out is not None else lambda entry: None
        for file, problems in broken.items():
            for number, problem in problems.items():
                note({"operator": "read", "reason": f"broken: {problem}", "file": file, "number": number})

        def list_rows(operator: str, rows: list[LeftOut]) -> None:
            for each in rows:
                note({"id": each.row, "operator": operator, "reason": each.reason, "row": each.values})

        reports = pipeline.run(
            batches(),
            lambda batch: writer.write(batch.select(names)),
            progress=progress,
            left_out=list_rows,
            models=models,
        )
    return ProcessingResult(reports, writer.rows, broken)


def _kinds(config: PipelineConfig, context: Context, sources: Sequence[RowSource]) -> dict[str, str]:
    """Return the kind that operators read, text or numbers, of columns whose files or values differ in kind."""
    found, wanted = dict[str, set[tuple[pa.DataType, bool]]](), dict[str, str]()
    for column in (column for source in sources for column in source.schema):
        found.setdefault(column.name, set()).add((column.type, is_json(column)))
    mixed = {name for name, kinds in found.items() if len(kinds) > 1 or any(json for _, json in kinds)}
    for number, each in enumerate(config.operators):
        operator = build_operator(each, f"operators.{number}", context)
        for name, kind in operator.reads.items():
            if name in mixed and kind in ("text", "number"):
                wanted.setdefault(name, kind)
        mixed -= set(operator.writes)
    return wanted


class _RunColumns:
    """The columns that operators see of experiences in a run, and that their file or log does not have."""

    def __init__(self, schema: pa.Schema, tasks: Mapping[str, Task] | None) -> None:
        self._tasks, self._rows = tasks or {}, 0
        of_task = () if tasks is None else ("question", "answer", "domain", "difficulty")
        seen = [EXPERIENCES.field(name) for name in ("response", *of_task)]
        seen += [BATCHES.field(name) for name in ("place", "step", "trained", "weight")]
        of_runs = is_experience(schema) and {"turns", "status", "task_id"} <= {*schema.names}
        self._fields = [each for each in seen if of_runs and each.name not in schema.names]
        self.added = {each.name for each in self._fields}
        self.schema = pa.schema([*schema, *self._fields], schema.metadata)

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with the columns."""
        columns = [pa.array(self._values(each.name, batch, self._rows), each.type) for each in self._fields]
        self._rows += batch.num_rows
        return pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=self.schema)

    def _values(self, name: str, batch: pa.RecordBatch, first: int) -> Sequence[Any]:
        match name:
            case "response":
                return [last_answer(turns) for turns in batch.column("turns").to_pylist(maps_as_pydicts="lossy")]
            case "place":
                return range(first, first + batch.num_rows)
            case "step" if "trained_step" in batch.schema.names:
                return [step or 0 for step in batch.column("trained_step").to_pylist()]
            case "trained":
                return [status != MASKED for status in batch.column("status").to_pylist()]
            case "step" | "weight":
                return [float(name == "weight")] * batch.num_rows
        return [getattr(self._tasks.get(task), name, None) for task in batch.column("task_id").to_pylist()]


def _common(sources: Sequence[RowSource]) -> pa.Schema:
    """Return the columns of all sources; those that one lacks are null in its rows."""
    first, *others = sources
    columns = {column.name: (column, first.name) for column in first.schema}
    for source in others:
        for column in source.schema:
            there, named = columns.setdefault(column.name, (column, source.name))
            if is_json(there) == is_json(column):
                with suppress(pa.ArrowTypeError, pa.ArrowInvalid):
                    merged = pa.unify_schemas([pa.schema([there]), pa.schema([column])], promote_options="permissive")
                    columns[column.name] = (merged.field(0), named)
                    continue
            kinds = ["JSON" if is_json(each) else str(each.type) for each in (there, column)]
            problem = f"holds {kinds[0]} in {named} and {kinds[1]} in {source.name}"
            remedy = "process the files one by one, or convert one of them"
            raise DataError(problem, remedy, field=f"column {column.name}")
    return pa.schema([column for column, _ in columns.values()])


def _left_out_writer(path: Path, stack: ExitStack) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes a line of a JSONL file, which appears when the stack ends without an error."""
    try:
        file = stack.enter_context(stack.enter_context(atomic_file(path)).open("w"))
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise DataError(problem, "choose another folder", field="left_out", value=str(path)) from None
    return lambda entry: print(json.dumps(entry, ensure_ascii=False, default=str), file=file)


@dataclass(frozen=True)
class Ancestor:
    """A row in the lineage of another, ``depth`` steps from it; ``row`` is None if no source has it."""

    id: str
    depth: int
    made_by: str | None
    row: dict[str, Any] | None


def walk_lineage(wanted: str, sources: Sequence[RowSource]) -> list[Ancestor]:
    """Return a row, what it was made of, what these were made of, and so on, each below what was made of it.

    Raises DataError if no source has the row.
    """
    found: dict[str, dict[str, Any]] = {}
    missing = {wanted}
    while missing:
        more = {name: row for source in sources for name, row in _rows_of(missing, source)}
        parents = {parent for row in more.values() for parent in lineage(row).parents}
        found |= more
        missing = parents - found.keys() if more else set()
    if wanted not in found:
        named = ", ".join(source.name for source in sources)
        raise DataError(f"no row of this id in {named}", "name the files that hold it", field="id", value=wanted)
    walked = list[Ancestor]()

    def walk(name: str, depth: int, above: tuple[str, ...]) -> None:
        row = found.get(name)
        made = lineage(row or {})
        walked.append(Ancestor(name, depth, made.made_by, row))
        for parent in made.parents:
            if parent not in above:
                walk(parent, depth + 1, (*above, parent))

    walk(wanted, 0, (wanted,))
    return walked


def _rows_of(names: Set[str], source: RowSource) -> Iterator[tuple[str, dict[str, Any]]]:
    for rows in map(Ids().add, source.batches(1000)):
        for index, name in enumerate(rows.column(id_column(rows.schema)).to_pylist()):
            if name in names:
                yield name, rows.slice(index, 1).to_pylist(maps_as_pydicts="lossy")[0]
