"""The final report of a run: a table of accuracies and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rayrft.monitor.console import temperature_name
from rayrft.monitor.records import EvaluationRecord, PairsRecord, Record, StepRecord


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
    text = f"{last.accuracy:.3f} ({last.right}/{last.count}, {last.low:.3f}-{last.high:.3f})"
    return text if len(points) == 1 else f"{text}, best {best.accuracy:.3f} at step {best.stage_step}"


def save_plot(records: Iterable[Record], path: Path, title: str) -> None:
    """Plot reward and held-out accuracy over the steps of all stages, as a PNG. ``records`` are read once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rewarded, evaluations, starts = list[tuple[int, float]](), list[EvaluationRecord](), dict[str, int]()
    for record in records:
        if isinstance(record, EvaluationRecord):
            evaluations.append(record)
        elif isinstance(record, StepRecord):
            starts.setdefault(record.stage, record.step - 1)
            if record.reward is not None:
                rewarded.append((record.step, record.reward))
    figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    if rewarded:
        axis.plot(*zip(*rewarded, strict=True), color="0.7", linewidth=1, label="reward of sampled answers")
    colours = ("tab:blue", "tab:orange", "tab:green")
    for colour, temperature in zip(colours, sorted({record.temperature for record in evaluations}), strict=False):
        label: str | None = f"held-out accuracy, {temperature_name(temperature)}"
        for points in _curves([record for record in evaluations if record.temperature == temperature]):
            x, y = [point.step for point in points], [point.accuracy for point in points]
            errors = [[p.accuracy - p.low for p in points], [p.high - p.accuracy for p in points]]
            axis.errorbar(x, y, yerr=errors, marker="o", markersize=4, capsize=2, color=colour, label=label)
            label = None
    for stage, start in starts.items():
        axis.axvline(start, color="0.85", zorder=0)
        axis.annotate(stage, (start, 1.02), xycoords=("data", "axes fraction"), fontsize=9, color="0.3")
    axis.set(xlabel="optimiser step", ylabel="reward, accuracy", ylim=(-0.02, 1.02))
    axis.set_title(title, pad=18, fontsize=11)
    axis.legend(loc="best", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(points: list[EvaluationRecord]) -> list[list[EvaluationRecord]]:
    """Split points into lines of the plot: a stage that starts from other weights starts a new line."""
    curves: list[list[EvaluationRecord]] = []
    for point in points:
        if point.stage_step == 0 or not curves:
            curves.append([])
        curves[-1].append(point)
    return curves
