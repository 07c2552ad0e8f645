"""A bench: models are evaluated on task sets one after the other, without trainer or Buffer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rayrft.benchmark.result import BenchResult, BenchScore
from rayrft.benchmark.worker import BenchWorker, read_attempts
from rayrft.config import RunConfig, load_config, load_run_config
from rayrft.config.serve import ServeConfig
from rayrft.config.tasks import TaskSourceConfig
from rayrft.core.actors import create_auxiliary, create_engines, judges, reward_service, scoring, start_auxiliary
from rayrft.core.checkpoints import Checkpoints, export, find_folder
from rayrft.core.cluster import connect
from rayrft.core.pipeline_models import task_engines
from rayrft.core.placement import NAMESPACE, Placement, actor_name, check_room, plan_placement, show_plan
from rayrft.core.preflight import check_auxiliary, check_workflows, find_model
from rayrft.core.reward_checks import check_rewards
from rayrft.core.supervision import root_cause
from rayrft.data.task_sources import RowsRead
from rayrft.data.task_splits import load_taskset
from rayrft.errors import ModelError, RunNotFound, Stalled
from rayrft.experience import Task
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.evaluation import Attempt, measure
from rayrft.pipelines.report import summary
from rayrft.pipelines.tasks import load_splits, read_report
from rayrft.runtime.handle import Handle, end, fetch

_HELD_OUT = "held_out"


@dataclass(frozen=True)
class BenchModel:
    """A model to evaluate."""

    name: str
    path: str
    """A folder in Hugging Face format, or an id on the hub."""
    identity: str
    """Changes with the weights."""


def bench(
    config: str | Path | dict[str, Any] | RunConfig,
    *,
    models: dict[str, str] | None = None,
    say: Callable[[str], None] = print,
    **overrides: Any,
) -> BenchResult:
    """Evaluate the models of a config on its task sets; return the scores.

    ``config`` is that of a bench or of a run, whose workflow, environment, reward and engines are used; ``models`` are
    added to ``bench.models``, and ``overrides`` are dotted keys. Every attempt is written to ``<storage>/<name>/bench``
    as it comes: a bench that was killed goes on where it stopped, and what was attempted before under the same
    settings is not attempted again. Raises a RayrftError, before any actor starts, if config, data, models or cluster
    are unsuitable, and ActorDied if an engine dies.
    """
    named = {f"bench.models.{name}": model for name, model in (models or {}).items()}
    checked = load_config(config, {**overrides, **named, "mode": "bench"})
    folder = checked.folder / "bench"
    connect()  # files of tasks are read by Ray
    tasksets = _tasksets(checked, say)
    check_auxiliary(checked)
    check_workflows(checked.explorer, chain.from_iterable(tasksets.values()), checked.auxiliary)
    numbered = ((task, number) for number, tasks in enumerate(tasksets.values()) for task in tasks)
    for notice in check_rewards(checked.scoring, numbered, checked.auxiliary):
        say(notice)
    given = checked.bench.models or {"model": str(checked.model.path)}
    found = [find_weights(name, model, checked.storage, folder) for name, model in given.items()]
    sources = {
        name: (checked.tasks if name == _HELD_OUT else checked.bench.tasksets[name]).sources  # type: ignore[union-attr]
        for name in tasksets
    }
    files = {
        (model.name, name): folder
        / "attempts"
        / model.name
        / f"{name}-{fingerprint(checked, model.identity, sources[name])}.jsonl"
        for model in found
        for name in tasksets
    }
    attempt_all(checked, f"{checked.name}-bench", found, tasksets, files, say)
    result = BenchResult(
        checked.name,
        folder,
        tuple(
            BenchScore(model.name, taskset, measure(attempts, checked.bench.k, seed=checked.seed))
            for model in found
            for taskset, tasks in tasksets.items()
            if (attempts := attempts_in(checked, files[model.name, taskset], tasks))
        ),
    )
    (folder / "results.json").write_text(result.to_json())
    result.save_plot(folder / "plot.png")
    return result


def attempt_all(
    config: RunConfig,
    run: str,
    models: Sequence[BenchModel],
    tasksets: Mapping[str, list[Task]],
    files: Mapping[tuple[str, str], Path],
    say: Callable[[str], None],
) -> None:
    """Attempt every task set with every model, ``bench.samples`` times a task, less what is in the files of attempts,
    by model and task set; ``run`` names the actors. Raises the errors of `bench`."""
    missing = {
        model.name: [name for name, tasks in tasksets.items() if _missing(config, files[model.name, name], tasks)]
        for model in models
    }
    if not any(missing.values()):
        return
    parts = plan_placement(config)
    say(show_plan(run, parts))
    check_room(parts)
    placement = Placement(run, parts)
    try:
        placement.reserve([part.name for part in parts if not part.served])
        with _auxiliary_open(config, placement) as auxiliary, _rewards_open(config, auxiliary):
            for model in models:
                if missing[model.name]:
                    with _Evaluation(config, placement, model, auxiliary) as evaluation:
                        for name in missing[model.name]:
                            evaluation.run(name, tasksets[name], files[model.name, name], say)
    finally:
        placement.remove()


@contextlib.contextmanager
def _deaths() -> Iterator[None]:
    """Raise what ended an actor as its root cause."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        yield
    except (RayActorError, RayTaskError) as error:
        cause = root_cause(error, "bench")
        cause.remedy = cause.remedy or "start the bench again: it goes on where it stopped"
        raise cause from None


