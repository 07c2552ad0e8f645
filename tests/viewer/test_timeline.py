"""The timeline of a run: spans of a time, the critical path of a step, and the trace for Perfetto."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayrft.cli.main import app
from rayrft.errors import DataError
from rayrft.monitor.records import RecordFile
from rayrft.viewer.timeline import Span, StepTimes, critical_path, merged, perfetto, read_spans, write_perfetto
from tests.monitor.made import step
from tests.viewer.recorded import write_spans

LANES = ("engine-0", "engine-1", "trainer", "buffer")


def test_the_spans_of_any_time_are_those_that_overlap_it(tmp_path: Path) -> None:
    chance, time, lines = random.Random(3), 1e9, []
    for number in range(6000):
        time += chance.expovariate(2)
        lines.append([time - chance.uniform(0, 1.5), chance.uniform(0, 5), chance.choice(LANES), f"a{number % 7}", 1.0])
    write_spans(tmp_path, "master", lines)
    for _ in range(50):
        start = chance.uniform(1e9 - 100, time + 100)
        end = start + chance.choice([0.5, 20.0, 1000.0])
        expected = sorted(tuple(line[:4]) for line in lines if line[0] >= start and line[0] - line[1] < end)
        found = sorted((span.end, span.seconds, span.lane, span.name) for span in read_spans(tmp_path, start, end))
        assert found == expected


def test_lines_that_a_crash_has_torn_are_skipped(tmp_path: Path) -> None:
    write_spans(tmp_path, "master", [[10.0, 1.0, "trainer", "train", 1.0]])
    with (tmp_path / "trace" / "master.jsonl").open("a") as file:
        file.write('[11.0, 1.0, "tra\n{}\n[]\n\x00\x00\n')
    write_spans(tmp_path, "master", [[12.0, 1.0, "trainer", "send", 1.0]])
    assert [span.name for span in read_spans(tmp_path, 0, 100)] == ["train", "send"]
    assert list(read_spans(tmp_path / "none", 0, 100)) == []


WAITED = StepTimes(4, start=100.0, wait_s=6.0, train_s=3.0, sync_s=1.0, end=110.0)


def group(name: str, end: float, **parts: float) -> Span:
    return Span(end, sum(parts.values()), "groups", name, parts=parts)


def test_a_step_waited_for_the_group_that_came_last_in_time() -> None:
    groups = [
        group("early", 103.0, rollout=2.0, reward=0.5),
        group("last", 105.9, rollout=3.0, reward=1.5, operators=0.5, store=0.1),
        group("worse dropped", 105.95, rollout=9.0),
        group("too late", 106.5, rollout=9.0),
    ]
    name, path = critical_path(WAITED, groups)
    assert name == "last"
    assert [part for part, *_ in path] == [
        "admission",
        "rollout",
        "reward",
        "operators",
        "store",
        "lease",
        "train",
        "sync",
    ]
    seconds = [(part, round(end - start, 3)) for part, start, end in path]
    waited = [("admission", 0.8), ("rollout", 3.0), ("reward", 1.5), ("operators", 0.5), ("store", 0.1), ("lease", 0.1)]
    assert seconds == [*waited, ("train", 3.0), ("sync", 1.0)]
    assert path[0][1] == 100.0 and all(abs(before[2] - after[1]) < 1e-6 for before, after in pairwise(path))


def test_what_a_group_did_before_the_wait_is_not_on_the_path() -> None:
    name, path = critical_path(WAITED, [group("long", 101.0, rollout=60.0, reward=0.4, store=0.1)])
    assert name == "long" and path[0] == ("rollout", 100.0, pytest.approx(100.5))
    name, path = critical_path(WAITED, [group("before", 99.0, rollout=5.0)])
    assert name == "" and [part for part, *_ in path] == ["wait", "train", "sync"]


def test_joined_spans_keep_their_load() -> None:
    spans = [
        Span(1.0, 1.0, "e", "g", 8.0),
        Span(2.0, 1.0, "e", "g", 2.0),
        Span(2.0, 0.5, "e", "other"),
        Span(9.0, 1.0, "e", "g"),
    ]
    found = merged(spans, gap_s=0.5)
    assert sorted((span.name, span.start, span.end, span.load) for span in found) == [
        ("g", 0.0, 2.0, 5.0),
        ("g", 8.0, 9.0, 1.0),
        ("other", 1.5, 2.0, 1.0),
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three steps of ten seconds and its traces."""
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: words\n")
    records = RecordFile(folder)
    for number in (1, 2, 3):
        records.append(step(step=number, time=1e9 + 10 * number, step_s=10.0, wait_s=6.0, train_s=3.0, sync_s=1.0))
        at = 1e9 + 10 * (number - 1)
        write_spans(folder, "master", [[at + 6, 6.0, "buffer", "lease", 1.0], [at + 9, 3.0, "trainer", "train", 1.0]])
        write_spans(folder, "explorer-0", [[at + 5, 4.0, "engine-0", "generate", 24.0]])
        write_spans(
            folder,
            "explorer-0",
            [[at + 5.9, 5.0, "groups", f"words/mix/{number}/t", 1.0, {"rollout": 4.0, "reward": 1.0}]],
        )
    records.close()
    return folder


def test_the_trace_for_perfetto_nests_and_names_what_each_step_waited_for(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    assert write_perfetto(run, file) > 20
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks = defaultdict[tuple[int, int], list[tuple[int, int, str]]](list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert set(tracks) <= named
    for spans in tracks.values():  # a viewer draws only what is inside another span, or apart from it
        for start, end, _ in spans:
            assert all(
                (s <= start and end <= e) or (start <= s and e <= end) or e <= start or end <= s for s, e, _ in spans
            )
    opened = defaultdict[str, int](int)
    for event in sorted((e for e in events if e["ph"] in "be"), key=lambda e: e["ts"]):
        opened[event["id"]] += 1 if event["ph"] == "b" else -1
    assert set(opened) == {f"words/mix/{n}/t" for n in (1, 2, 3)} and not any(opened.values())
    waited = [e["args"]["group"] for e in events if e["ph"] == "X" and e["name"] == "reward"]
    assert waited == [f"words/mix/{n}/t" for n in (1, 2, 3)]
    assert {e["args"]["load"] for e in events if e["ph"] == "C"} == {24.0, 0.0}


def test_a_trace_has_the_steps_that_are_asked_for(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(run), "--to", str(tmp_path / "two.json"), "--steps", "2:2"])
    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "two.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["name"].startswith("step ")} == {"step 2"}
    assert min(e["ts"] for e in events if "ts" in e) >= 1e6 * (1e9 + 8)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    return str(caught.value)


def test_a_run_without_traces_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    assert "no traces of these steps" in refused(lambda: write_perfetto(run, tmp_path / "t.json", first=9))
    for file in (run / "trace").iterdir():
        file.unlink()
    (run / "trace").rmdir()
    assert "monitor.trace" in refused(lambda: write_perfetto(run, tmp_path / "t.json"))
    assert not (tmp_path / "t.json").exists()
    wrong = CliRunner().invoke(app, ["trace", str(run), "--steps", "2-3"])
    assert wrong.exit_code != 0 and "FIRST:LAST" in str(wrong.exception)


def test_perfetto_takes_a_run_without_spans() -> None:
    assert [e["name"] for e in perfetto([], [WAITED]) if e["ph"] == "X" and "step" in e["name"]] == ["step 4"]
