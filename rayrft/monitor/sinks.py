"""Sinks of a run's numbers: Ray's metrics, and those that the config names."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rayrft.buffer.export import GLANCE, glance
from rayrft.buffer.reader import Archive
from rayrft.config import RunConfig
from rayrft.errors import ConfigError, StorageError, first_line
from rayrft.experience import Experience, from_batch
from rayrft.files import atomic_file
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.records import EvaluationRecord, NoteRecord, PairsRecord, Record, RolloutRecord, StepRecord, flat
from rayrft.registry import Registry, check_installed

log = logging.getLogger(__name__)

_OPTIONAL = "mlflow", "trackio"
"""Sinks whose packages, of the same name, rayrft does not require."""
_MOST_WAITING = 10_000
"""Records that wait for a sink at most: one that does not answer must not fill the memory of the Master."""
_PATIENCE_S = 60.0
"""Longest time in which a sink opens, and in which it closes."""


class Sink(Protocol):
    """A destination of records; ``close`` flushes, and gets whether the run failed. Its methods are called in one
    thread, in order, and may block."""

    def write(self, record: Record) -> None: ...

    def close(self, failed: bool) -> None: ...


sinks: Registry[Callable[[RunConfig], Sink]] = Registry("sink", alike=True)
register_sink = sinks.register
"""Register a sink, which is made of a run's config, by a name for ``monitor.sinks``."""


def check_sinks(config: RunConfig) -> None:
    """Raise ConfigError for a sink that is unknown or whose package is not installed."""
    for name in config.monitor.sinks:
        sinks.get(name, "monitor.sinks")
        if name in _OPTIONAL:
            check_installed(name, f"run: .venv/bin/pip install {name}", ConfigError, "monitor.sinks", name)


@runtime_checkable
class RowSink(Sink, Protocol):
    """A sink that takes the newest rows, too: ``columns`` are `GLANCE`, ``rows`` have their values."""

    def write_rows(self, step: int, columns: list[str], rows: list[list[Any]]) -> None: ...


class Sinks:
    """The sinks of a run: Ray's metrics, and those of the config. One that fails, or hangs, gets no further records."""

    def __init__(self, config: RunConfig, *, started: bool = False) -> None:
        """Open the sinks. Raises ConfigError for a sink that cannot be opened, unless the run had ``started``: then the
        sink has failed."""
        self._config = config
        self._failures: list[str] = []
        self._open: list[_SinkThread] = [_SinkThread("Ray's metrics", RayMetrics, config, self._failures)]
        self._archive: Archive | None = None
        self._reading = threading.Lock()
        for name in config.monitor.sinks:
            make = sinks.get(name, "monitor.sinks")
            try:
                self._open.append(_SinkThread(name, make, config, self._failures))
            except Exception as error:  # of another library, which may raise anything
                problem = f"cannot be opened: {type(error).__name__}: {first_line(error)}"
                if started:
                    self._failures.append(f"{name}: {problem}")
                    continue
                remedy = "check its server and its key, or leave it out"
                raise ConfigError(problem, remedy, field="monitor.sinks", value=name) from None

    def write(self, record: Record) -> None:
        """Start to write a record; after ``close`` do nothing."""
        monitor = self._config.monitor
        samples = isinstance(record, StepRecord) and record.usual_rows and record.step % monitor.samples_every == 0
        for each in self._open:
            each.start(lambda sink: sink.write(record))
            if samples and monitor.sample_rows and isinstance(each.sink, RowSink):
                each.start(partial(self._write_rows, record.step))

    def failures(self) -> list[str]:
        """Return the sinks that have failed since the last call, with the reasons."""
        found = self._failures.copy()
        del self._failures[: len(found)]
        return found

    def close(self, failed: bool, timeout_s: float) -> None:
        """Close the sinks once they have all records; those that take longer, or `_PATIENCE_S`, have failed."""
        timeout_s = min(timeout_s, _PATIENCE_S)
        closing = [each.start(lambda sink: sink.close(failed), last=True) for each in self._open]
        wait(filter(None, closing), timeout_s)
        for each, done in zip(self._open, closing, strict=True):
            if done is not None and not done.done():
                self._failures.append(f"{each.name}: it did not return within {timeout_s:g} s")
        self._open = []

    def _write_rows(self, step: int, sink: RowSink) -> None:
        with contextlib.suppress(StorageError):  # of a damaged file: the table is left out, and the run will name it
            sink.write_rows(step, GLANCE, self._newest_rows())

    def _newest_rows(self) -> list[list[Any]]:
        """Return the values of `GLANCE` of a row of each of the newest groups in the run's log, in any thread; the
        newest last. Raises StorageError."""
        config, rows = self._config, dict[str, Experience]()
        with self._reading:
            if self._archive is None:
                self._archive = Archive(config.buffer_folder, config.buffer.sampler, config.seed)
            self._archive.refresh()
            for batch in self._archive.rows(newest=config.monitor.sample_rows):
                rows |= {row.group_id: row for row in from_batch(batch)}
        return [
            [json.dumps(each) if isinstance(each, list | dict) else each for each in glance(row).values()]
            for row in rows.values()
        ]