@contextlib.contextmanager
def _auxiliary_open(config: RunConfig, placement: Placement) -> Iterator[dict[str, Handle[EnginePool]]]:
    """Have the engines of the auxiliary models inside a ``with``, for all evaluated models; give their pools."""
    created, deadline_s = create_auxiliary(config.auxiliary, placement), config.monitor.stall_s
    starting = {name: start_auxiliary(actors, config.auxiliary[name], config.seed) for name, actors in created.items()}
    try:
        with _deaths():
            for name, actors in created.items():
                for engine, started in zip(actors.engines, starting[name], strict=True):
                    fetch(started, engine.name, deadline_s)
                fetch(actors.engine_pool.call(EnginePool.join, actors.members), actors.engine_pool.name, deadline_s)
        yield {name: actors.engine_pool for name, actors in created.items()}
    finally:
        end([actor for actors in created.values() for actor in actors.all])


def _rewards_open(
    config: RunConfig, auxiliary: dict[str, Handle[EnginePool]]
) -> contextlib.AbstractContextManager[object]:
    """Have the rewards on Ray Serve, if they belong there, inside a ``with``."""
    service = reward_service(config)
    if service is None:
        return contextlib.nullcontext()
    from rayrft.rewards.service import rewards_open
    from rayrft.runtime.serving.applications import Owner

    owner, address = Owner(NAMESPACE, actor_name(service.name, "rewards")), ServeConfig()
    at, models = (address.host, address.port), judges(config, auxiliary)
    return rewards_open(service, config.scoring, config.plugins, owner, at, models=models)


