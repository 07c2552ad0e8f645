"""The timeline: which actor was busy when, and what the steps waited for."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from pydantic import Field

from rayrft.viewer.folders import Runs
from rayrft.viewer.timeline import Span, critical_path, merged, read_spans, steps_of
from rayrft.viewer.views import Query, RunRequest

_STEPS = 5
"""Steps that are shown unless others are asked for."""
_MOST = 8000
"""Most spans that are sent; of more, those that a drawing cannot tell apart are joined."""
_PIXELS = 1500
_ORDER = ("trainer", "rank-", "engine-", "evaluation", "reward", "workflow", "operators", "buffer", "explorer-")


class TimelineRequest(RunRequest):
    """Parameters of ``timeline``: steps, by default the latest, or a part of the run in Unix time."""

    first: int | None = Field(None, ge=0)
    last: int | None = Field(None, ge=0)
    start: float | None = Field(None, allow_inf_nan=False)
    end: float | None = Field(None, allow_inf_nan=False)


def _timeline(runs: Runs, asked: TimelineRequest) -> dict[str, Any]:
    run = runs.get(asked.run)
    steps = steps_of(run.records())
    newest = steps[-1].step if steps else 0
    last = newest if asked.last is None else asked.last
    first = max(last - _STEPS + 1, 0) if asked.first is None else asked.first
    chosen = [step for step in steps if first <= step.step <= last]
    start = asked.start if asked.start is not None else chosen[0].start if chosen else 0.0
    end = asked.end if asked.end is not None else chosen[-1].end if chosen else 0.0
    spans = list(read_spans(run.path, start, end))
    groups = [span for span in spans if span.parts]
    shown = [step for step in steps if step.end > start and step.start < end]
    thin = (end - start) / _PIXELS if len(spans) > _MOST else 0.0
    lanes = defaultdict[str, list[Span]](list)  # an engine has one for all that ask it
    for span in merged(spans, thin) if thin else spans:
        if not span.parts:
            lanes[span.lane].append(span)
    paths = [critical_path(step, groups) for step in shown]
    return {
        "run": run.name,
        "start": start,
        "end": end,
        "first": first,
        "last": last,
        "newest": newest,
        "joined": thin,
        "steps": [{"step": step.step, "parts": step.parts} for step in shown],
        "critical": [{"group": group, "parts": path} for group, path in paths],
        "lanes": [_lane(name, lanes[name], start, end) for name in sorted(lanes, key=_place)],
        "traced": (run.path / "trace").is_dir(),
    }


def _lane(name: str, spans: list[Span], start: float, end: float) -> dict[str, Any]:
    """Return a lane with its spans and, by name, the seconds and the mean load in the time that is shown."""
    seconds, area = dict[str, float](), dict[str, float]()
    for span in spans:
        inside = max(min(span.end, end) - max(span.start, start), 0.0)
        seconds[span.name] = seconds.get(span.name, 0.0) + inside
        area[span.name] = area.get(span.name, 0.0) + inside * span.load
    return {
        "lane": name,
        "spans": [[span.start, span.end, span.name, span.load, span.actor] for span in spans],
        "names": {each: {"seconds": s, "load": area[each] / s if s else 0.0} for each, s in seconds.items()},
    }


def _place(lane: str) -> tuple[int, int, str]:
    """Return the place of a lane: by what it is, then by its number."""
    at = next((at for at, name in enumerate(_ORDER) if lane.startswith(name)), len(_ORDER))
    return at, int((re.findall(r"\d+", lane) or ["0"])[-1]), lane


QUERIES: dict[str, Query] = {"timeline": (TimelineRequest, _timeline)}
