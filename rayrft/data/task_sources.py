"""Readers of tasks by name, and how rows of files and data sets become tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rayrft.config.base import resolved
from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.conversations import message_text, task_prompt
from rayrft.data.episodes import read_gymnasium, read_verifiers
from rayrft.data.formats import SkippedRows, answer_text, as_list, broken_rows, finite, value_at
from rayrft.data.images import image_paths
from rayrft.data.layouts import TASKS, TRUTH, RowLayout, recognise
from rayrft.data.row_sources import NumberedRows, file_rows, ray_rows, split_rows
from rayrft.data.task_files import read_tasks
from rayrft.errors import DataError, RayrftError, nearest
from rayrft.experience import Task
from rayrft.registry import Registry

TaskSource = Callable[[TaskSourceConfig, str], list[Task] | NumberedRows]
task_sources: Registry[TaskSource] = Registry("task source", alike=True)
"""Readers take a source's config and its config key (``tasks.sources.0``), which errors name. They give tasks, or rows
that become tasks as the source's config says."""


@dataclass(frozen=True)
class RowsRead:
    """Numbers of rows of an origin, such as a file: of all, of those left out, by reason, and of the others, by
    layout."""

    origin: str
    rows: int
    left_out: Counter[str]
    layouts: Counter[str] = field(default_factory=Counter)


Note = Callable[[RowsRead], None]
"""Is called where rows are read or left out."""


def read_source(config: TaskSourceConfig, field: str, note: Note = lambda read: None) -> list[Task]:
    """Read all tasks of a source, in its order, with duplicates.

    Raises DataError if it is missing, empty or broken, ConfigError if there is no such reader.
    """
    source = task_sources.get(config.source, f"{field}.source")
    try:
        read = source(config, field)
    except RayrftError:
        raise
    except Exception as error:  # a user's source may raise anything
        problem = f"raised {type(error).__name__}: {error}"
        raise DataError(problem, "correct the source", field=f"{field}.source", value=config.source) from error
    if isinstance(read, NumberedRows):
        read = _to_tasks(read, config, field, note, config.size)
    elif not isinstance(read, list) or not all(isinstance(each, Task) for each in read):
        problem, remedy = "gave neither a list of tasks nor NumberedRows", "return one of them"
        raise DataError(problem, remedy, field=f"{field}.source", value=config.source)
    return _acted_on(config, read)


def read_held_out(config: TaskSourceConfig, field: str, note: Note = lambda read: None) -> list[Task]:
    """Read a source's held-out tasks from its file or split for them; none if it has neither."""
    if config.eval_path is not None:
        rows = file_rows(config, field, "eval_path")
    elif config.eval_split is not None:
        rows = split_rows(config, field, "eval_split")
    else:
        return []
    return _acted_on(config, _to_tasks(rows, config, field, note))


