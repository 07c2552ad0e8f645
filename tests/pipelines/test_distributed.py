"""Operators distributed over workers: the same rows, reports and errors as in one process, in bounded memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ray.exceptions import ActorDiedError

from rayrft.errors import ClusterError, OperatorFailed, OperatorTimeout
from rayrft.pipelines import Context
from rayrft.pipelines.chain import build_chain
from rayrft.pipelines.run.distributed import BatchResult, OperatorWorker, Segment
from rayrft.pipelines.run.host import OperatorHost, packed, unpacked
from rayrft.pipelines.run.process import Pipeline
from rayrft.registry import load_plugins
from rayrft.runtime.handle import Handle
from tests.conftest import ROOT
from tests.errors import about
from tests.pipelines.small import OWN, operator
from tests.scripted import remote

pytestmark = pytest.mark.usefixtures("forked_templates")

SCHEMA = pa.schema({"id": pa.string(), "question": pa.string()})
OPERATORS: list[dict[str, Any]] = [
    *[{"name": "shout"}, {"name": "brief", "limit": 12}, {"name": "exact_duplicates", "columns": ["question"]}],
    *[{"name": "size"}, {"name": "echo"}],
]


def batch(*questions: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": [f"{q}-{i}" for i, q in enumerate(questions)], "question": questions})


class Ran:
    """What a pipeline gave, and in which order it told of it."""

    def __init__(self, batches: list[pa.RecordBatch], operators: list[dict[str, Any]], **settings: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.told: list[tuple[Any, ...]] = []
        pipeline = Pipeline([operator(**each) for each in operators], SCHEMA, plugins=(OWN,), **settings)
        self.report = pipeline.run(
            batches,
            lambda batch: self.rows.extend(batch.to_pylist()),
            left_out=lambda operator, gone: self.told.append((operator, *((row.row, row.reason) for row in gone))),
            progress=lambda operator, taken: self.told.append((operator, taken)),
        )
        for each in self.report:
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
    for who in (0, 1, 2, 3, 4, "brief", "exact_duplicates"):
        told = [[each for each in ran.told if each[0] == who] for ran in (one, two)]
        assert told[0] == told[1] and told[0], "what was left out is told, and how far it is"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Workers of this process that stand for actors of a cluster, first come, first created."""
    known = list[Any]()
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(Handle, "kill", lambda self: None)
    monkeypatch.setattr("rayrft.pipelines.run.distributed._create", lambda segment: remote(known.pop(0)(segment)))
    return known


def test_the_first_batch_that_fails_in_their_order_ends_it(workers: list[Any]) -> None:
    turns = [asyncio.Event() for _ in range(3)]
    turns[2].set()

    class Reversed(OperatorWorker):
        """Is done with the last of three batches first."""

        async def apply(self, message: bytes) -> BatchResult:
            number = ["good", "fine", "bad"].index(unpacked(message)["question"][0].as_py())
            await turns[number].wait()
            result = await super().apply(message)
            turns[number - 1].set()
            return result

    workers += [Reversed, Reversed]
    given = [batch("good"), batch("fine", "bad"), batch("bad")]
    with pytest.raises(OperatorFailed, check=about("operators.1.raises"), match=r"no such thing") as caught:
        Ran(given, [{"name": "size"}, {"name": "raises"}], workers=2)
    assert "begins with fine-0" in caught.value.problem


class NeverPlaced(OperatorWorker):
    async def start(self) -> None:
        await asyncio.Event().wait()


def test_workers_that_never_start_are_given_up_and_refused_without_a_cluster(
    workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers += [NeverPlaced, NeverPlaced]
    monkeypatch.setattr("rayrft.pipelines.run.distributed.START_S", 0.1)
    with pytest.raises(OperatorTimeout, check=about("operators.0.size")):
        Ran([batch("good")], [{"name": "size"}], workers=2, deadline_s=0.1)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ClusterError, check=about("operators.0.shout")):
        Ran(BATCHES, OPERATORS[:1], workers=2)


def test_a_worker_that_the_cluster_has_no_room_for_is_not_waited_for_and_one_that_dies_is_replaced(
    workers: list[Any],
) -> None:
    class Dies(OperatorWorker):
        async def apply(self, message: bytes) -> BatchResult:
            raise ActorDiedError

    workers += [NeverPlaced, Dies, OperatorWorker]
    ran = Ran(BATCHES, OPERATORS[:1], workers=2)
    assert ran.rows == Ran(BATCHES, OPERATORS[:1]).rows and not workers
    workers += [Dies] * 20
    with pytest.raises(OperatorFailed, check=about("operators.0.shout"), match="the workers failed"):
        Ran(BATCHES, OPERATORS[:1], workers=2)


def segment(*operators: dict[str, Any], leave_out: bool = False) -> Segment:
    load_plugins((OWN,))
    configs = [operator(**each) for each in operators]
    build = partial(build_chain, configs, SCHEMA, field="operators", origin="test", context=Context())
    numbers = tuple(range(len(operators)))
    create = partial(OperatorHost, build, 3, leave_out, numbers)
    return Segment(numbers, [link.field for link in build()], create, (OWN,), 60.0)


async def worked(segment: Segment, *batches: pa.RecordBatch) -> list[BatchResult]:
    worker = OperatorWorker(segment)
    results = [await worker.apply(packed(each)) for each in batches]
    await worker.close()
    return results


async def test_a_worker_tells_what_each_operator_did_and_leaves_out_rows_on_which_one_raises() -> None:
    operators = segment({"name": "shout"}, {"name": "brief", "limit": 4})
    result, nothing = await worked(operators, batch("cat", "horse"), batch("horses"))
    assert result.rows is not None and unpacked(result.rows)["question"].to_pylist() == ["CAT!"]
    assert [(number, outcome.taken, outcome.given) for number, outcome in result.outcomes] == [(0, 2, 2), (1, 2, 1)]
    assert nothing.rows is None and nothing.failure is None and len(nothing.outcomes) == 2
    [result] = await worked(segment({"name": "cannot_prepare"}), batch("good"))
    assert result.failure is not None and "could not be started" in str(result.failure)
    [result] = await worked(segment({"name": "raises"}, leave_out=True), batch("good", "bad"))
    assert result.rows is not None and unpacked(result.rows)["question"].to_pylist() == ["good"]


async def test_an_error_of_an_operator_is_the_result_of_the_batch() -> None:
    good, failed = await worked(segment({"name": "size"}, {"name": "dies"}), batch("good"), batch("good", "bad"))
    assert good.failure is None and failed.rows is None
    assert type(failed.failure) is OperatorFailed and "exit code 7" in str(failed.failure)
    assert failed.failure.field == "operators.1.dies" and "good-0" in failed.failure.problem
    assert [number for number, _ in failed.outcomes] == [0], "what came before it counts"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_more_rows_than_memory_may_hold_go_through(workers: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.pipelines.large", str(tmp_path), "400", str(workers)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["grown"] < 220, "it holds a part of the rows at a time"
    assert found["child"] < 400, "as do operators that look at all of them"
