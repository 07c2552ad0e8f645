"""Handle of a run: follows and stops it from any process on the cluster."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from rayrft.buffer.buffer import Buffer
from rayrft.config import load_config
from rayrft.core.janitor import Guard
from rayrft.core.master import Master
from rayrft.core.placement import actor_name, clear_run
from rayrft.core.run_files import RunFiles
from rayrft.core.shared_buffer import find_buffer
from rayrft.errors import ActorDied, ActorUnreachable, ConfigError, RayrftError, RunFinished, RunNotFound, StorageError
from rayrft.monitor.console import format_record
from rayrft.monitor.records import EvaluationRecord, Record, StepRecord, read_records
from rayrft.monitor.summary import (
    RunStatus,
    Summary,
    Totals,
    read_summary,
    status_at_end,
    summarise,
    summarise_from_folder,
    write_summary,
)
from rayrft.runtime import ray_api
from rayrft.runtime.handle import (
    Handle,
    answer,
    cancel_calls,
    death_reason,
    end,
    fetch,
    fetch_when_reachable,
    find_actor,
    root_cause,
)
from rayrft.runtime.ray_api import ray

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from ray.data import Dataset

    from rayrft.experience import Experience, Task
    from rayrft.monitor.plot import RunPlot
    from rayrft.pipelines.tasks import AddedTasks


T = TypeVar("T")
ANSWER_S = 60.0
"""Deadline of calls that the Master answers at once; others have none, since the Master ends a run that has stalled."""


class Run(RunFiles):
    """A running or ended run. Methods on its Buffer raise RunNotFound once it has ended."""

    def __init__(
        self,
        name: str,
        folder: Path,
        master: Handle[Master],
        outcome: Awaitable[Summary] | None = None,
        earlier: int = 0,
        guard: Guard | None = None,
    ) -> None:
        """``earlier`` is the number of records of earlier attempts. The process that starts the run has a ``guard``."""
        super().__init__(folder, name)
        self._master = master
        self._master_name = actor_name(name, "master")
        self._outcome = outcome
        self._calls: dict[str, Awaitable[Any]] = {} if outcome is None else {"run": outcome}
        """The latest call of each method of the Master that may last."""
        self._earlier = earlier
        self._guard = guard

    def dataset(
        self, store: str = "usual", *, columns: Sequence[str] | None = None, where: str | None = None
    ) -> Dataset:
        """Return the current rows of a store (``usual`` or ``expert/<name>``): see `rayrft.buffer.dataset`."""
        from rayrft.buffer.dataset import dataset

        return dataset(self._buffer(), store, columns=columns, where=where)

    def experiences(self, n: int = 10) -> pd.DataFrame:
        """Return the newest usual rows held: id, reward, question, answer, labels and weight versions."""
        import pandas as pd

        from rayrft.buffer.dataset import newest
        from rayrft.buffer.export import GLANCE, glance

        return pd.DataFrame([glance(row) for row in newest(self._buffer(), n)], columns=GLANCE)

    def feedback(self, experience_id: str, reward: float | None = None, labels: dict[str, str] | None = None) -> None:
        """Change the reward and labels of a row before it is trained; see `Buffer.feedback` for the errors."""
        answer(self._buffer().call(Buffer.feedback, experience_id, reward, labels), "buffer")

    def reward(self, session: str, reward: float, components: dict[str, float] | None = None) -> None:
        """Give a session of the endpoint its reward, by its id or that of one of its responses. Raises DataError for an
        unknown id, and FeedbackRefused if the session has a reward or has ended."""
        from rayrft.endpoint.keeper import SessionKeeper

        keeper = find_actor(actor_name(self.name, "keeper"))
        if keeper is None:
            remedy = "give it an endpoint (mode: serve), and stages that train on usual rows"
            raise RunNotFound("the run is not running, or records no sessions", remedy, field="name", value=self.name)
        answer(keeper.call(SessionKeeper.feedback, session, reward, components or {}), "keeper")

    def load(self, rows: Dataset | pa.Table | list[Experience], name: str) -> int:
        """Replace the demonstrations ``name`` by ``rows``, which become expert rows; return their number. Raises
        DataError if a column is missing or a row is invalid."""
        from rayrft.buffer.dataset import load_dataset

        return load_dataset(self._buffer(), rows, name)

    def extend(self, rows: Dataset | pa.Table | list[Experience], name: str) -> int:
        """Add ``rows`` to the demonstrations ``name``, which may not exist yet; return the number of rows with new
        experience ids. They are drawn from the next epoch on. Raises DataError as `load` does, and if the
        demonstrations are of another kind: pairs, labelled answers or conversations."""
        from rayrft.buffer.dataset import load_dataset

        return load_dataset(self._buffer(), rows, name, extend=True)

    def forget(self, ids: list[str], before: float = 0.0) -> tuple[int, int]:
        """Erase rows from the log: see `Buffer.forget`."""
        return answer(self._buffer().call(Buffer.forget, ids, before), "buffer")

    def add_tasks(self, tasks: list[Task], source: int = 0) -> AddedTasks:
        """Add tasks to a source of the run's task set, by index, while it is running. Return the new tasks, after the
        operators of ``pipelines.tasks`` and without any that show an evaluation task, and the reasons of the others
        (see `rayrft.pipelines.tasks.process_added`, which reads the run's sources again).

        Raises ConfigError if no reward scores the domain of one, OperatorFailed, and DataError if the run draws no
        tasks, or one lacks what its task sampler needs."""
        from rayrft.core.services import task_engines
        from rayrft.pipelines.tasks import AddedTasks, process_added

        config = load_config(self.folder / "config.yaml")
        for task in tasks:
            config.reward.domain_of(task.domain)
        earlier = answer(self._buffer().call(Buffer.added_tasks, 0), "buffer")
        known = {task.id for task in earlier}
        processed = AddedTasks([task for task in tasks if task.id not in known], {})
        if config.tasks is not None and 0 <= source < len(config.tasks.sources):  # else the Buffer says what is wrong
            processed = process_added(config, processed.tasks, source, earlier, task_engines(config))
        answer(self._buffer().call(Buffer.add_tasks, processed.tasks, source), "buffer")
        twice = {task.id: "another task: the same one" for task in tasks if task.id in known}
        return AddedTasks(processed.tasks, {**processed.left_out, **twice})

    def put(self, rows: list[Experience]) -> None:
        """Put whole groups of usual rows into a run in mode ``train``; return when they are in its log. Groups that
        were put before are skipped. Raises DataError for invalid rows: see `rayrft.buffer.client.put_groups`."""
        from rayrft.buffer.client import put_groups

        config = load_config(self.folder / "config.yaml")
        if config.mode != "train":
            problem = "the run takes groups from its own Explorers"
            raise ConfigError(problem, "use mode: train", field="mode", value=config.mode)
        stages = [stage for stage in config.stages if stage.groups]
        if not stages:
            remedy = "give a stage an algorithm that trains on usual rows"
            raise ConfigError("no stage of the run takes groups", remedy, field="stages", value=self.name)
        put_groups(self._buffer(), rows, [stage.algorithm.build() for stage in stages], stages[0].group_size)

    def finish(self) -> None:
        """Declare that no more groups will be put: a step that cannot be filled then ends the run's stage."""
        answer(self._buffer().call(Buffer.finish), "buffer")

    def _buffer(self) -> Handle[Buffer]:
        if not (self.folder / "summary.json").exists():  # an ending run kills its actors one by one
            config = self.folder / "config.yaml"
            if config.exists() and (name := load_config(config).buffer.name) is not None:
                return find_buffer(name)
            if (buffer := find_actor(actor_name(self.name, "buffer"))) is not None:
                return buffer
        problem = "the run is not running, so it has no Buffer"
        raise RunNotFound(problem, f"read its log with: rayrft data head {self.folder}", field="name", value=self.name)

    def status(self) -> RunStatus:
        """Return status, step, version and ledger; of a run that failed or was killed also the root cause."""
        try:
            return fetch(self._master.call(Master.status), self._master_name, ANSWER_S)
        except ray_api.ACTOR_ERRORS:
            return status_at_end(self._end(), self.folder)

    def records(self, first: int = 0) -> Iterator[Record]:
        """Iterate over the records from number ``first``, waiting for new ones until the run ends. Raises ActorDied if
        the Master died and the run neither finished nor was stopped."""
        count = first
        while True:
            try:
                new = fetch_when_reachable(partial(self._call, Master.records, count))
            except ray_api.ENDED_CALLS:
                summary = self._end()
                yield from read_records(self.folder)[count:]
                if summary.error:
                    own = f"{self._master_name}: "
                    field = self._master_name if summary.error.startswith(own) else ""
                    raise ActorDied(summary.error.removeprefix(own), field=field) from None
                return
            if not new:
                return
            count += len(new)
            yield from new

    def watch(self, say: Callable[[str], None] = print) -> None:
        """Print a line per record of this attempt until the run ends; without rollouts at most two lines a second."""
        last = 0.0
        for record in self.records(self._earlier):
            quick = isinstance(record, StepRecord) and not record.usual_rows
            if not quick or time.monotonic() - last >= 0.5:
                last = time.monotonic() if quick else last
                say(format_record(record))

    @overload
    def plot(self) -> RunPlot: ...
    @overload
    def plot(self, *, live: Literal[True]) -> None: ...
    def plot(self, *, live: bool = False) -> RunPlot | None:
        """Return a figure of reward, accuracy and seconds by step so far. With ``live``, show it in the output of the
        notebook's cell, and draw it there again, at most once a second, until the run ends or the cell is interrupted.
        Raises ConfigError if there is no notebook, and then as `records`."""
        from rayrft.monitor.plot import RunPlot

        if not live:
            return super().plot()
        from IPython.display import display

        plot = RunPlot(records := read_records(self.folder), self.name)
        if (output := display(plot, display_id=True)) is None:  # type: ignore[no-untyped-call]
            raise ConfigError("live needs a notebook", "call plot() and save the figure", field="live", value=live)
        with contextlib.suppress(KeyboardInterrupt):
            for number, _ in enumerate(self.records(len(records)), len(records)):
                if number >= len(records):
                    began = time.monotonic()
                    output.update(RunPlot(records := read_records(self.folder), self.name))
                    time.sleep(max(1.0, 4 * (time.monotonic() - began)))  # a small machine has better things to do
        return None

    def result(self) -> Summary:
        """Wait for the end, free the run's resources, and return the summary; for the process that started the run
        alone. Raises the root cause if the run failed."""
        if self._outcome is None:
            remedy = "follow it with watch(), and read summary.json once it has ended"
            raise RunNotFound("was started by another process", remedy, field="name", value=self.name)
        try:
            summary = fetch(self._outcome)
        except (*ray_api.ENDED_CALLS, ActorUnreachable):  # the outcome is lost; the run may be alive
            for _ in self.records():
                pass
            summary = self._end()
        except ray.exceptions.RayTaskError as error:  # not of a cancelled call, which is both
            cause = root_cause(error)
            self._end(cause)
            raise cause from None
        finally:
            self.kill()
        return summary

    def kill(self) -> None:
        """Kill the run without saving, or remove the remains of an ended one; return when its name and resources are
        free again. Any number of callers may do so concurrently."""
        self._end()

    def stop(self) -> None:
        """Ask the run to save its weights and end; the process that started it waits for that before it exits."""
        if self._outcome is not None:
            atexit.register(self._wait)
        try:
            fetch(self._call(Master.stop), self._master_name, ANSWER_S)
        except ray_api.ENDED_CALLS:
            self._end()

    def pause(self) -> int:
        """Hold the run after its present optimiser step, for as long as you like; return that step."""
        return self._ask(Master.steer, "pause")

    def unpause(self) -> float:
        """Let a paused run continue; return the seconds that it was paused."""
        return self._ask(Master.steer, "unpause")

    def checkpoint(self) -> int:
        """Write a checkpoint after the present optimiser step, or while the run is paused; return its step."""
        return self._ask(Master.steer, "checkpoint")

    def evaluate(self, temperature: float | None = None, samples: int | None = None) -> list[EvaluationRecord]:
        """Evaluate after the present optimiser step, or while the run is paused; return a record per temperature. A
        ``temperature`` or number of ``samples`` replaces the config's for this evaluation alone, which does not count
        for the best checkpoints. Raises ConfigError, and changes nothing, if it is invalid."""
        given = {"temperatures": None if temperature is None else [temperature], "samples": samples}
        changes = {f"evaluation.{key}": value for key, value in given.items() if value is not None}
        return self._ask(Master.steer, "evaluate", changes)

    def set(self, key: str, value: Any, **more: Any) -> int:
        """Change a key of the config, and ``more`` together with it, after the present optimiser step; return that
        step. The change is kept when the run is resumed. Raises ConfigError, and changes nothing, if the new config is
        invalid or a key cannot change while the run is running."""
        return self._ask(Master.steer, "change", {key: value, **more})

    def skip_stage(self) -> int:
        """End the stage after its present optimiser step; return the number of steps that it has taken."""
        return self._ask(Master.steer, "skip_stage")

    def scale(self, engines: int) -> int:
        """Change the number of rollout engines; return how many there were, once new ones take requests. Requests of
        engines that end are answered by others. The run keeps what it has, and this raises, if one does not start, or
        if there is no room (PlacementError)."""
        return self._ask(Master.scale, engines)

    def _ask(self, method: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        """Wait until the run has served a request. Raises RunFinished if it ends first."""
        try:
            once = self._master.with_options(max_task_retries=0)
            return fetch(once.call(method, *arguments), self._master_name)
        except ray_api.ACTOR_ERRORS:
            raise RunFinished("the run has ended", "see its summary", field="run", value=self.name) from None
        except ray.exceptions.RayTaskError as error:
            raise root_cause(error, self._master_name) from None

    def _call(self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> Awaitable[T]:
        call = self._calls[method.__name__] = self._master.call(method, *arguments)
        return call

    def _wait(self) -> None:
        with contextlib.suppress(RayrftError):
            if ray.is_initialized():
                self.result()

    def pids(self) -> dict[str, int]:
        """Return the process ids of the Master and of the actors that it supervises, as `Master.pids`."""
        return fetch(self._master.call(Master.pids), self._master_name, ANSWER_S)

    def _end(self, cause: RayrftError | None = None) -> Summary:
        """Kill the actors of the run and return its summary, written here if the Master did not. ``cause`` is why the
        run failed, if known. Safe to call concurrently."""
        atexit.unregister(self._wait)
        named = find_actor(self._master_name)
        if named is not None and named.actor != self._master.actor:  # another run has taken the name since the end
            return summarise(self.name, *self._death(), Totals(), None, 0.0)
        # The Master first, which would otherwise report the deaths of the others as failures; also if it is dead and
        # not listed, because a process that holds its handle still sees its name as taken.
        if self._guard is not None:
            self._guard.end()
        cancel_calls([*self._calls.values()])  # a list: other threads add calls meanwhile
        end([self._master])
        clear_run(self.name)
        if (summary := read_summary(self.folder)) is not None:
            return summary
        status, error = ("failed", str(cause)) if cause is not None else self._death()
        summary = summarise_from_folder(self.folder, status, error)
        if self.folder.is_dir():
            with contextlib.suppress(StorageError):  # full disk: the caller still gets the summary
                write_summary(self.folder, summary)
        return summary

    def _death(self) -> tuple[str, str]:
        """Return the status and error of a run whose Master is dead."""
        try:
            fetch_when_reachable(lambda: self._master.with_options(max_task_retries=0).call(Master.watch))
        except ray_api.ACTOR_ERRORS as error:
            reason = death_reason(error)
        killed = "ray.kill" in reason
        problem = "the run was killed" if killed else f"the master died: {reason}"
        return "killed" if killed else "failed", str(ActorDied(problem, field=self._master_name))