class _SinkThread:
    """A sink and the thread in which it is called."""

    def __init__(self, name: str, make: Callable[[RunConfig], Sink], config: RunConfig, failures: list[str]) -> None:
        self.name, self._failures, self._waiting, self._failed = name, failures, 0, False
        self._thread = ThreadPoolExecutor(1, name)
        opening = self._thread.submit(make, config)
        if not wait([opening], _PATIENCE_S).done:
            raise TimeoutError(f"no answer within {_PATIENCE_S:g} s")
        self.sink: Any = opening.result()

    def start(self, call: Callable[[Any], None], *, last: bool = False) -> Future[None] | None:
        """Start a call, unless the sink has failed. One that falls behind without end has."""
        if self._waiting >= _MOST_WAITING and not self._failed:
            self._fail(f"it did not take {_MOST_WAITING} records")
        if self._failed:
            return None
        self._waiting += 1
        calling = self._thread.submit(self._call, call)
        if last:
            self._thread.shutdown(wait=False)
        return calling

    def _call(self, call: Callable[[Any], None]) -> None:
        try:
            if not self._failed:
                call(self.sink)
        except Exception as error:  # a sink must not end the run
            log.exception("the sink %s failed", self.name)
            self._fail(f"{type(error).__name__}: {first_line(error)}")
        finally:
            self._waiting -= 1

    def _fail(self, why: str) -> None:
        self._failed = True
        self._failures.append(f"{self.name}: {why}")


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


@register_sink("tensorboard")
class TensorBoard:
    """TensorBoard event files in the run folder."""

    def __init__(self, config: RunConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(config.folder / "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)
        if isinstance(record, NoteRecord):
            self._writer.add_text("note", record.text, record.step)

    def close(self, failed: bool) -> None:
        self._writer.close()


@register_sink("wandb")
class Wandb:
    """A wandb run, continued if the run is resumed; offline if ``WANDB_MODE=offline`` is set or there is no API key."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

        known = os.environ.get("WANDB_API_KEY") or wandb.api.api_key
        self._run: Any = wandb.init(
            project=config.monitor.project,
            name=config.name,
            dir=str(config.folder),
            config=config.model_dump(mode="json"),
            mode=None if known or "WANDB_MODE" in os.environ else "offline",
            id=_kept(config.folder / "wandb_id", lambda: secrets.token_hex(8)),
            resume="allow",
        )
        for part in ("train", "rollout", "eval"):
            self._run.define_metric(f"{part}/*", step_metric=f"{part}/step")

    def write(self, record: Record) -> None:
        # wandb drops numbers of an earlier step than its own, and evaluations may come among later steps.
        if values := scalars(record):
            part = next(iter(values)).partition("/")[0]
            self._run.log({**values, f"{part}/step": record.step})

    def write_rows(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        self._run.log({"train/rows": wandb.Table(columns, rows), "train/step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


@register_sink("mlflow")
class Mlflow:
    """A run of MLflow, continued if the run is resumed; in the run folder unless ``MLFLOW_TRACKING_URI`` names a
    server."""

    def __init__(self, config: RunConfig) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri, files = os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:  # else its files would be in the folder in which the run was started
            uri, files = f"sqlite:///{config.folder}/mlflow.db", (config.folder / "mlflow").as_uri()
        self._client: Any = MlflowClient(tracking_uri=uri)
        project = config.monitor.project
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project, files)

        def create() -> str:
            run: str = self._client.create_run(experiment, run_name=config.name).info.run_id
            values = [Param(key, str(value)[:6000]) for key, value in _leaves(config.model_dump(mode="json"))]
            for first in range(0, len(values), 100):  # as many as it takes at once
                self._client.log_batch(run, params=values[first : first + 100])
            return run

        self._run = _kept(config.folder / "mlflow_id", create)

    def write(self, record: Record) -> None:
        named = {re.sub(r"[^\w\-./: ]", "_", name): value for name, value in scalars(record).items()}
        when = int(1000 * record.time)
        values = [self._metric(name, value, when, record.step) for name, value in named.items()]
        if values:
            self._client.log_batch(self._run, metrics=values)

    def write_rows(self, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        table = {"step": [step] * len(rows), **dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))}
        self._client.log_table(self._run, table, "rows.json")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


@register_sink("trackio")
class Trackio:
    """A run of trackio, continued if the run is resumed; ``trackio show`` shows it."""

    def __init__(self, config: RunConfig) -> None:
        import trackio

        settings, project = config.model_dump(mode="json"), config.monitor.project
        self._run: Any = trackio.init(project, name=config.name, config=settings, resume="allow", embed=False)

    def write(self, record: Record) -> None:
        if values := scalars(record):
            self._run.log(values, step=record.step)

    def close(self, failed: bool) -> None:
        self._run.finish()


def _kept(file: Path, create: Callable[[], str]) -> str:
    """Return the id in a file of the run folder; a new one is written there."""
    if not file.exists():
        name = create()
        with atomic_file(file) as partial:
            partial.write_text(name)
    return file.read_text()


def _leaves(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of nested objects by dotted names."""
    found = list[tuple[str, Any]]()
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _leaves(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found
