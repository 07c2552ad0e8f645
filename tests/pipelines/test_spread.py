"""Operators spread over workers: the same rows, reports and errors as in one process, and memory that is bounded."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rayrft.config.pipelines import OperatorConfig
from rayrft.errors import ClusterError, OperatorFailed, OperatorTimeout
from rayrft.pipelines import Context
from rayrft.pipelines.chain import build_chain
from rayrft.pipelines.run.distributed import Result, Segment, _read, _SegmentWorker
from rayrft.pipelines.run.process import Applier, Pipeline, packed, unpacked
from rayrft.registry import load_plugins
from tests.conftest import ROOT
from tests.errors import about
from tests.pipelines.small import OWN

SCHEMA = pa.schema({"id": pa.string(), "question": pa.string()})
OPERATORS: list[dict[str, Any]] = [
    {"name": "shout"},
    {"name": "brief", "limit": 12},
    {"name": "exact_duplicates", "columns": ["question"]},
    {"name": "size"},
    {"name": "echo"},
]


def batch(*questions: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": [f"{q}-{i}" for i, q in enumerate(questions)], "question": questions})


def configs(operators: list[dict[str, Any]]) -> list[OperatorConfig]:
    return [OperatorConfig.model_validate(each) for each in operators]


class Ran:
    """What a pipeline gave, and in which order it told of it."""

    def __init__(self, batches: list[pa.RecordBatch], operators: list[dict[str, Any]], **settings: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.told: list[tuple[Any, ...]] = []
        pipeline = Pipeline(configs(operators), SCHEMA, plugins=(OWN,), **settings)
        self.report = pipeline.run(
            batches,
            lambda batch: self.rows.extend(batch.to_pylist()),
            left_out=lambda operator, gone: self.told.append((operator, *((row.row, row.reason) for row in gone))),
            progress=lambda operator, taken: self.told.append((operator, taken)),
        )
        for each in self.report.operators:
            each.seconds = 0.0


BATCHES = [
    batch(*(f"question {i * i % 37}" if i % 5 else f"quite a long question {i}" for i in range(start, start + 7)))
    for start in range(0, 70, 7)
]


@pytest.mark.usefixtures("ray_cluster")
def test_workers_give_what_one_process_gives_in_its_order() -> None:
    one, two = (Ran(BATCHES, OPERATORS, workers=workers) for workers in (1, 2))
    assert sum(row["made_by"] is None for row in one.rows) == 19 and len(one.rows) == 38
    assert two.rows == one.rows
    assert two.report == one.report
    for operator in (0, 1, 2, 3, 4, "brief", "exact_duplicates"):
        told = [[each for each in ran.told if each[0] == operator] for ran in (one, two)]
        assert told[0] == told[1] and told[0], "what was left out is told, and how far it is"


def test_the_first_batch_that_fails_in_their_order_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster: batches come back in their order, whichever failed first."""

    def results(segment: Segment, path: Path, batches: int, workers: int) -> Generator[Result, None, None]:
        worker = _SegmentWorker(segment)
        done = [pickle.loads(worker(_read(str(path), {"id": number}))["result"]) for number in (2, 1, 0)]
        yield from reversed(done)

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("rayrft.pipelines.run.distributed._results", results)
    given = [batch("good"), batch("fine", "bad"), batch("bad")]
    with pytest.raises(OperatorFailed, check=about("operators.1.raises"), match=r"no such thing") as caught:
        Ran(given, [{"name": "size"}, {"name": "raises"}], workers=2)
    assert "begins with fine-0" in caught.value.problem


def test_workers_of_which_none_ever_answers_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def results(segment: Segment, path: Path, batches: int, workers: int) -> Generator[Result, None, None]:
        release.wait(30)
        yield Result()

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("rayrft.pipelines.run.distributed._results", results)
    monkeypatch.setattr("rayrft.pipelines.run.distributed.START_S", 0.1)
    with pytest.raises(OperatorTimeout, check=about("operators.0.size")):
        Ran([batch("good")], [{"name": "size"}], workers=2, deadline_s=0.1)
    release.set()


def segment(*operators: dict[str, Any], deadline_s: float = 60.0, **settings: Any) -> Segment:
    load_plugins((OWN,))
    build = partial(build_chain, configs([*operators]), SCHEMA, field="operators", origin="test", context=Context())
    numbers = tuple(range(len(operators)))
    return Segment(
        numbers, build, partial(Applier, build, 3, settings.get("leave_out", False), numbers), (OWN,), deadline_s
    )


def worked(worker: _SegmentWorker, given: pa.RecordBatch) -> Result:
    result: Result = pickle.loads(worker({"rows": packed(given)})["result"])
    return result


def test_a_worker_applies_operators_and_tells_what_each_did() -> None:
    worker = _SegmentWorker(segment({"name": "shout"}, {"name": "brief", "limit": 4}))
    result = worked(worker, batch("cat", "horse"))
    assert result.rows is not None and unpacked(result.rows)["question"].to_pylist() == ["CAT!"]
    assert [(number, outcome.taken, outcome.given) for number, outcome in result.outcomes] == [(0, 2, 2), (1, 2, 1)]
    nothing = worked(worker, batch("horses"))
    assert nothing.rows is None and nothing.failure is None and len(nothing.outcomes) == 2


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("raises", OperatorFailed, "no such thing"),
        ("hangs", OperatorTimeout, "deadline_s"),
        ("dies", OperatorFailed, "exit code 7"),
    ],
)
def test_what_ends_an_operator_is_the_result_of_the_batch(name: str, kind: type[OperatorFailed], words: str) -> None:
    worker = _SegmentWorker(segment({"name": "size"}, {"name": name}, deadline_s=2.0 if name == "hangs" else 60.0))
    assert worked(worker, batch("good")).failure is None
    failed = worked(worker, batch("good", "bad"))
    assert type(failed.failure) is kind and words in str(failed.failure) and failed.rows is None
    assert failed.failure.field == f"operators.1.{name}" and "good-0" in failed.failure.problem
    assert [number for number, _ in failed.outcomes] == [0], "what came before it counts"


def test_a_worker_whose_operators_cannot_be_started_says_so() -> None:
    result = worked(_SegmentWorker(segment({"name": "cannot_prepare"})), batch("good"))
    assert result.failure is not None and "could not be started" in str(result.failure)


def test_rows_on_which_an_operator_raises_are_left_out_by_a_worker_too() -> None:
    worker = _SegmentWorker(segment({"name": "raises"}, leave_out=True))
    result = worked(worker, batch("good", "bad"))
    assert result.rows is not None and unpacked(result.rows)["question"].to_pylist() == ["good"]


def test_without_a_cluster_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ClusterError, check=about("operators.0.shout")):
        Ran(BATCHES, OPERATORS[:1], workers=2)


@pytest.mark.parametrize(
    ("mib", "workers"),
    [(120, 1), pytest.param(400, 1, marks=pytest.mark.slow), pytest.param(400, 2, marks=pytest.mark.slow)],
)
def test_more_rows_than_memory_may_hold_go_through(mib: int, workers: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.pipelines.large", str(tmp_path), str(mib), str(workers)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["grown"] < (150 if mib < 200 else 220), "it holds a part of the rows at a time"
    assert found["child"] < 400, "as do operators that look at all of them"
