"""Traces of actors: what is recorded of concurrent activities, and what a failing disk costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rayrft.runtime import trace as module
from rayrft.runtime.trace import LONGEST_S, Trace
from rayrft.runtime.waits import Waits


class Clock:
    """The time, and the timers that are due once it has come."""

    def __init__(self) -> None:
        self.now, self._timers = 100.0, list[tuple[float, Callable[[], None]]]()

    def timer(self, seconds: float, call: Callable[[], None]) -> Any:
        due = self.now + seconds

        class Timer:
            daemon = False

            def start(_) -> None:
                self._timers.append((due, call))

        return Timer()

    def pass_(self, seconds: float) -> None:
        """Let time pass, and timers ring on their way."""
        end = self.now + seconds
        while self._timers and min(self._timers)[0] <= end:
            self.now, call = self._timers.pop(self._timers.index(min(self._timers, key=lambda each: each[0])))
            call()
        self.now = end

    @property
    def armed(self) -> int:
        return len(self._timers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.threading, "Timer", clock.timer)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(module.time, "time", lambda: 1_000_000 + clock.now)
    return clock


def spans(folder: Path, actor: str = "explorer-0") -> list[list[Any]]:
    file = folder / "trace" / f"{actor}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_concurrent_activities_are_one_span_with_their_mean_number(clock: Clock, tmp_path: Path) -> None:
    trace = Trace(tmp_path, "explorer-0")
    with trace.on("engine-0", "generate", 4):
        clock.pass_(0.1)
        with trace.on("engine-0", "generate"), trace.on("engine-0", "score"):
            clock.pass_(0.1)
        clock.pass_(0.2)
    clock.pass_(0.002)  # too short an interruption to be one
    with trace.on("engine-0", "generate"):
        clock.pass_(0.098)
    clock.pass_(5)
    generate, score = sorted(spans(tmp_path), key=lambda span: span[3])
    assert generate == [1_000_100.5, 0.5, "engine-0", "generate", pytest.approx((1.6 + 0.1 + 0.098) / 0.5, abs=0.01)]
    assert score == [1_000_100.2, 0.1, "engine-0", "score", 1.0]
    assert clock.armed == 0  # nothing is written while nothing is recorded


def test_what_pauses_is_two_spans(clock: Clock, tmp_path: Path) -> None:
    trace = Trace(tmp_path, "explorer-0")
    for _ in range(2):
        with trace.on("trainer", "train"):
            clock.pass_(0.05)
        clock.pass_(0.01)
    clock.pass_(5)
    assert [(round(end, 2), seconds) for end, seconds, *_ in spans(tmp_path)] == [
        (1_000_100.05, 0.05),
        (1_000_100.11, 0.05),
    ]


def test_a_long_activity_is_written_while_it_continues_and_when_its_load_falls(clock: Clock, tmp_path: Path) -> None:
    trace = Trace(tmp_path, "explorer-0")
    trace.begin("engine-0", "generate", 32)
    clock.pass_(LONGEST_S + 1)
    first = spans(tmp_path)
    assert [span[4] for span in first] == [32.0]
    trace.end("engine-0", "generate", 31)  # one straggler is left
    clock.pass_(1)
    assert spans(tmp_path)[1][4] > 20
    clock.pass_(3 * LONGEST_S)
    trace.end("engine-0", "generate")
    clock.pass_(1)
    found = spans(tmp_path)
    assert found[-1][4] == 1.0 and sum(span[1] for span in found) == pytest.approx(4 * LONGEST_S + 2, abs=1.0)
    ends = [(end - seconds, end) for end, seconds, *_ in found]
    assert all(abs(before[1] - after[0]) < 1e-3 for before, after in pairwise(ends))


def test_waits_with_a_name_are_traced_and_the_others_are_not(clock: Clock, tmp_path: Path) -> None:
    waits = Waits("explorer", Trace(tmp_path, "explorer-0"))
    with waits.on("buffer", "put", name="put"), waits.on("engines", "room in their caches"):
        clock.pass_(1)
    with pytest.raises(KeyError), waits.on("trainer", "train", name="train"):
        clock.pass_(1)
        raise KeyError
    clock.pass_(5)
    assert [span[2:4] for span in spans(tmp_path)] == [["buffer", "put"], ["trainer", "train"]]


def test_without_a_run_folder_nothing_is_recorded(clock: Clock, tmp_path: Path) -> None:
    for trace in (Trace(), Trace(tmp_path / "gone", "explorer-0")):
        with trace.on("engine-0", "generate"):
            clock.pass_(10)
    assert not list(tmp_path.iterdir()) and clock.armed == 0


def test_a_disk_that_fails_ends_the_trace_and_nothing_else(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace").write_text("a file where the folder should be")
    trace = Trace(tmp_path, "explorer-0")
    for _ in range(3):
        with trace.on("engine-0", "generate"):
            clock.pass_(10)
    assert clock.armed == 0
    assert [record.message for record in caplog.records if "no trace is written" in record.message] != []
    assert len(caplog.records) == 1


def test_spans_that_a_hanging_disk_does_not_take_are_left_out_and_counted(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    trace = Trace(tmp_path, "explorer-0")
    for number in range(5):
        trace.add("groups", f"group {number}", clock.now - 1, {"rollout": 1.0})
    clock.pass_(1)
    found = spans(tmp_path)
    assert [span[3] for span in found] == ["group 0", "group 1", "group 2", "spans left out"] and found[-1][4] == 2
    assert found[0][5] == {"rollout": 1.0}
