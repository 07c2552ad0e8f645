"""All runs: their status, their latest numbers, and several on one axis."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rayrft.viewer.folders import RunFolder, Runs
from rayrft.viewer.records import RecordTable, thin
from rayrft.viewer.views import POINTS, Query, StorageRequest

_SPARK = 80
"""Points of a sparkline."""


class CompareRequest(StorageRequest):
    """Parameters of ``compare``: the runs, by name and separated by commas, a field of the records, and an axis."""

    runs: str = Field(max_length=4096)
    metric: str = Field("reward", max_length=128)
    axis: Literal["step", "samples", "tokens", "hours"] = "step"


def _list(runs: Runs, asked: StorageRequest) -> dict[str, Any]:
    found = []
    for run in runs.all():
        about = run.status()
        records = run.table
        evaluations = greedy(records)
        accuracy = [[each["step"], each["accuracy"]] for each in evaluations]
        evaluated = evaluations[-1].get("version") if evaluations else None  # pairs have no answers
        reward = thin({"reward": records.columns("reward")["reward"]}, _SPARK)[0]["reward"].tolist()
        found.append({**about, "reward": reward, "accuracy": accuracy[-_SPARK:], "evaluated": evaluated})
    return {"storage": str(runs.storage), "runs": sorted(found, key=lambda each: -each["changed"])}


def greedy(records: RecordTable) -> list[dict[str, Any]]:
    """Return the evaluations at the lowest temperature, which say most about the policy; else those of pairs."""
    least = min((each["temperature"] for each in records.evaluations if "temperature" in each), default=None)
    return [each for each in records.evaluations if each.get("temperature") == least]


def _compare(runs: Runs, asked: CompareRequest) -> dict[str, Any]:
    found, names = [], set[str]()
    for run in map(runs.get, filter(None, asked.runs.split(","))):
        columns = run.records().columns()
        names |= columns.keys() - {"step", "time", "samples", "tokens", "hours"} | {"accuracy"}
        if asked.metric == "accuracy":
            found.append(_accuracy(run, columns, asked.axis))
        elif asked.metric in columns:
            chosen = {"x": columns[asked.axis], "y": columns[asked.metric], "steps": columns["step"]}
            points, share = thin(chosen, POINTS)
            found.append({"run": run.name, **{name: each.tolist() for name, each in points.items()}, "mean_of": share})
    return {"curves": found, "metrics": sorted(names)}


def _accuracy(run: RunFolder, columns: dict[str, Any], axis: str) -> dict[str, Any]:
    """Return the held-out accuracy at the axis's value of the step that was evaluated."""
    at = dict(zip(columns["step"].tolist(), columns[axis].tolist(), strict=True))
    measured = greedy(run.table)
    found = {"x": [at.get(each["step"], 0.0) for each in measured], "y": [each["accuracy"] for each in measured]}
    return {"run": run.name, **found, "versions": [each.get("version") for each in measured], "mean_of": 1}


QUERIES: dict[str, Query] = {"runs": (StorageRequest, _list), "compare": (CompareRequest, _compare)}
