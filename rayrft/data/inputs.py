"""What a run reads besides its tasks: demonstrations, rows of a probe, and texts for a generated tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from itertools import islice

from rayrft.config import RunConfig
from rayrft.data.conversations import read_conversations
from rayrft.data.demonstrations import RowEncoder, demonstrate, from_source, from_tasks, held_out_name, hold_out
from rayrft.data.formats import ParsedRow
from rayrft.data.row_sources import open_source
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.data.task_splits import TaskSplits
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError
from rayrft.experience import Experience, Task


def task_set_spec(config: RunConfig, splits: TaskSplits) -> TaskSetSpec | None:
    """Return the factory of the task set of a run, if it has tasks. Raises the errors of `TaskSet`."""
    tasks = config.tasks
    if tasks is None:
        return None
    make = TaskSetSpec(
        [task.id for task in splits.train],
        splits.sources,
        [source.weight for source in tasks.sources],
        sampler=tasks.sampler,
        seed=config.seed,
        epochs=tasks.epochs,
        difficulties=[task.difficulty for task in splits.train],
        priorities=[task.priority for task in splits.train],
        tried=[(task.id, task.tries, task.passes) for task in splits.train if task.tries],
    )
    make()  # raises if the sampler is unsuitable for these tasks
    return make


def check_demonstrations(config: RunConfig) -> None:
    """Read the first row of all demonstrations. Raises DataError if one cannot be read."""
    for name, spec in config.demonstrations.items():
        if spec.origins:
            with closing(open_source(spec, f"demonstrations.{name}").rows) as rows:
                next(rows, None)


def demonstrated_text(config: RunConfig) -> list[str]:
    """Return the text of demonstrations, so that a tiny model's tokenizer knows their characters."""
    texts: list[str] = []
    for name, spec in config.demonstrations.items():
        rows: Iterable[tuple[int, ParsedRow]] = open_source(spec, f"demonstrations.{name}").rows if spec.origins else ()
        for _, row in rows:
            with suppress(DataError):  # broken rows are reported when they become experiences
                sides = read_conversations(row, spec).sides if isinstance(row, dict) else []
                texts += [message["content"] for side in sides for message in side.messages]
    return texts


def load_demonstrations(
    config: RunConfig, splits: TaskSplits, tokenizer: ChatTokenizer
) -> tuple[dict[str, list[Experience]], list[str]]:
    """Return the demonstrations of a run by name, held-out pairs among them, and notices of the layouts of
    their rows and of those that were left out.

    Raises DataError if an entry has no usable row.
    """
    found, notices = dict[str, list[Experience]](), list[str]()
    held_out, most = {task.dedup_key for task in splits.evaluation}, config.model.max_length
    for name, spec in config.demonstrations.items():
        if not spec.origins:
            rows = from_tasks(name, splits.demonstrated[name], spec, tokenizer, config.seed)
            found[name] = [row for row in rows if len(row.token_ids) <= most]
            skipped = Counter({"too long": len(rows) - len(found[name])})
            if not found[name]:
                shortest = min(len(row.token_ids) for row in rows)
                problem = f"every demonstration has more than {most} tokens"
                raise DataError(problem, "raise model.max_length", field=f"demonstrations.{name}", value=shortest)
        else:
            whole, labelled = name in config.scored_demonstrations, name in config.labelled_demonstrations
            encoder = RowEncoder(name, spec, tokenizer, most, held_out, whole, labelled)
            found[name], report = from_source(encoder)
            skipped = report.counts
            notices += [f"demonstrations {name!r}: {count:,} rows, {shown}" for shown, count in encoder.layouts.items()]
        if spec.held_out:
            found[name], held = hold_out(name, found[name], spec.held_out, config.seed)
            found[held_out_name(name)] = held
            skipped["held out, in pairs"] = len(held) // 2
        gone = (+skipped).most_common()
        notices += [f"demonstrations {name!r}: {count:,} left out as {reason}" for reason, count in gone]
    return found, notices


def choose_probe(tasks: Iterable[Task], tokenizer: ChatTokenizer, max_length: int) -> list[Experience]:
    """Return the first eight tasks as rows shorter than ``max_length``: scoring takes an engine one more token."""
    rows = (demonstrate("", task, task.answer, tokenizer) for task in tasks)
    return list(islice((row for row in rows if len(row.token_ids) < max_length), 8))
