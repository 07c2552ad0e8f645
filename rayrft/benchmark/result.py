"""The result of a bench: its table, plot and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from rayrft.explorer.evaluation import Estimate, Evaluation
from rayrft.monitor.report import format_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class BenchScore:
    """What a model reached on a task set."""

    model: str
    taskset: str
    evaluation: Evaluation


@dataclass(frozen=True)
class BenchResult:
    """All scores, by model and then by task set."""

    name: str
    folder: Path
    """It has every attempt, ``results.json`` and ``plot.png``."""
    scores: tuple[BenchScore, ...]

    def frame(self) -> pd.DataFrame:
        """Return one row per model, task set and measure (``mean``, ``pass``, ``majority``) at every k."""
        import pandas as pd

        rows = []
        for score in self.scores:
            found = score.evaluation
            measures = [("mean", found.samples, found.accuracy)]
            measures += [("pass", k, estimate) for k, estimate in found.passed.items()]
            measures += [("majority", k, estimate) for k, estimate in found.majority.items()]
            for measure, k, estimate in measures:
                names = {"model": score.model, "taskset": score.taskset, "measure": measure, "k": k}
                rows.append({**names, **asdict(estimate)})
        return pd.DataFrame(rows)

    def table(self) -> str:
        """Format a row per model and task set, with 95 % intervals of the mean and at the largest k."""
        ks = sorted({k for score in self.scores for k in score.evaluation.passed if k > 1})
        samples = max((score.evaluation.samples for score in self.scores), default=0)
        head = ["model", "task set", f"mean@{samples}", *[f"pass@{k}" for k in ks], *[f"maj@{k}" for k in ks]]
        rows = [[*head, "tasks", "unknown", "tokens", "cut"]]
        for score in self.scores:
            found = score.evaluation
            rows.append(
                [
                    score.model,
                    score.taskset,
                    _cell(found.accuracy),
                    *[_cell(found.passed[k], interval=k == ks[-1]) for k in ks],
                    *[_cell(found.majority[k], interval=k == ks[-1]) for k in ks],
                    str(found.tasks),
                    str(sum(found.unknown.values())),
                    "-" if math.isnan(found.mean_tokens) else f"{found.mean_tokens:.0f}",
                    "-" if math.isnan(found.cut_share) else f"{found.cut_share:.0%}",
                ]
            )
        return format_table(rows)

    def to_json(self) -> str:
        """Format all scores as JSON; NaN is null."""
        return to_json({"name": self.name, "scores": self.scores}, indent=2, inf_nan_mode="null").decode() + "\n"

    def save_plot(self, path: Path) -> None:
        """Plot pass@k and majority@k against k, by model, with 95 % intervals; a panel per task set. As a PNG."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        tasksets = list(dict.fromkeys(score.taskset for score in self.scores))
        models = list(dict.fromkeys(score.model for score in self.scores))
        figure = Figure(figsize=(1.5 + 4.5 * len(tasksets), 4.2), layout="constrained")
        panels, colours = figure.subplots(1, len(tasksets), squeeze=False, sharey=True), colormaps["tab10"]
        for axis, taskset in zip(panels[0], tasksets, strict=True):
            for score in (score for score in self.scores if score.taskset == taskset):
                place = models.index(score.model)
                found, colour = score.evaluation, colours(place % 10)
                # Models side by side at every k, so that their intervals can be told apart.
                shift = 1.0 + 0.03 * (place - (len(models) - 1) / 2)
                _curve(axis, found.passed, colour, shift, label=score.model, marker="o")
                if len(found.majority) > 1:
                    _curve(axis, found.majority, colour, shift, label=None, marker="s", linestyle=":", alpha=0.6)
            ks = sorted({k for score in self.scores for k in score.evaluation.passed})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ks, [str(k) for k in ks])
            axis.minorticks_off()
            axis.set(xlabel="k", ylim=(-0.02, 1.02))
            axis.set_title(taskset, fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        panels[0][0].set_ylabel("pass@k (solid), majority@k (dotted)")
        panels[0][0].legend(loc="best", fontsize=8)
        figure.suptitle(self.name, fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _curve(axis: Any, estimates: dict[int, Estimate], colour: Any, shift: float, **style: Any) -> None:
    points = [(k, e) for k, e in sorted(estimates.items()) if e.tasks]
    x, y = [k * shift for k, _ in points], [e.value for _, e in points]
    errors: Sequence[Sequence[float]] = [[e.value - e.low for _, e in points], [e.high - e.value for _, e in points]]
    axis.errorbar(x, y, yerr=errors, color=colour, markersize=4, capsize=2, **style)


def _cell(estimate: Estimate, *, interval: bool = True) -> str:
    if not estimate.tasks:
        return "-"
    return f"{estimate.value:.3f} ({estimate.low:.3f}-{estimate.high:.3f})" if interval else f"{estimate.value:.3f}"
