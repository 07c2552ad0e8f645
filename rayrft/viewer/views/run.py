"""One run: its numbers by step, and what happened when."""

from __future__ import annotations

from typing import Any

from rayrft.viewer.folders import Runs
from rayrft.viewer.records import thin
from rayrft.viewer.views import POINTS, Query, RunRequest


def _curves(runs: Runs, asked: RunRequest) -> dict[str, Any]:
    run = runs.get(asked.run)
    about, records = run.status(), run.table
    columns, share = thin(records.columns(), POINTS)
    return {
        **about,
        "mean_of": share,
        "columns": {name: column.tolist() for name, column in columns.items()},
        "evaluations": records.evaluations,
        "marks": records.marks,
        "widest_gap": next(iter(records.widest(1)), None),
        "stage_starts": records.stage_starts,
    }


QUERIES: dict[str, Query] = {"run": (RunRequest, _curves)}
