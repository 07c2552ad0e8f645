"""``rayrft data``: the experiences of a run, read from its log, while it is running or after its end; pipelines."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayrft.buffer.export import are_personal, forget_rows, glance, read_file
from rayrft.buffer.reader import ARCHIVE_SCHEMA, Found, log_folder
from rayrft.cli import Overrides, Storage, archive_of, changes, feedback, report_damage, say
from rayrft.cli import Run as RunName
from rayrft.config import PipelineConfig, load_run_config, read_config
from rayrft.core.checkpoints import RUNS, find_folder
from rayrft.core.cluster import connect
from rayrft.core.launch import attach
from rayrft.data.formats import ROW_SUFFIXES, row_kind
from rayrft.data.row_sources import open_source_table
from rayrft.data.selection import Selection
from rayrft.data.tables import RowSource, open_table, write_table
from rayrft.errors import DataError, RunNotFound
from rayrft.experience import from_batch
from rayrft.files import local_path

if TYPE_CHECKING:
    from rayrft.benchmark.difficulty import MeasuredTasks
    from rayrft.core.run import Run

app = typer.Typer(
    no_args_is_help=True, help="Inspect, export, import and process the experiences of a run, and rows of files."
)

app.add_typer(feedback.app, name="feedback")

_Store = Annotated[str, typer.Option(help="usual or expert/NAME")]
_Where = Annotated[
    str | None, typer.Option(metavar="CONDITION", help="SQL over the columns: reward > 0.5 and stop_reason = 'stop'")
]
_SkipDamaged = Annotated[bool, typer.Option(help="skip files that cannot be read, and list them")]


@app.command()
def stats(run: RunName, storage: Storage = RUNS) -> None:
    """Print rows and bytes by store and group_status."""
    print(json.dumps(asdict(archive_of(run, storage).stats()), indent=2))


@app.command()
def head(
    run: RunName,
    count: Annotated[int, typer.Option("-n", min=1, help="rows")] = 10,
    store: _Store = "usual",
    where: _Where = None,
    skip_damaged: _SkipDamaged = False,
    storage: Storage = RUNS,
) -> None:
    """Print the first rows, one line per row."""
    archive = archive_of(run, storage)
    lines = [["id", "group_status", "reward", "tokens", "version", "uses", "answer"]]
    for batch in archive.rows(store, where=where, skip_damaged=skip_damaged):
        part = batch.slice(0, count + 1 - len(lines))
        for row, group_status in zip(from_batch(part), part.column("group_status").to_pylist(), strict=True):
            seen = glance(row)
            version, reward = ", ".join(map(str, seen["versions"])), "" if row.reward is None else f"{row.reward:g}"
            answer = (seen["answer"] or "").replace("\n", " ")[:200]
            facts = (row.experience_id, group_status or "", reward, len(row.token_ids), version, row.uses, answer)
            lines.append([str(each) for each in facts])
        if len(lines) > count:
            break
    widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]]
    room = max(40, shutil.get_terminal_size().columns - sum(widths) - 12) if sys.stdout.isatty() else 200
    for *cells, answer in lines:
        print("  ".join([*(text.ljust(width) for text, width in zip(cells, widths, strict=True)), answer[:room]]))
    report_damage(archive)


@app.command()
def show(run: RunName, experience_id: Annotated[str, typer.Argument(metavar="ID")], storage: Storage = RUNS) -> None:
    """Print all fields of one row."""
    print(_described(archive_of(run, storage).find(experience_id)))


@app.command("export")
def export_rows(
    run: RunName,
    out: Annotated[Path, typer.Argument(parser=local_path, help="a file to write: .jsonl or .parquet")],
    store: _Store = "usual",
    where: _Where = None,
    columns: Annotated[str | None, typer.Option(help="comma-separated names; all by default")] = None,
    skip_damaged: _SkipDamaged = False,
    storage: Storage = RUNS,
) -> None:
    """Write rows to a file that pandas, DuckDB and `data import` can read.

    A JSONL file can also be used as demonstrations: {path: OUT.jsonl, messages: turns} in a config.
    """
    archive = archive_of(run, storage)
    names = columns.split(",") if columns else None
    rows = archive.rows(store, columns=names, where=where, skip_damaged=skip_damaged)
    written = write_table(out, Selection(ARCHIVE_SCHEMA, names).schema, rows)
    print(f"{written} rows in {out}")
    report_damage(archive)


@app.command("import")
def import_rows(
    run: RunName,
    file: Annotated[Path, typer.Argument(parser=local_path, help="a file written by `data export`, with all columns")],
    name: Annotated[str, typer.Option(help="the store of demonstrations to create or replace")],
    where: _Where = None,
    add: Annotated[bool, typer.Option("--add", help="add new rows, and keep the existing ones")] = False,
    storage: Storage = RUNS,
) -> None:
    """Load the rows of a file as demonstrations into a running run."""
    rows = read_file(file, where)
    folder = find_folder(run, storage)
    if (live := _live(folder)) is None:
        remedy = f"start one with demonstrations.{name}: {{path: FILE.jsonl, messages: turns}} in its config"
        raise RunNotFound("the run is not running", remedy, field="run", value=str(folder))
    count, how = (live.extend(rows, name), "added to the") if add else (live.load(rows, name), "loaded as")
    print(f"{count} rows {how} demonstrations {name!r} of {live.name}")


@app.command()
def forget(
    run: RunName,
    ids: Annotated[
        list[str] | None, typer.Option("--id", help="of a row, or of a session or response of the endpoint")
    ] = None,
    days: Annotated[float | None, typer.Option(min=0, help="sessions that were finished so many days ago")] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", parser=local_path, help="a file of `data export` that is to lose them, too"),
    ] = None,
    storage: Storage = RUNS,
) -> None:
    """Erase rows for good, each with its group: by ids, or sessions of the endpoint by age. They are erased from the
    run's log, and what people said of them from the page's journal."""
    import asyncio

    from rayrft.buffer.log.journal import Position
    from rayrft.buffer.retention import Retention
    from rayrft.buffer.store import Store
    from rayrft.feedback.journal import FILE, feedback_folder, forget_judgements

    before = 0.0 if days is None else time.time() - 86_400 * days
    archive, folder = archive_of(run, storage), find_folder(run, storage)
    rows = {
        name
        for batch in archive.rows(columns=["experience_id", "labels", "finished_at"])
        for name, unwanted in zip(
            batch["experience_id"].to_pylist(), are_personal(batch, ids or [], before), strict=True
        )
        if unwanted
    }
    if ((page := feedback_folder(folder)) / FILE).exists():
        print(f"{forget_judgements(page, rows)} entries of the feedback page erased")
    if (live := _live(folder)) is not None:
        erased, leased = live.forget(ids or [], before)
    else:
        config = load_run_config(folder)
        store = Store(archive.stats().run, log_folder(folder, config), config.buffer, config.seed, None, Position())
        erased, leased = asyncio.run(Retention(store).forget(ids or [], before))
        store.storage.unlock()
    print(f"{erased} rows erased" + (f"; {leased} can be once a checkpoint covers their step" if leased else ""))
    for file in files or []:
        print(f"{forget_rows(file, ids or [], before)} rows erased from {file}")


@app.command("process")
def process_rows(
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IN…]", help="files or folders of rows, or runs; besides those of the pipeline's 'rows'"
        ),
    ] = None,
    *,
    out: Annotated[Path, typer.Argument(parser=local_path, help="a file to write: .jsonl or .parquet")],
    pipeline: Annotated[
        Path, typer.Option(parser=local_path, help="YAML: operators: [{name: …}, …], rows: [{dataset: …}, …]")
    ],
    left_out: Annotated[
        Path | None, typer.Option(parser=local_path, help="a JSONL file for the rows left out, with the reasons")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="a run's YAML, for its evaluation sets (decontaminate), model (length, diverse), auxiliary models, "
            "reward and tasks (operators that ask)"
        ),
    ] = None,
    storage: Storage = RUNS,
) -> None:
    """Clean, filter, prioritise and synthesise rows; print what each operator did.

    Answers of models are kept beside OUT until all is done: a command that was cut off does not ask for them again.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rayrft.core.services import pipeline_inputs
    from rayrft.pipelines.files import process
    from rayrft.pipelines.report import operator_examples, operator_table

    loaded = read_config(PipelineConfig, pipeline)
    if loaded.workers > 1 or any(each.read is not None for each in loaded.rows):
        connect()
    sources = [_sources(name, storage)[0] for name in rows or ()]
    sources += [open_source_table(each, f"rows.{number}") for number, each in enumerate(loaded.rows)]
    if not sources:
        raise DataError("there are no rows to process", "name files or runs, or 'rows' in the pipeline", field="in")
    journal = out.with_name(f"{out.name}.answers.jsonl")
    context, models, tasks = pipeline_inputs(loaded, config, journal)
    total = sum(source.rows or 0 for source in sources) * len(loaded.operators)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=total or None)

        def advance(operator: int, count: int) -> None:
            bar.update(task, advance=count, description=loaded.operators[operator].name)

        done = process(
            sources, loaded, out, context=context, left_out=left_out, progress=advance, models=models, tasks=tasks
        )
    journal.unlink(missing_ok=True)
    Console(highlight=False, markup=False).print(operator_table(done.reports))
    for line in operator_examples(done.reports):
        print(line)
    for name, broken in done.broken.items():
        shown = list(broken.items())[: max(1, loaded.samples)]
        first = ", ".join(f"{number} ({problem})" for number, problem in shown)
        print(f"{len(broken)} broken rows of {name} were not read: {first}{' …' if len(broken) > len(shown) else ''}")
    print(f"{done.rows} rows in {out}")


