"""Sinks of a run's numbers: Ray's metrics, optionally wandb and TensorBoard."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from rayrft.config import RunConfig
from rayrft.files import atomic_file
from rayrft.monitor.records import EvaluationRecord, NoteRecord, PairsRecord, Record, RolloutRecord, StepRecord, flat


class Sink(Protocol):
    """A destination of records; ``close`` flushes."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_sinks(config: RunConfig) -> list[Sink]:
    """Open the sinks that the config enables."""
    sinks: list[Sink] = [RayMetrics(config.name)]
    if config.monitor.tensorboard:
        sinks.append(TensorBoard(config.folder / "tensorboard"))
    if config.monitor.wandb:
        sinks.append(Wandb(config))
    return sinks


_COUNTS = ("errors", "retried", "slowest_s", "pending")


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record by dashboard name."""
    if isinstance(record, EvaluationRecord):
        values = {"accuracy": record.accuracy, "mean_tokens": record.mean_tokens, "cut_share": record.cut_share}
        if record.samples > 1:
            values["passed"] = record.passed
        return {f"eval/{name}_t{record.temperature:g}": value for name, value in values.items()}
    if isinstance(record, PairsRecord):
        return {"eval/pair_accuracy": record.accuracy, "eval/pair_margin": record.margin}
    if isinstance(record, StepRecord | RolloutRecord):
        values = {k: v for k, v in flat(record).items() if isinstance(v, int | float) and k not in ("step", "time")}
        part = "train" if isinstance(record, StepRecord) else "rollout"
        for domain, stats in record.timings.rewards.items():
            scored = max(1, stats.scored)
            prefix = f"reward_{domain}_" if domain else "reward_"
            values |= {f"{prefix}unknown_share": stats.unknown / scored, f"{prefix}mean_s": stats.seconds / scored}
            values |= {f"{prefix}{name}": getattr(stats, name) for name in _COUNTS}
        for operator, work in record.timings.operators.items():
            values |= {f"operator_{operator}_{name}": value for name, value in vars(work).items()}
        return {f"{part}/{name}": float(value) for name, value in values.items()}
    return {}


class RayMetrics:
    """Gauges for all numbers and histograms for times, through ``ray.util.metrics`` (Prometheus, Grafana)."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}
        self._histograms: dict[str, Any] = {}

    def write(self, record: Record) -> None:
        from ray.util.metrics import Gauge, Histogram

        for name, value in scalars(record).items():
            metric = "rayrft_" + name.replace("/", "_").replace(".", "_")
            if metric not in self._gauges:
                self._gauges[metric] = Gauge(metric, description=f"rayrft: {name}", tag_keys=("run",))
            self._gauges[metric].set(value, tags={"run": self._run})
            if name.endswith("_s"):
                if metric not in self._histograms:
                    bounds = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300]
                    self._histograms[metric] = Histogram(f"{metric}_seconds", f"rayrft: {name}", bounds, ("run",))
                self._histograms[metric].observe(max(value, 1e-9), tags={"run": self._run})

    def close(self) -> None:
        """Do nothing: there is no buffer to flush."""


class TensorBoard:
    """TensorBoard event files in the run folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)
        if isinstance(record, NoteRecord):
            self._writer.add_text("note", record.text, record.step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A wandb run, continued if the run is resumed; offline if ``WANDB_MODE=offline`` is set or there is no API key."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

        known = os.environ.get("WANDB_API_KEY") or wandb.api.api_key
        file = config.folder / "wandb_id"
        if not file.exists():
            with atomic_file(file) as partial:
                partial.write_text(secrets.token_hex(8))
        self._run: Any = wandb.init(
            project=config.monitor.project,
            name=config.name,
            dir=str(config.folder),
            config=config.model_dump(mode="json"),
            mode=None if known or "WANDB_MODE" in os.environ else "offline",
            id=file.read_text(),
            resume="allow",
        )
        for part in ("train", "rollout", "eval"):
            self._run.define_metric(f"{part}/*", step_metric=f"{part}/step")

    def write(self, record: Record) -> None:
        # wandb drops numbers of an earlier step than its own, and evaluations may come among later steps.
        if values := scalars(record):
            part = next(iter(values)).partition("/")[0]
            self._run.log({**values, f"{part}/step": record.step})

    def close(self) -> None:
        self._run.finish()
