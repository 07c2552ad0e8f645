"""Starting a run, and the handle by which it is watched and stopped, from any process on the cluster."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.config import RunConfig, load_config
from rayrft.core.placement import (
    NAMESPACE,
    Placement,
    actor_name,
    check_placement,
    plan_placement,
    remove_groups,
    show_plan,
)
from rayrft.core.prepare import prepare
from rayrft.core.progress import Checkpoints, Progress
from rayrft.core.recorder import write_summary
from rayrft.core.run_data import RunData
from rayrft.core.supervision import root_cause
from rayrft.errors import ActorDied, ConfigError, PlacementError, RunNotFound, nearest
from rayrft.monitor.progress import line
from rayrft.monitor.records import Record, StepRecord, read_records

if TYPE_CHECKING:
    import pandas as pd


def start(
    config: str | Path | dict[str, Any] | RunConfig,
    *,
    say: Callable[[str], None] = print,
    **overrides: Any,
) -> Run:
    """Check a config, place the run on the cluster and start it; returns while it goes on.

    ``overrides`` are dotted keys: ``start("run.yaml", **{"trainer.ranks": 1})``. ``say`` gets the placement plan.
    Raises a RayrftError, before any actor starts, when config, data, model or cluster do not fit.
    """
    return _start(load_config(config, overrides), None, say)


def resume(folder: str | Path, *, say: Callable[[str], None] = print, **overrides: Any) -> Run:
    """Go on with the run in that folder, which crashed or was stopped: from its latest checkpoint, with the rows that
    were leased since, in their order. ``overrides`` may raise a stage's steps, change resources and the like.

    Raises ConfigError where there is no such run, or it is finished, and what `start` raises.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise ConfigError("no run lies there (no config.yaml)", field="run", value=str(folder))
    config = load_config(folder / "config.yaml", overrides)
    if config.folder != folder.absolute():  # it was moved, or the storage is mounted elsewhere
        config = load_config(config, {"storage": str(folder.absolute().parent), "name": folder.name})
    progress = Checkpoints(config.folder, config.checkpoint).latest()
    if progress is None:
        raise ConfigError("the run did not begin", field="run", value=str(folder), remedy="start it instead")
    last = config.stages[-1]
    if progress.stage == len(config.stages) - 1 and progress.stage_ended and progress.stage_step >= last.steps:
        raise ConfigError(
            f"the run is finished after {progress.step} steps",
            field="run",
            value=str(folder),
            remedy=f"to train on, raise stages.{last.name}.steps",
        )
    return _start(config, progress, say)


def _start(checked: RunConfig, progress: Progress | None, say: Callable[[str], None]) -> Run:
    """Start a run, or go on with one from where it stands."""
    import ray

    connect()
    _check_name(checked.name)
    parts = plan_placement(checked)
    say(show_plan(checked.name, parts))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    check_placement(parts, ray.available_resources(), nodes)
    began = progress or Progress(uuid.uuid4().hex)
    prepared = prepare(checked, began.run_id, resumed=progress is not None)
    if progress is None:
        Checkpoints(checked.folder, checked.checkpoint).mark_beginning(began)

    from rayrft.core.master import Master

    placement = Placement(checked.name, parts)
    placement.reserve(["master"])
    master = placement.actor(Master, "master", name="master").remote(checked, began)
    outcome = master.run.remote([ray.put(prepared)])
    return Run(checked.name, checked.folder, master, outcome)


def attach(name: str) -> Run:
    """The run of that name, started by whichever process on this cluster. Raises RunNotFound."""
    import ray

    connect()
    try:
        master = ray.get_actor(actor_name(name, "master"), namespace=NAMESPACE)
    except ValueError:
        names = running()
        raise RunNotFound(
            "no run of that name is on this cluster",
            field="name",
            value=name,
            remedy=nearest(name, names) if names else "no run is under way",
        ) from None
    return Run(name, Path(ray.get(master.status.remote())["folder"]), master)


def running() -> list[str]:
    """Names of the runs on this cluster."""
    suffix = actor_name("", "master")
    return sorted(name.removesuffix(suffix) for name in _named_actors("") if name.endswith(suffix))


