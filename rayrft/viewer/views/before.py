"""Before a run: what its config needs of GPUs and disk, and what is wrong with the machines, as tables."""

from __future__ import annotations

from typing import Any, Literal

from rayrft.config import load_run_config
from rayrft.errors import RayrftError
from rayrft.runtime.serving.http import ApiError
from rayrft.viewer.folders import Runs
from rayrft.viewer.views import Query, RunRequest


class ReportRequest(RunRequest):
    """Parameters of ``report``: the plan, or what the doctor finds, who takes seconds and may examine a cluster."""

    name: Literal["plan", "doctor"] = "plan"


def _report(runs: Runs, asked: ReportRequest) -> dict[str, Any]:
    folder = runs.get(asked.run).path
    if asked.name not in runs.reports:
        raise ApiError(404, "This viewer has no such report.", code="report_not_found", param="name")
    try:
        rows = runs.reports[asked.name](load_run_config(folder))
    except RayrftError as error:  # such as a model that is not on this machine
        return {"problem": str(error), "rows": []}
    return {"problem": "", "rows": [getattr(row, "cells", vars(row)) for row in rows]}


QUERIES: dict[str, Query] = {"report": (ReportRequest, _report)}
