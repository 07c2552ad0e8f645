"""The trace of an actor: what it waited for or worked on, and when, as lines in a file of the run folder.

Recording costs the actor about a microsecond: a thread writes the spans, twice a second. Spans of one activity that
nearly touch are written as one, so that the file grows with the steps of a run and not with its calls.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FOLDER = "trace"
"""Of the traces in a run folder, a file by actor. A line is [end, seconds, lane, name, load, seconds by part]: ``end``
in Unix time, ``load`` the mean number of activities at once; parts only of groups."""
WRITE_S = 0.5
LONGEST_S = 5.0
"""Length at which a span is written though its activity continues."""
_GAP_S = 0.005
"""Longest interruption of a span."""
_MOST = 20_000
"""Most spans that wait to be written, if the storage hangs; later ones are left out, with a span that counts them."""


class _Activity:
    """A kind of activity: since when it is recorded, how many are running, and the integral of that number."""

    __slots__ = ("area", "began", "changed", "running")

    def __init__(self, now: float) -> None:
        self.began = self.changed = now
        self.running, self.area = 0, 0.0

    def advance(self, now: float) -> None:
        self.area += self.running * (now - self.changed)
        self.changed = now


class Trace:
    """The trace of the actor of this name, in a run folder; if there is none nothing is recorded. Thread-safe."""

    def __init__(self, folder: Path | None = None, actor: str = "") -> None:
        self.actor = actor
        self._file = folder / FOLDER / f"{actor}.jsonl" if folder is not None and folder.is_dir() else None
        self._lock = threading.Lock()
        self._activities: dict[tuple[str, str], _Activity] = {}
        self._spans = list[tuple[Any, ...]]()
        self._left_out = 0
        self._writes = False
        """Whether a write is scheduled, or running."""

    @contextlib.contextmanager
    def on(self, lane: str, name: str, count: int = 1) -> Iterator[None]:
        """Record ``count`` activities of this name inside, in the lane of what is busy or waited for."""
        self.begin(lane, name, count)
        try:
            yield
        finally:
            self.end(lane, name, count)

    def begin(self, lane: str, name: str, count: int = 1) -> None:
        """Record that activities begin; `end` must follow."""
        if self._file is None:
            return
        with self._lock:
            now, activity = time.perf_counter(), self._activities.get((lane, name))
            if activity is not None and not activity.running and now - activity.changed > _GAP_S:
                self._emit(lane, name, activity)
                activity = None
            if activity is None:
                activity = self._activities[lane, name] = _Activity(now)
            activity.advance(now)
            activity.running += count
            self._schedule()

    def end(self, lane: str, name: str, count: int = 1) -> None:
        """Record that activities have ended."""
        if self._file is None:
            return
        with self._lock:
            if (activity := self._activities.get((lane, name))) is not None:
                activity.advance(time.perf_counter())
                activity.running -= count

    def add(self, lane: str, name: str, began: float, parts: Mapping[str, float]) -> None:
        """Record a span that ends now, and began at this time of `time.perf_counter`, with the seconds of its parts."""
        if self._file is not None:
            with self._lock:
                now = time.perf_counter()
                self._append(now, now - began, lane, name, 1.0, {part: round(s, 4) for part, s in parts.items()})
                self._schedule()

    def _emit(self, lane: str, name: str, activity: _Activity) -> None:
        seconds = activity.changed - activity.began
        self._append(activity.changed, seconds, lane, name, activity.area / seconds if seconds else 1.0)

    def _append(
        self, end: float, seconds: float, lane: str, name: str, load: float, *parts: Mapping[str, float]
    ) -> None:
        if len(self._spans) >= _MOST:
            self._left_out += 1
        else:
            self._spans.append((end, seconds, lane, name, load, *parts))

    def _schedule(self) -> None:
        if not self._writes:
            self._writes = True
            timer = threading.Timer(WRITE_S, self._write)
            timer.daemon = True
            timer.start()

    def _write(self) -> None:
        """Write what has ended, and what has lasted long or changed its load; again later, if something continues."""
        with self._lock:
            now = time.perf_counter()
            for (lane, name), activity in list(self._activities.items()):
                if not activity.running and now - activity.changed > _GAP_S:
                    self._emit(lane, name, self._activities.pop((lane, name)))
                elif activity.running:
                    activity.advance(now)
                    seconds = now - activity.began
                    mean = activity.area / seconds if seconds else activity.running
                    changed = abs(activity.running - mean) > 0.25 * mean + 0.5
                    if seconds >= LONGEST_S or (changed and seconds >= WRITE_S):
                        self._emit(lane, name, activity)
                        activity.began, activity.area = now, 0.0
            spans, self._spans, left_out, self._left_out = self._spans, [], self._left_out, 0
        if left_out:
            spans.append((now, 0.0, "trace", "spans left out", left_out))
        ahead = time.time() - time.perf_counter()  # by the clock of this moment: it may have been set since
        lines = [
            json.dumps([round(end + ahead, 4), round(seconds, 4), lane, name, round(load, 2), *parts])
            for end, seconds, lane, name, load, *parts in spans
        ]
        try:
            if lines and self._file is not None:
                self._file.parent.mkdir(exist_ok=True)
                with self._file.open("a") as file:
                    file.write("\n".join(lines) + "\n")
        except OSError as error:  # a full disk must not end a run that has room for its rows
            log.warning("no trace is written from now on: %s", error)
            self._file = None
        with self._lock:
            self._writes = False
            if self._file is not None and (self._activities or self._spans):
                self._schedule()
