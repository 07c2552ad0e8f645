"""Advice: why the reward of a run may be flat."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from rayrft.viewer.advisories import Evidence, advise
from rayrft.viewer.folders import Runs
from rayrft.viewer.views import UPDATE_S, Query, RunRequest
from rayrft.viewer.views.runs import greedy


def _advice(runs: Runs, asked: RunRequest) -> dict[str, Any]:
    run = runs.get(asked.run)
    run.rows.update(UPDATE_S)
    log, records = run.rows.about(), run.records()
    columns = records.columns()
    first = records.stage_starts[-1][1] if records.stage_starts else 0
    own = np.flatnonzero((columns["step"] >= first) & (columns.get("usual_rows", np.zeros(1)) > 0))
    with run.rows.cursor() as connection:
        evidence = Evidence(
            {name: values[own] for name, values in columns.items()},
            [each for each in greedy(records) if each["step"] >= first],
            records.marks,
            connection,
            [gap["row"] for gap in records.widest(3)],
        )
        found = advise(evidence)
    told = [asdict(each) | {"logged": each.logged or log["lags"]} for each in found]
    return {"advisories": told, "steps": len(own), "log": log}


QUERIES: dict[str, Query] = {"advice": (RunRequest, _advice)}
