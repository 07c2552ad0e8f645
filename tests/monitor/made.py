"""Records, and what they are made of: all numbers are 0 but those that are given."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

from rayrft.buffer.events import GroupReport
from rayrft.buffer.leases import Lease
from rayrft.buffer.ledger import Ledger
from rayrft.explorer.evaluation import wilson_interval
from rayrft.explorer.explorer import Timings
from rayrft.monitor.records import (
    EvaluationRecord,
    NoteRecord,
    PairsRecord,
    Record,
    RestartRecord,
    RolloutRecord,
    StepRecord,
)
from rayrft.pipelines.report import OperatorStats
from rayrft.rewards.scorer import DomainStats
from rayrft.trainer.result import FirstUpdate, PairRanking, StepMetrics, StepResult
from tests.conftest import ROOT


def _made(kind: type, changes: dict[str, Any], **values: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{**dict.fromkeys(names, 0), **values, **{name: changes[name] for name in changes.keys() & names}})


def step(**changes: Any) -> StepRecord:
    nested = {
        "metrics": _made(StepMetrics, changes),
        "timings": _made(Timings, changes, rewards={}, operators={}, problems={}),
    }
    values = {
        "stage": "mix",
        "step": 3,
        "usual_rows": 8,
        "reward": 0.5,
        "staleness_mean": 0.0,
        "step_s": 10.0,
        "ledger": None,
        "widest_gap": None,
    }
    record: StepRecord = _made(StepRecord, changes, lost={}, **nested, **values)
    return record


def evaluation(stage: str, stage_step: int, right: int, temperature: float = 0.0, step: int = 0) -> EvaluationRecord:
    share, interval = right / 100, wilson_interval(right, 100)
    measured = (share, *interval, right, 100, 0.5, 0, 1.0, 1, share, 4.0, 0.0, 0)
    return EvaluationRecord(stage, step, stage_step, 0.0, step, temperature, *measured)


def result(first_update: FirstUpdate | None = None, **changes: Any) -> StepResult:
    """Of a step on ten of the policy's tokens, on which engine and trainer agree."""
    metrics = _made(StepMetrics, changes, logprob_gap=1e-6, policy_tokens=10)
    return StepResult(metrics, first_update or FirstUpdate(0.0, 0.04), {})


def lease(*staleness: int, rollouts: GroupReport | None = None) -> Lease:
    return Lease(0, 0, (), 8, 0, staleness, rollouts or GroupReport(), 0.0)


def every_record() -> list[Record]:
    """A record of every kind in which no number is 0, after a step whose loss is not a number."""
    numbers = [each for kind in (StepRecord, StepMetrics, Timings, RolloutRecord) for each in dataclasses.fields(kind)]
    ones = {each.name: 1 for each in numbers if each.type in ("int", "float", "int | None", "float | None")}
    stats = {"rewards": {"math": DomainStats(*[1] * 7)}, "operators": {"longest": OperatorStats(*[1] * 6)}}
    changes = {
        **ones,
        **stats,
        "time": time.time(),
        "ledger": Ledger(20, 8, {"stale": 3, "late": 1}, 8, {"too long": 1}),
    }
    explored = _made(RolloutRecord, changes, stage="fill", lost={}, timings=_made(Timings, changes, problems={}))
    return [
        step(**{**changes, "loss": math.nan}),
        step(**changes),
        explored,
        evaluation("mix", 2, 50),
        PairsRecord.of("prefer", 3, 3, PairRanking(10, 8, 0.5), 1.0),
        RestartRecord("mix", 3, time.time(), "explorer", "run:explorer", "its process died", 2.0),
        NoteRecord("mix", 3, time.time(), "max_staleness: 0 -> 3", {"key": "max_staleness", "old": 0, "new": 3}),
    ]


def documented() -> set[str]:
    """The names in the first cells of the README's table."""
    table = (
        (ROOT / "rayrft" / "monitor" / "README.md").read_text().split("## Metrics in Prometheus")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)
    return {name for cell in rows for name in re.findall(r"`(rayrft_\w+)`", cell)}
