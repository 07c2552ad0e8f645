"""Records, and what they are made of: all numbers are 0 but those that are given."""

from __future__ import annotations

import dataclasses
from typing import Any

from rayrft.buffer.events import GroupReport
from rayrft.buffer.leases import Lease
from rayrft.explorer.evaluation import wilson_interval
from rayrft.explorer.explorer import Timings
from rayrft.monitor.records import EvaluationRecord, StepRecord
from rayrft.trainer.result import FirstUpdate, StepMetrics, StepResult


def _made(kind: type, changes: dict[str, Any], **values: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{**dict.fromkeys(names, 0), **values, **{name: changes[name] for name in changes.keys() & names}})


def step(**changes: Any) -> StepRecord:
    nested = {
        "metrics": _made(StepMetrics, changes),
        "timings": _made(Timings, changes, rewards={}, operators={}),
    }
    values = {"stage": "mix", "step": 3, "usual_rows": 8, "reward": 0.5, "staleness_mean": 0.0, "step_s": 10.0}
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
