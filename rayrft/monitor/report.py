"""The end of a run: a table of accuracies and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayrft.monitor.console import temperature_name
from rayrft.monitor.records import EvaluationRecord, Record, StepRecord


def accuracy_table(records: Sequence[Record]) -> str:
    """Accuracy before the first stage and after each, per temperature, with counts and 95 % intervals.

    For a stage that was evaluated along the way the best point stands beside the last.
    """
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    if not evaluations:
        return "no evaluation was made"
    temperatures = sorted({each.temperature for each in evaluations})
    rows = [["", *(f"{temperature_name(t)}" for t in temperatures)]]
    first = evaluations[0]
    names = [(first.stage, "untrained", [e for e in evaluations if e.stage == first.stage and e.stage_step == 0])]
    for stage in dict.fromkeys(each.stage for each in evaluations):
        after = [each for each in evaluations if each.stage == stage and each.stage_step > 0]
        if after:
            names.append((stage, f"after {stage}", after))
    for _, label, part in names:
        cells = [_cell([each for each in part if each.temperature == t]) for t in temperatures]
        rows.append([label, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _cell(points: list[EvaluationRecord]) -> str:
    if not points:
        return "-"
    last, best = points[-1], max(points, key=lambda point: point.accuracy)
    text = f"{last.accuracy:.3f} ({last.right}/{last.count}, {last.low:.3f}-{last.high:.3f})"
    return text if len(points) == 1 else f"{text}, best {best.accuracy:.3f} at step {best.stage_step}"


def save_plot(records: Sequence[Record], path: Path, title: str) -> None:
    """Reward of each step and held-out accuracy over the steps of all stages, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    steps = [each for each in records if isinstance(each, StepRecord)]
    rewarded = [(each.step, each.reward) for each in steps if each.reward is not None]
    if rewarded:
        axis.plot(*zip(*rewarded, strict=True), color="0.7", linewidth=1, label="reward of sampled answers")
    evaluations = [each for each in records if isinstance(each, EvaluationRecord)]
    colours = ("tab:blue", "tab:orange", "tab:green")
    for colour, temperature in zip(colours, sorted({each.temperature for each in evaluations}), strict=False):
        label: str | None = f"held-out accuracy, {temperature_name(temperature)}"
        for points in _curves([each for each in evaluations if each.temperature == temperature]):
            x, y = [each.step for each in points], [each.accuracy for each in points]
            errors = [[each.accuracy - each.low for each in points], [each.high - each.accuracy for each in points]]
            axis.errorbar(x, y, yerr=errors, marker="o", markersize=4, capsize=2, color=colour, label=label)
            label = None
    for stage in dict.fromkeys(each.stage for each in steps):
        start = min(each.step for each in steps if each.stage == stage) - 1
        axis.axvline(start, color="0.85", zorder=0)
        axis.annotate(stage, (start, 1.02), xycoords=("data", "axes fraction"), fontsize=9, color="0.3")
    axis.set(xlabel="optimiser step", ylabel="reward, accuracy", ylim=(-0.02, 1.02))
    axis.set_title(title, pad=18, fontsize=11)
    axis.legend(loc="best", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(points: list[EvaluationRecord]) -> list[list[EvaluationRecord]]:
    """Points to be joined by a line: a stage that starts from other weights begins a line of its own."""
    curves: list[list[EvaluationRecord]] = []
    for point in points:
        if point.stage_step == 0 or not curves:
            curves.append([])
        curves[-1].append(point)
    return curves
