"""Tasks: how often they are solved, and how that changes."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from rayrft.experience import ROUNDING
from rayrft.viewer.folders import Runs
from rayrft.viewer.views import UPDATE_S, Query, RunRequest, Whole, dicts

_BINS = 40
"""Most points of a curve over the run."""


class TasksRequest(RunRequest):
    """Parameters of ``tasks``. An answer passes with a reward of at least ``least``. Two checkpoints, ``before`` and
    ``after``, are compared by answers of the ``span`` weight versions up to them: a task is unlearned if at least half
    of its answers passed before, and fewer after."""

    least: float = Field(1.0, allow_inf_nan=False)
    which: Literal["all", "solved", "unsolved", "unlearned"] = "all"
    before: Whole | None = None
    after: Whole | None = None
    span: int = Field(10, ge=1, lt=1 << 31)
    sort: Literal["tries", "rate", "-rate", "change", "-tries"] = "-tries"
    text: str = Field("", max_length=400)
    offset: Whole = 0
    limit: int = Field(50, ge=1, le=200)


_ORDERS = {"rate": "rate", "-rate": "rate desc", "tries": "tries", "-tries": "tries desc", "change": "change"}
_WHICH = {
    "all": "true",
    "solved": "passed > 0",
    "unsolved": "passed = 0",
    "unlearned": "rate_before >= 0.5 and rate_after < 0.5",
}


def _tasks(runs: Runs, asked: TasksRequest) -> dict[str, Any]:
    run = runs.get(asked.run)
    index, named = run.rows, run.task_sources()
    index.update(UPDATE_S)
    log = index.about()
    with index.cursor() as connection:
        scored = "group_status not in ('demonstration', 'evaluation') and reward is not null"
        last = connection.execute(f"select min(version), max(version) from answers where {scored}").fetchall()[0]
        first_version, last_version = (int(value or 0) for value in last)
        after = last_version if asked.after is None else asked.after
        halfway = max(first_version, after - (last_version - first_version) // 2)
        before = halfway if asked.before is None else asked.before
        passes = f"(reward >= {asked.least - ROUNDING * abs(asked.least)!r})::int"
        width = max(1, -(-(last_version - first_version + 1) // _BINS))
        bin_of = f"({first_version} + (version - {first_version}) // {width} * {width})"

        def rate_at(version: int) -> str:
            return f"avg({passes}) filter (version <= {version} and version > {version - asked.span})"

        chosen = "contains(lower(question || ' ' || task_id), lower(?))" if asked.text else "? = ''"
        table = f"""create temp table per_task as select task_id, count(*) as tries, sum({passes}) as passed,
            avg({passes}) as rate, {rate_at(before)} as rate_before, {rate_at(after)} as rate_after,
            rate_after - rate_before as change from answers where {scored} and {chosen} group by task_id"""
        connection.execute(table, [asked.text])
        shares = ", ".join(f"count(*) filter ({condition})" for condition in _WHICH.values())
        counts = connection.execute(f"select {shares} from per_task").fetchall()[0]
        order = f"{_ORDERS[asked.sort]} nulls last, task_id limit {asked.limit} offset {asked.offset}"
        tasks = dicts(connection.execute(f"select * from per_task where {_WHICH[asked.which]} order by {order}"))
        sql = f"""select task_id, {bin_of} as upto, avg({passes}), any_value(question) from answers
            where {scored} and task_id in (select unnest($1)) group by all order by upto"""
        shown: dict[str, dict[str, Any]] = {task["task_id"]: {**task, "curve": []} for task in tasks}
        for task_id, upto, rate, question in connection.execute(sql, [list(shown)]).fetchall():
            shown[task_id]["curve"].append([upto, rate])
            shown[task_id]["question"] = question
        names = [pa.array([*part], pa.string()) for part in (named, named.values())]
        connection.register("named", pa.table(names, ["task_id", "name"]))
        sql = f"""select coalesce(name, source) as source, {bin_of} as version, avg({passes}) as rate
            from answers left join named using (task_id) where {scored} group by all order by source, version"""
        sources = dicts(connection.execute(sql))
    return {
        "counts": dict(zip(_WHICH, counts, strict=True)),
        "tasks": list(shown.values()),
        "sources": sources,
        "before": before,
        "after": after,
        "width": width,
        "log": log,
    }


QUERIES: dict[str, Query] = {"tasks": (TasksRequest, _tasks)}
