"""The final report of a run: a table of accuracies and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rayrft.monitor.console import temperature_name
from rayrft.monitor.records import EvaluationRecord, PairsRecord, Record, accuracy_text


def accuracy_table(records: Sequence[Record]) -> str:
    """Format accuracies before the first stage and after every stage, by temperature, with counts and 95 % intervals,
    and those on held-out preference pairs. The best evaluation of a stage is shown beside its last."""
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    pairs = _pairs([record for record in records if isinstance(record, PairsRecord)])
    if not evaluations:
        return "\n".join(pairs) or "no evaluation was made"
    temperatures = sorted({record.temperature for record in evaluations})
    first = evaluations[0].stage
    parts = {"untrained": [e for e in evaluations if e.stage == first and e.stage_step == 0]}
    for record in evaluations:
        if record.stage_step > 0:
            parts.setdefault(f"after {record.stage}", []).append(record)
    rows = [["", *map(temperature_name, temperatures)]]
    for label, part in parts.items():
        rows.append([label, *(_cell([record for record in part if record.temperature == t]) for t in temperatures)])
    return "\n".join([format_table(rows), *([""] if pairs else []), *pairs])


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells in columns, with a rule under the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _pairs(records: list[PairsRecord]) -> list[str]:
    """Format the rankings of held-out pairs, a line for each stage."""
    stages: dict[str, list[PairsRecord]] = {}
    for record in records:
        stages.setdefault(record.stage, []).append(record)
    return [f"held-out pairs after {name}: {_cell(r)}, by {r[-1].margin:.3f}" for name, r in stages.items()]


def _cell(points: Sequence[EvaluationRecord | PairsRecord]) -> str:
    if not points:
        return "-"
    last, best = points[-1], max(points, key=lambda point: point.accuracy)
    text = accuracy_text(last)
    return text if len(points) == 1 else f"{text}, best {best.accuracy:.3f} at step {best.stage_step}"


def save_plot(records: Iterable[Record], path: Path, title: str) -> None:
    """Write the plot of a run as a PNG. ``records`` are read once."""
    from rayrft.monitor.plot import RunPlot

    RunPlot(records, title).savefig(path, dpi=120)