class _Evaluation:
    """Actors that evaluate one model, inside a ``with``: another model gets new ones, for it may be of another kind."""

    def __init__(
        self, config: RunConfig, placement: Placement, model: BenchModel, auxiliary: dict[str, Handle[EnginePool]]
    ) -> None:
        self._config = config
        self._model = model
        self._engines = create_engines(placement, config.explorer.engine.count)
        self._pool = placement.actor(EnginePool, "engine_pool", name="engine_pool").create()
        self._worker = placement.actor(BenchWorker, "explorer", name="explorer").create(
            config, model.path, self._pool, scoring(config, placement, auxiliary), auxiliary
        )
        self._seen = 0
        """Tasks that the worker has answered."""

    def __enter__(self) -> _Evaluation:
        config, deadline_s = self._config, self._config.monitor.stall_s
        starting = [
            engine.call(
                RolloutEngine.start,
                self._model.path,
                config.explorer.engine,
                max_length=config.model.max_length,
                dtype=config.model.dtype,
                seed=config.seed + index,
            )
            for index, engine in enumerate(self._engines)
        ]
        try:
            with _deaths():
                fetch(self._worker.call(BenchWorker.start), "explorer", deadline_s)
                for engine, started in zip(self._engines, starting, strict=True):
                    fetch(started, engine.name, deadline_s)
                members = [Member(engine, 0) for engine in self._engines]
                fetch(self._pool.call(EnginePool.join, members), "engine_pool", deadline_s)
        except BaseException:
            self.__exit__()
            raise
        return self

    def run(self, name: str, tasks: list[Task], file: Path, say: Callable[[str], None]) -> None:
        """Attempt a task set, telling how far it is."""
        import ray

        todo = _missing(self._config, file, tasks)
        say(f"{self._model.name} on {name}: {len(todo)} of {len(tasks)} tasks to attempt")
        running, stall_s = self._worker.call(BenchWorker.run, tasks, file), self._config.monitor.stall_s
        first, told = self._seen, 0
        with _deaths():
            while True:
                answered = self._worker.call(BenchWorker.answered, self._seen)
                ready, _ = ray.wait([running, answered], timeout=stall_s)
                if running in ready:
                    fetch(running)
                    self._seen = first + len(todo)
                    return
                if not ready:
                    raise Stalled(
                        f"no task was answered for {stall_s:g} s",
                        "see the engines' logs in the Ray dashboard; if it takes long, raise monitor.stall_s",
                        field="bench",
                        value=f"{self._model.name} on {name}",
                    )
                self._seen = fetch(answered)
                if (tenth := 10 * (self._seen - first) // len(todo)) > told:
                    told = tenth
                    say(f"{self._model.name} on {name}: {self._seen - first} of {len(todo)}")

    def __exit__(self, *_: object) -> None:
        end([self._worker, self._pool, *self._engines])


def _tasksets(config: RunConfig, say: Callable[[str], None]) -> dict[str, list[Task]]:
    """Read the task sets, and say which rows are left out."""
    left_out: list[RowsRead] = []
    tasksets = {
        name: load_taskset(taskset, f"bench.tasksets.{name}", config.seed, left_out.append)
        for name, taskset in config.bench.tasksets.items()
    }
    reports = [*map(read_report, left_out)]
    if config.tasks is not None:
        bench = [task for tasks in tasksets.values() for task in tasks]
        splits, found = load_splits(config, bench, task_engines(config))
        tasksets, reports = {_HELD_OUT: splits.evaluation, **tasksets}, [*reports, *found]
    for line in summary(reports):
        say(f"tasks: {line}")
    return tasksets


def find_weights(name: str, model: str, storage: Path, folder: Path, field: str | None = None) -> BenchModel:
    """Find a model by what ``bench.models`` says, or config key ``field``; weights of a checkpoint are written below
    ``folder``, once. Raises ModelError if there is none, or it answers nothing."""
    field = field or f"bench.models.{name}"
    found = _weights(name, model, storage, folder, field)
    config = Path(found.path) / "config.json"
    kinds = json.loads(config.read_text()).get("architectures") or [] if config.is_file() else []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        remedy = "give the weights of a stage that trains the policy, such as RUN@STAGE"
        raise ModelError("is a reward model, which answers nothing", remedy, field=field, value=model)
    return found


def _weights(name: str, model: str, storage: Path, folder: Path, field: str) -> BenchModel:
    if (Path(model) / "config.json").is_file():
        return BenchModel(name, str(Path(model).absolute()), _identity(Path(model)))
    run, _, which = model.partition("@")
    try:
        found = find_folder(run, storage)
    except RunNotFound:
        if which or Path(model).exists():
            remedy = "give a model's folder, an id on the hub, or RUN or RUN@WHICH of a run"
            raise ModelError("neither a model nor a run", remedy, field=field, value=model) from None
        return BenchModel(name, find_model(model, field), model)
    config = load_run_config(found)
    checkpoints = found / "checkpoints"
    if which == "start":
        path = found / "model" if config.model.tiny is not None else Path(str(config.model.path))
        return BenchModel(name, str(path), _identity(path) if path.is_dir() else str(path))
    named = checkpoints / (which or "final")
    if (named / "config.json").is_file():
        return BenchModel(name, str(named.absolute()), _identity(named))
    steps = [progress.step for progress in Checkpoints(found, config.checkpoint).all() if progress.step]
    if which not in map(str, steps) and (which or not steps):
        known = [path.parent.name for path in sorted(checkpoints.glob("*/config.json"))]
        remedy = f"choose one of: {', '.join(['start', *known, *map(str, steps)])}"
        raise ModelError("the run has no such weights", remedy, field=field, value=model)
    step = int(which) if which else steps[-1]
    written = folder / "models" / f"{config.name}-{step:06d}-{_identity(checkpoints / f'step-{step:06d}')}"
    if not (written / "config.json").is_file():
        export(found, written, step)
    return BenchModel(name, str(written), _identity(written))


def _identity(folder: Path) -> str:
    """Digest the names, sizes and times of a folder's files of weights and config."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return _digest([str(folder.absolute()), stats])


def fingerprint(config: RunConfig, model: str, sources: Sequence[TaskSourceConfig]) -> str:
    """Digest all that an attempt at a task depends on; ``model`` is the identity of its weights."""
    explorer = config.explorer
    return _digest(
        [
            model,
            config.model.model_dump(mode="json", include={"dtype", "max_length"}),
            config.reward.model_dump(mode="json", exclude={"workers"}),
            {name: each.model_dump(mode="json", exclude={"engine"}) for name, each in config.auxiliary.items()},
            explorer.model_dump(mode="json", include=_EXPLORER),
            config.bench.model_dump(mode="json", include={"temperature", "max_tokens"}),
            config.seed,
            [hashlib.blake2b(path.read_bytes()).hexdigest() for path in config.plugins],
            [(each.system, each.workflow) for each in sources],
        ]
    )


_EXPLORER = {"workflow", "workflow_options", "environment", "environment_options", "deadline_s", "sampling"}


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=6).hexdigest()


def attempts_in(config: RunConfig, file: Path, tasks: list[Task]) -> list[Attempt]:
    """Return the attempts at these tasks in a file, as many as the config asks for."""
    ids = {task.id for task in tasks}
    found = read_attempts(file)
    return [attempt for attempt in found if attempt.task_id in ids and attempt.repeat < config.bench.samples]


def _missing(config: RunConfig, file: Path, tasks: list[Task]) -> list[Task]:
    """Return the tasks that have not all their attempts in a file."""
    done = Counter(attempt.task_id for attempt in attempts_in(config, file, tasks))
    return [task for task in tasks if done[task.id] < config.bench.samples]