@task_sources.register("reasoning_gym")
def read_reasoning_gym(config: TaskSourceConfig, field: str) -> list[Task]:
    """Generate procedural tasks with verifiers; always with one seed, because sets of neighbouring seeds overlap."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.dataset not in DATASETS:
        remedy = nearest(str(config.dataset), DATASETS)
        raise DataError("reasoning-gym has no such data set", remedy, field=f"{field}.dataset", value=config.dataset)
    try:
        entries = reasoning_gym.create_dataset(config.dataset, size=config.size, seed=0, **resolved(config.options))
    except (TypeError, AssertionError, ValueError) as error:
        remedy = "see the dataset's own options in reasoning-gym"
        raise DataError(f"reasoning-gym refuses the options: {error}", remedy, field=f"{field}.options") from None
    tasks = []
    for number, entry in enumerate(entries, start=1):
        about, origin = entry["metadata"], f"task {number} of {config.dataset}"
        answer = "" if entry["answer"] is None else answer_text(entry["answer"], "answer")
        hard = _number(about, config.difficulty, f"{field}.difficulty", origin=origin, required=True)
        # Its place in the data set makes no task another one.
        metadata = {name: value for name, value in about.items() if name != "source_index"}
        made = {"difficulty": hard, "system": config.system, "metadata": metadata}
        tasks.append(Task.create(f"reasoning_gym/{config.dataset}", entry["question"], answer, **made))
    return tasks


_COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 210),
    "yellow": (225, 205, 50),
    "black": (25, 25, 25),
    "white": (235, 235, 235),
}
_SIDE, _SMALLEST, _LARGEST = 32, 12, 22
_SHADES = 20


@task_sources.register("squares")
def draw_squares(config: TaskSourceConfig, field: str) -> list[Task]:
    """Draw squares of random colour, shade, size and position on another colour, for tests and demos: which is it?

    The same pictures are written to ``config.path`` every time. Raises DataError if they cannot be written.
    """
    from PIL import Image

    assert config.path is not None and config.size is not None  # checked by the config
    folder = config.path.expanduser().absolute()
    rng = np.random.default_rng(0)
    tasks = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(config.size):
            path = folder / f"square-{number:05}.png"
            answer, pixels = _draw(rng)
            Image.fromarray(pixels).save(path)
            question = "Which colour is the square?"
            tasks.append(Task.create("squares", question, answer, images=(str(path),), system=config.system))
    except OSError as error:
        problem = f"cannot be drawn in: {error.strerror}"
        raise DataError(problem, "give another folder", field=f"{field}.path", value=str(folder)) from None
    return tasks


def _draw(rng: np.random.Generator) -> tuple[str, np.ndarray]:
    """Draw a picture; return the colour of the square, and the pixels ``[side, side, 3]``."""
    square, ground = rng.permutation(list(_COLOURS))[:2]
    shades = rng.integers(-_SHADES, _SHADES + 1, size=(2, 3))
    size = rng.integers(_SMALLEST, _LARGEST + 1)
    top, left = rng.integers(0, _SIDE - size + 1, size=2)
    pixels = np.empty((_SIDE, _SIDE, 3), dtype=np.uint8)
    pixels[:] = np.clip(_COLOURS[ground] + shades[0], 0, 255)
    pixels[top : top + size, left : left + size] = np.clip(_COLOURS[square] + shades[1], 0, 255)
    return str(square), pixels


task_sources.register("gymnasium")(read_gymnasium)
task_sources.register("verifiers")(read_verifiers)
task_sources.register("file")(file_rows)
task_sources.register("datasets")(split_rows)
task_sources.register("ray")(ray_rows)
task_sources.register("tasks")(read_tasks)


def _acted_on(config: TaskSourceConfig, tasks: list[Task]) -> list[Task]:
    """The tasks with the workflow that the source names."""
    return [replace(task, workflow=config.workflow) for task in tasks] if config.workflow else tasks


def _to_tasks(
    rows: NumberedRows, config: TaskSourceConfig, field: str, note: Note, size: int | None = None
) -> list[Task]:
    """Convert rows to tasks, up to ``size`` of them; what is broken ends it or is skipped, as the config says.

    Raises DataError if a column is missing in all rows, or there is no task.
    """
    read: dict[int, Task] = {}
    broken: dict[int, DataError] = {}
    columns: dict[str, None] = {}
    layouts, named = Counter[str](), _named_layouts(config)
    with closing(rows.rows):
        for number, row in rows.rows:
            try:
                if isinstance(row, str):
                    raise DataError(row, field=rows.field)
                columns.update(dict.fromkeys(row))
                layout = recognise(row, named or TASKS)
                if not named:
                    layout.check_content(row, (config.images,))
                read[number] = _to_task(row, layout, rows, config, field)
                layouts[layout.shown(row)] += 1
            except DataError as error:
                broken[number] = error
            if len(read) == size:
                break
    if any(task.answer for task in read.values()):
        lacking = [number for number, task in read.items() if not task.answer]
        broken |= {number: DataError("no answer, which other rows have", "fill it in") for number in lacking}
        read = {number: task for number, task in read.items() if number not in lacking}
    tasks = list(read.values())
    for key in ("question", "answer", "difficulty", "tries", "pass_rate"):
        name = getattr(config, key)
        if columns and name is not None and not {name, name.partition(".")[0]} & columns.keys():
            problem = f"no field {name!r} in {rows.origin}"
            raise DataError(problem, nearest(name, columns), field=f"{field}.{key}", value=name)
    problems, total = {at: error.problem for at, error in broken.items()}, len(tasks) + len(broken)
    if broken and (config.on_broken == "fail" or not tasks):
        number, first = next(iter(broken.items()))
        remedy = f"{first.remedy or 'fix or remove these rows'}; with on_broken: skip they are left out and counted"
        raise broken_rows(problems, total, remedy, origin=rows.origin, field=first.field or rows.field, value=number)
    if not tasks:
        raise DataError("it holds no rows", "give one with tasks", field=rows.field, value=rows.origin)
    note(RowsRead(rows.origin, total, SkippedRows(broken=problems).counts, layouts))
    return tasks


def _named_layouts(config: TaskSourceConfig) -> tuple[RowLayout, ...]:
    """Return the layout of the columns that a config names; none if it names none."""
    if config.question is None and config.answer is None:
        return ()
    question, answer = config.question or "question", config.answer or f"{TRUTH}?"
    return (RowLayout("named columns", {"question": question, "answer": answer}),)


def _to_task(row: dict[str, Any], layout: RowLayout, rows: NumberedRows, config: TaskSourceConfig, field: str) -> Task:
    """Convert a row. Raises DataError, about the key of the config that it does not fit, if there is one."""
    values = layout.read(row)
    names = {name: layout.column(row, name) for name in ("question", "answer")}
    given = values.get("system") or None
    messages, last, pictures = task_prompt(values["question"], names["question"], f"{field}.question", given)
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else config.system
    if config.system not in (None, system):
        problem = f"{names['question']!r} has a system message, and so has the source"
        raise DataError(problem, "leave one of them out", field=f"{field}.system")
    found = last if values["answer"] is None else message_text(values["answer"], names["answer"])
    answers = [_truth(each, names["answer"], config, field) for each in as_list(found)]
    tries = _number(row, config.tries, f"{field}.tries")
    rate = _number(row, config.pass_rate, f"{field}.pass_rate")
    if (tries is not None and (tries < 0 or tries % 1)) or (rate is not None and not 0 <= rate <= 1):
        raise DataError(f"{tries:g} tries with a pass rate of {rate:g}", field=f"{field}.pass_rate")
    pictures = [*as_list(value_at(row, config.images)), *pictures]
    return Task.create(
        rows.name,
        messages[-1]["content"],
        answers[0] if answers else "",
        history=tuple(messages[:-1]),
        other_answers=tuple(answers[1:]),
        images=image_paths(pictures, rows.base, config.images_folder),
        difficulty=_number(row, config.difficulty, f"{field}.difficulty", required=True),
        system=system,
        tries=int(tries or 0),
        pass_rate=rate,
        metadata={
            name: value
            for name, value in row.items()
            if name not in (names["question"], config.images) and not name.startswith("__index_level_")  # of pandas
        },
    )


def _truth(value: Any, name: str, config: TaskSourceConfig, field: str) -> str:
    truth = answer_text(value, name, f"{field}.answer")
    if config.answer_after is not None:
        truth = truth.rpartition(config.answer_after)[2].strip()
        if not truth:
            raise DataError(f"nothing stands after {config.answer_after!r}", "fill it in, or remove the row")
    return truth


def _number(
    row: dict[str, Any], name: str | None, field: str, *, origin: str = "it", required: bool = False
) -> float | None:
    """Return the number in a field; None if no field is named, or it is empty and not ``required``."""
    value = None if name is None else value_at(row, name)
    if name is None or (value is None and not required):
        return None
    number = finite(value)
    if number is None:
        remedy = f"name one of the fields {sorted(row)} that holds a number" + " in every row" * required
        raise DataError(f"{origin} has no number in {name!r}", remedy, field=field, value=value)
    return number