@app.command()
def difficulty(
    config: Annotated[str, typer.Argument(help="YAML file of a run")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help="a file to write: .jsonl or .parquet [STORAGE/NAME-difficulty/tasks.parquet]"
        ),
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="answers to each task")] = 8,
    model: Annotated[str | None, typer.Option(help="a folder, an id on the hub, RUN or RUN@WHICH [model.path]")] = None,
) -> None:
    """Measure the pass rate of every task with a run's engines. An interrupted command continues when it is run again.

    The file is a source of tasks: {source: tasks, path: …}.
    """
    from rayrft.benchmark.difficulty import measure_difficulty

    _measured(measure_difficulty(config, out, tries=tries, model=model, say=say, **changes(overrides)))


@app.command()
def tasks(
    run: RunName,
    out: Annotated[Path, typer.Argument(parser=local_path, help="a file to write: .jsonl or .parquet")],
    storage: Storage = RUNS,
) -> None:
    """Write a run's tasks with the tries and pass rate that it came to: a source of tasks for another run."""
    from rayrft.benchmark.difficulty import write_solved

    _measured(write_solved(find_folder(run, storage), out))


def _measured(found: MeasuredTasks) -> None:
    rate = f", {found.solved} solved at least once, mean pass rate {found.mean:.3f}" if found.mean is not None else ""
    print(f"{found.tasks} tasks in {found.path}: {found.tried} tried{rate}")


