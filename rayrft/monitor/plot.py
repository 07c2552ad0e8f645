"""The plot of a run: reward, accuracy, and where the time went."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rayrft.monitor.console import temperature_name
from rayrft.monitor.records import EvaluationRecord, PairsRecord, Record, RolloutRecord, StepRecord

_COLOURS = ("tab:blue", "tab:orange", "tab:green")


class RunPlot(Figure):
    """A figure of records, which are read once: the reward of every step and its running mean, accuracies with 95 %
    intervals, and the seconds of every step by part."""

    def __init__(self, records: Iterable[Record], title: str) -> None:
        super().__init__(figsize=(9, 5.5), layout="constrained")
        points, curves, starts = defaultdict[Any, list[Any]](list), defaultdict[str, list[Any]](list), dict[str, int]()
        seconds = dict[int, list[float]]()
        for record in records:
            if isinstance(record, EvaluationRecord):
                curves[f"held-out accuracy, {temperature_name(record.temperature)}"].append(record)
            elif isinstance(record, PairsRecord):
                curves["held-out pairs ranked right"].append(record)
            elif isinstance(record, StepRecord | RolloutRecord):
                starts.setdefault(record.stage, record.step - 1)
                if record.reward is not None:
                    points["reward of sampled answers", record.stage].append((record.step, record.reward))
            if isinstance(record, StepRecord):
                seconds[record.step] = [record.wait_s, record.train_s, record.sync_s, record.step_s]
                if record.metrics.preference_loss:
                    share = record.step, record.metrics.pair_accuracy
                    points["pairs of the batch ranked right", record.stage].append(share)
        scores, times = self.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for (name, _), known in points.items():
            x, y = np.array(known).T
            mean = np.convolve(y, np.full(width := max(1, len(y) // 20), 1 / width), "valid")
            scores.plot(x, y, ".", color="0.7", markersize=3)
            scores.plot(x[(width - 1) // 2 :][: len(mean)], mean, color="0.5", linewidth=1, label=name)
        for colour, (name, found) in zip(_COLOURS, sorted(curves.items()), strict=False):
            # A stage that starts from other weights starts a new line.
            ends = [at for at, point in enumerate(found) if at and point.stage_step == 0]
            for line in (found[start:end] for start, end in pairwise([0, *ends, len(found)])):
                x, y = [point.step for point in line], [point.accuracy for point in line]
                errors = [[p.accuracy - p.low for p in line], [p.high - p.accuracy for p in line]]
                scores.errorbar(x, y, yerr=errors, marker="o", markersize=4, capsize=2, color=colour, label=name)
        for stage, start in starts.items():
            scores.axvline(start, color="0.85", zorder=0)
            scores.annotate(stage, (start, 1.02), xycoords=("data", "axes fraction"), fontsize=9, color="0.3")
        if seconds:
            *parts, whole = np.array([*seconds.values()]).T
            tops = np.cumsum([0 * whole, *parts, np.maximum(whole - sum(parts), 0)], axis=0)
            edges = np.array([*seconds, max(seconds) + 1]) - 0.5
            for name, (low, high) in zip(("wait", "train", "sync", "other"), pairwise(tops), strict=True):
                times.stairs(high, edges, baseline=low, fill=True, alpha=0.8, label=name)
        scores.set_title(title, pad=18, fontsize=11)
        bottom, top = scores.get_ylim()
        scores.set(ylabel="reward, accuracy", ylim=(min(bottom, -0.02), max(top, 1.02)))
        times.set(xlabel="optimiser step" if seconds else "groups", ylabel="seconds")
        for axis in (scores, times):
            axis.spines[["top", "right"]].set_visible(False)
            if labels := {name: line for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}:
                axis.legend(labels.values(), labels.keys(), loc="best", fontsize=8)

    def _repr_png_(self) -> bytes:
        self.savefig(drawn := io.BytesIO(), format="png", dpi=100)
        return drawn.getvalue()