def connect() -> None:
    """Connect to the cluster of RAY_ADDRESS, or to one on this machine, or start one here for this process."""
    import ray

    if not ray.is_initialized():
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")


class Run(RunData):
    """A run under way or ended."""

    def __init__(self, name: str, folder: Path, master: Any, outcome: Any = None) -> None:
        self.name = name
        self.folder = folder
        self._master = master
        self._outcome = outcome

    def status(self) -> dict[str, Any]:
        """State, step, version and the ledger ``sampled = trained + dropped + held``."""
        import ray

        try:
            return ray.get(self._master.status.remote())
        except ray.exceptions.RayActorError as error:
            raise self._dead(error) from None

    def records(self) -> Iterator[Record]:
        """Every record, those to come as they come; ends with the run."""
        import ray

        count = 0
        while True:
            try:
                new: list[Record] = ray.get(self._master.records.remote(count))
            except ray.exceptions.RayActorError as error:
                raise self._dead(error) from None
            if not new:
                return
            count += len(new)
            yield from new

    def watch(self, say: Callable[[str], None] = print) -> None:
        """Print a line per record until the run ends. Steps without rollouts are quick: at most two lines a second."""
        last = 0.0
        for record in self.records():
            quick = isinstance(record, StepRecord) and not record.usual_rows
            if not quick or time.monotonic() - last >= 0.5:
                last = time.monotonic() if quick else last
                say(line(record))

    def metrics(self) -> pd.DataFrame:
        """One row per optimiser step so far."""
        import pandas as pd

        return pd.DataFrame([asdict(r) for r in read_records(self.folder) if isinstance(r, StepRecord)])

    def evaluations(self) -> pd.DataFrame:
        """One row per evaluation so far."""
        import pandas as pd

        return pd.DataFrame([asdict(r) for r in read_records(self.folder) if r.kind == "evaluation"])

    def result(self) -> dict[str, Any]:
        """Wait for the end; gives the summary. Raises the root cause when the run failed.

        For the process that started the run: this also gives its resources back.
        """
        import ray

        if self._outcome is None:
            raise RunNotFound("only the process that started a run waits for its result", field="name", value=self.name)
        try:
            return ray.get(self._outcome)
        except ray.exceptions.RayActorError as error:
            raise self._dead(error) from None
        except ray.exceptions.RayTaskError as error:
            raise root_cause(error) from None
        finally:
            self.kill()

    def kill(self) -> None:
        """End the run at once, without saving; returns when its name and its resources are free again."""
        import ray

        actors = []
        for name in _named_actors(actor_name(self.name, "")):
            with contextlib.suppress(ValueError):  # it died since it was listed
                actors.append(ray.get_actor(name, namespace=NAMESPACE))
        # Without retries, for the Buffer's calls are otherwise made again, and Ray would say so.
        watches = [actor.watch.options(max_task_retries=0).remote() for actor in actors]
        # The Master also where it is dead and not listed: a process that holds its handle takes its name for taken.
        for actor in (*actors, self._master):
            ray.kill(actor)
        if watches:
            ray.wait(watches, num_returns=len(watches))
        remove_groups(actor_name(self.name, ""))

    def stop(self) -> None:
        """Ask the run to end after what it is doing, and save its weights."""
        import ray

        ray.get(self._master.stop.remote())

    def pids(self) -> dict[str, int]:
        """Process ids of master, trainer and engines."""
        import ray

        return ray.get(self._master.pids.remote())

    def _dead(self, error: Exception) -> ActorDied:
        """The Master is gone: without it nothing else writes the summary."""
        cause = ActorDied(f"the master died: {str(error).splitlines()[0]}", field=actor_name(self.name, "master"))
        if not (self.folder / "summary.json").exists():
            write_summary(self.folder, {"name": self.name, "status": "failed", "error": str(cause), "checkpoint": None})
        return cause


def _named_actors(prefix: str) -> list[str]:
    from ray.util import list_named_actors

    actors = list_named_actors(all_namespaces=True)
    return [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]


def _check_name(name: str) -> None:
    if name in running():
        raise PlacementError(
            "a run of this name is under way",
            field="name",
            value=name,
            remedy=f"choose another name (name=…), or end it with: rayrft stop {name}",
        )