@app.command("lineage")
def show_lineage(
    row_id: Annotated[str, typer.Argument(metavar="ID", help="the id of a row")],
    rows: Annotated[
        list[str], typer.Argument(metavar="IN…", help="files and runs that hold it and what it was made of")
    ],
    storage: Storage = RUNS,
) -> None:
    """Print what a row was made of, by which operators."""
    from rayrft.pipelines.files import walk_lineage
    from rayrft.pipelines.report import glimpse

    for each in walk_lineage(row_id, [source for name in rows for source in _sources(name, storage)]):
        how = f" by {each.made_by}" if each.made_by else ""
        print(f"{'  ' * each.depth}{each.id}{how}: {'not in these files' if each.row is None else glimpse(each.row)}")


def _sources(name: str, storage: Path) -> list[RowSource]:
    """Return the rows of a file or folder, or of a run's log: its usual rows, and then each of its demonstrations."""
    file, is_run = local_path(name), any((folder / "config.yaml").is_file() for folder in (Path(name), storage / name))
    if not is_run and (file.exists() or row_kind(file) in ROW_SUFFIXES):
        return [open_table(file)]
    archive = archive_of(name, storage)

    def source(store: str) -> RowSource:
        named = name if store == "usual" else f"{name} ({store})"
        return RowSource(named, ARCHIVE_SCHEMA, lambda rows: archive.rows(store))

    return [source(store) for store in archive.stores]


def _live(folder: Path) -> Run | None:
    """Return the run in a folder if it is running."""
    with contextlib.suppress(RunNotFound):
        live = attach(load_run_config(folder).name)
        return live if live.folder.resolve() == folder.resolve() else None
    return None


def _described(found: Found) -> str:
    row = found.experience
    actions = row.action_mask == 1
    facts = {
        "task": row.task_id,
        "store": found.store,
        "file": found.segment,
        "source": row.source,
        "group_status": found.group_status,
        "uses": row.uses,
        "last trained at step": found.trained_step,
        "status": row.status,
        "stop reason": row.stop_reason,
        "error": row.error,
        "reward": row.reward,
        "reward components": row.reward_components,
        "metrics": row.metrics,
        "labels": row.labels,
        "pair": None if row.pair_id is None else f"{row.pair_id}, {'chosen' if row.chosen else 'rejected'}",
        "tokens": f"{len(row.token_ids)}: {row.prompt_length} of the prompt, {actions.sum()} produced",
        "versions": ", ".join(f"{span.version} (tokens {span.start}-{span.end - 1})" for span in row.weight_versions),
        "logprobs": _spread(row.logprobs[actions]),
        "greedy reward": row.greedy_reward,
    }
    shown = [(name, value) for name, value in facts.items() if value not in (None, {}, "")]
    for late in found.late_feedback:
        shown.append(("late feedback", f"reward {late.reward}, labels {late.labels}, after version {late.version}"))
    lines = [row.experience_id, *(f"  {name:<20} {value}" for name, value in shown)]
    lines += chain.from_iterable((f"\n[{turn.get('role')}]", turn.get("content", "")) for turn in row.turns)
    return "\n".join(lines)


def _spread(values: Any) -> str:
    if not len(values):
        return "none"
    return f"mean {values.mean():.4g}, from {values.min():.4g} to {values.max():.4g}, on {len(values)} tokens"
