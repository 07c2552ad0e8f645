"""The handle of a run, by which it is watched and stopped, from any process on the cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.core.placement import NAMESPACE, actor_name, remove_groups
from rayrft.core.recorder import write_summary
from rayrft.core.run_data import RunData
from rayrft.core.supervision import root_cause
from rayrft.errors import ActorDied, RunNotFound
from rayrft.monitor.progress import line
from rayrft.monitor.records import Record, StepRecord, read_records

if TYPE_CHECKING:
    import pandas as pd


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
            raise RunNotFound(
                "only the process that started a run waits for its result",
                field="name",
                value=self.name,
                remedy="follow it with watch(), and read summary.json once it has ended",
            )
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
        for name in named_actors(actor_name(self.name, "")):
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


def named_actors(prefix: str) -> list[str]:
    """Names of the actors of runs on this cluster that begin so."""
    from ray.util import list_named_actors

    actors = list_named_actors(all_namespaces=True)
    return [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]
