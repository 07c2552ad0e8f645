"""Who was busy when: the traces of a run's actors, the critical path of its steps, and both as a trace of Perfetto."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rayrft.errors import DataError
from rayrft.files import atomic_file
from rayrft.runtime.trace import FOLDER, LONGEST_S, WRITE_S
from rayrft.viewer.records import RecordTable

_LATE_S = LONGEST_S + 5 * WRITE_S
"""A line is written at most so long after the end of its span."""
GROUPS = "groups"
"""The lane of whole groups."""


@dataclass(frozen=True)
class Span:
    """Something that was busy, or waited for; see `rayrft.runtime.trace`. Times are Unix times."""

    end: float
    seconds: float
    lane: str
    name: str
    load: float = 1.0
    parts: dict[str, float] = field(default_factory=dict)
    actor: str = ""

    @property
    def start(self) -> float:
        return self.end - self.seconds


@dataclass(frozen=True)
class StepTimes:
    """An optimiser step: it waits for its batch, trains on it and sends the weights."""

    step: int
    start: float
    wait_s: float
    train_s: float
    sync_s: float
    end: float

    @property
    def parts(self) -> list[tuple[str, float, float]]:
        """Names, starts and ends of what the step did, one after the other."""
        named = {"wait": self.wait_s, "train": self.train_s, "sync": self.sync_s}
        times = np.cumsum([self.start, *named.values()]).tolist()
        return [(name, start, min(end, self.end)) for name, (start, end) in zip(named, pairwise(times), strict=True)]


def steps_of(table: RecordTable) -> list[StepTimes]:
    """Return the optimiser steps in the records of a run."""
    names = ("step", "time", "step_s", "wait_s", "train_s", "sync_s")
    columns = table.columns(*names)
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    return [
        StepTimes(int(step), time - took, wait, train, sync, time)
        for step, time, took, wait, train, sync in rows
        if took == took
    ]


def read_spans(run: Path, start: float, end: float) -> Iterator[Span]:
    """Iterate over the spans in a run folder that overlap a time, by actor in the order in which they were written.

    A line that is incomplete or not a span, as a crash leaves it, is skipped.
    """
    for path in sorted((run / FOLDER).glob("*.jsonl")):
        with path.open("rb") as file:
            _seek(file, start - _LATE_S)
            for line in file:
                if (span := _parsed(line, path.stem)) is None or span.end < start:
                    continue
                if span.end > end + _LATE_S + LONGEST_S:
                    break
                if span.start < end:
                    yield span


def _seek(file: Any, time: float) -> None:
    """Set the file to the first line whose span ends at this time or later; lines are nearly in order."""
    low, high = 0, file.seek(0, 2)
    while high - low > 1 << 14:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        span = next(filter(None, (_parsed(line) for line in file)), None)
        if span is None or span.end >= time:
            high = middle
        else:
            low = middle
    file.seek(low)
    if low:
        file.readline()


def _parsed(line: bytes, actor: str = "") -> Span | None:
    try:
        end, seconds, lane, name, load, *parts = json.loads(line)
        return Span(float(end), float(seconds), str(lane), str(name), float(load), parts[0] if parts else {}, actor)
    except (ValueError, TypeError):
        return None


def merged(spans: Iterable[Span], gap_s: float) -> list[Span]:
    """Join spans of one actor, lane and name that are at most ``gap_s`` apart, for a drawing that does not show it."""
    latest: dict[tuple[str, str, str], Span] = {}
    found = list[Span]()
    for span in spans:
        key = span.actor, span.lane, span.name
        before = latest.get(key)
        if before is not None and 0 <= span.start - before.end + 1e-3 <= gap_s + 1e-3 and not span.parts:
            seconds = span.end - before.start
            area = before.load * before.seconds + span.load * span.seconds
            latest[key] = replace(before, end=span.end, seconds=seconds, load=area / seconds if seconds else span.load)
            continue
        if before is not None:
            found.append(before)
        latest[key] = span
    return found + list(latest.values())


def critical_path(step: StepTimes, groups: Iterable[Span]) -> tuple[str, list[tuple[str, float, float]]]:
    """Return the group that a step waited for last, and the names, starts and ends of what the step's time went to.

    The batch is complete when the last of its groups is stored, so the wait is what this group did until then, and
    before it began, its admission. A step that waited for no group, such as one of demonstrations, has its own parts.
    """
    wait, *others = step.parts
    _, start, leased = wait
    in_time = (each for each in groups if each.end <= leased + 0.05 and not each.name.endswith(" dropped"))
    last = max(in_time, key=lambda group: group.end, default=None)
    if last is None or last.end <= start:
        return "", step.parts
    path, end = list[tuple[str, float, float]](), leased
    seconds = {"lease": leased - last.end, **dict(reversed(last.parts.items())), "admission": leased - start}
    for name, took in seconds.items():
        began = max(end - took, start)
        if end > began:
            path.append((name, began, end))
        end = began
    return last.name, [*reversed(path), *others]


def perfetto(spans: Iterable[Span], steps: Iterable[StepTimes]) -> Iterator[dict[str, Any]]:
    """Iterate over the events of a trace: Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

    A process is an actor, a thread a lane of one name; loads above one are counters, and groups are asynchronous.
    """
    processes, threads = dict[str, int](), dict[tuple[str, str, str], int]()
    groups = list[Span]()

    def begin(actor: str, lane: str, name: str) -> Iterator[dict[str, Any]]:
        if actor not in processes:
            processes[actor] = len(processes) + 1
            yield {"ph": "M", "name": "process_name", "pid": processes[actor], "args": {"name": actor}}
        if (key := (actor, lane, name)) not in threads:
            threads[key] = len(threads) + 1
            title = f"{lane}: {name}" if name != lane else lane
            where = {"pid": processes[actor], "tid": threads[key]}
            yield {"ph": "M", "name": "thread_name", **where, "args": {"name": title}}

    def slices(actor: str, lane: str, name: str, start: float, end: float, **args: Any) -> Iterator[dict[str, Any]]:
        yield from begin(actor, lane, lane)
        where = {"pid": processes[actor], "tid": threads[actor, lane, lane]}
        yield {"ph": "X", "name": name, "ts": _us(start), "dur": _us(end) - _us(start), **where, "args": args}

    for span in spans:
        if span.parts:
            groups.append(span)
            yield from begin(span.actor, GROUPS, GROUPS)
            about = {"cat": "group", "id": span.name, "pid": processes[span.actor], "tid": 0}
            yield {"ph": "b", "name": span.name, "ts": _us(span.start), **about}
            at = span.start
            for part, seconds in span.parts.items():
                yield {"ph": "b", "name": part, "ts": _us(at), **about}
                at += seconds
                yield {"ph": "e", "name": part, "ts": _us(at), **about}
            yield {"ph": "e", "name": span.name, "ts": _us(span.end), **about}
            continue
        yield from begin(span.actor, span.lane, span.name)
        where = {"pid": processes[span.actor], "tid": threads[span.actor, span.lane, span.name]}
        took = {"ts": _us(span.start), "dur": _us(span.end) - _us(span.start)}
        yield {"ph": "X", "name": span.name, **took, **where, "args": {"load": span.load}}
        if span.load > 1:
            for at, value in ((span.start, span.load), (span.end, 0.0)):
                counter = f"{span.lane}: {span.name} at once"
                yield {"ph": "C", "name": counter, "ts": _us(at), "pid": where["pid"], "args": {"load": value}}
    for step in steps:
        yield from slices("run", "steps", f"step {step.step}", step.start, step.end)
        for name, start, end in step.parts:
            yield from slices("run", "steps", name, start, end)
        group, path = critical_path(step, groups)
        for name, start, end in path:
            yield from slices("run", "critical path", name, start, end, group=group)


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def write_perfetto(run: Path, file: Path, first: int = 0, last: int | None = None) -> int:
    """Write the trace of a run's steps from ``first`` to ``last``, compressed if the file's name ends with ``.gz``;
    return the number of events. Raises DataError if the run has no traces of these steps."""
    table = RecordTable(run)
    table.update()
    steps = [step for step in steps_of(table) if first <= step.step and (last is None or step.step <= last)]
    start = steps[0].start if steps else 0.0
    end = steps[-1].end if steps and last is not None else float("inf")
    if not (run / FOLDER).is_dir() or (not steps and (first or last is not None)):
        remedy = "give steps that it has taken; a run writes traces unless monitor.trace is false"
        raise DataError("the run has no traces of these steps", remedy, field="run", value=str(run))
    count = 0
    with atomic_file(file) as partial, (gzip.open if file.suffix == ".gz" else open)(partial, "wt") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in perfetto(read_spans(run, start, end), steps):
            out.write((",\n" if count else "") + json.dumps(event))
            count += 1
        out.write("\n]}\n")
    return count
