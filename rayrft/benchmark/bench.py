"""A bench: models are evaluated on task sets one after the other, without trainer or Buffer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrft.benchmark.result import BenchResult, BenchScore
from rayrft.benchmark.worker import BenchWorker, read_attempts
from rayrft.config import RunConfig, load_config, load_run_config
from rayrft.config.tasks import TaskSourceConfig
from rayrft.core.bundles import check_room, fitting_nodes
from rayrft.core.checkpoints import Checkpoints, export, find_folder
from rayrft.core.cluster import connect
from rayrft.core.doctor import check_gpus
from rayrft.core.engine_groups import EngineGroup, policy_model, serve_engines
from rayrft.core.parts.rewards import remote_models, remote_scoring, reward_actors, reward_service
from rayrft.core.parts.table import plan_placement
from rayrft.core.placement import Placement, actor_name, show_plan
from rayrft.core.plan import check_memory
from rayrft.core.restarts import Budget
from rayrft.core.services import task_engines
from rayrft.core.shared_files import check_shared, check_storage, named_files
from rayrft.data.models import check_auxiliary, check_cache, check_length, find_model
from rayrft.data.task_sources import RowsRead
from rayrft.data.task_splits import load_taskset
from rayrft.errors import ActorDied, ActorUnreachable, ModelError, RayrftError, RunNotFound, Stalled
from rayrft.experience import Task, json_digest
from rayrft.explorer.engines.arguments import check_run_options
from rayrft.explorer.engines.pool import EnginePool
from rayrft.explorer.evaluation import Attempt, measure
from rayrft.explorer.workflows.base import check_workflows
from rayrft.pipelines.report import summary
from rayrft.pipelines.tasks import load_splits, read_report
from rayrft.rewards.checks import check_rewards
from rayrft.rewards.scorer import RewardActor
from rayrft.runtime.handle import Handle, answer, end
from rayrft.runtime.ray_api import ray
from rayrft.runtime.serving import HttpSettings

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
    as it comes. A killed bench resumes; attempts made with the same settings are reused.

    Raises a RayrftError, before any actor starts, if config, data, models or cluster are unsuitable. If an actor dies,
    the bench continues with new ones, within ``restarts.per_hour``; ActorDied is raised if it attempted nothing more.
    """
    named = {f"bench.models.{name}": model for name, model in (models or {}).items()}
    checked = load_config(config, {**overrides, **named, "mode": "bench"})
    folder = checked.folder / "bench"
    check_storage(checked)
    connect()  # files of tasks are read by Ray
    tasksets = _tasksets(checked, say)
    numbered = [(task, number) for number, (tasks, _) in enumerate(tasksets.values()) for task in tasks]
    check_attempts(checked, numbered, say)
    given = checked.bench.models or {"model": str(checked.model.path)}
    found = [find_weights(name, model, checked.storage, folder) for name, model in given.items()]
    attempts = attempt_all(checked, f"{checked.name}-bench", folder, found, tasksets, say)
    scores = [
        BenchScore(model, taskset, measure(each, checked.bench.k, seed=checked.seed))
        for (model, taskset), each in attempts.items()
        if each
    ]
    result = BenchResult(checked.name, folder, tuple(scores))
    (folder / "results.json").write_text(result.to_json())
    result.save_plot(folder / "plot.png")
    return result


def check_attempts(config: RunConfig, tasks: Sequence[tuple[Task, int]], say: Callable[[str], None]) -> None:
    """Check the models, engines, workflows and rewards that attempt tasks, each with the number of its source."""
    check_auxiliary(config.auxiliary)
    check_run_options(config)
    check_workflows(config.explorer, (task for task, _ in tasks), config.auxiliary, config.plugins)
    for notice in check_rewards(config.scoring, tasks, config.auxiliary, config.explorer.workflow):
        say(notice)


def attempt_all(
    config: RunConfig,
    run: str,
    folder: Path,
    models: Sequence[BenchModel],
    tasksets: Mapping[str, tuple[list[Task], list[TaskSourceConfig]]],
    say: Callable[[str], None],
    budget: Budget | None = None,
) -> dict[tuple[str, str], list[Attempt]]:
    """Attempt every task set with every model, ``bench.samples`` times a task; return the attempts by model and task
    set. Those in the files below ``folder`` are not made again. ``run`` names the actors, whose deaths so far are in
    ``budget``. Raises the errors of `bench`.
    """
    made = folder / "attempts"
    files = {
        (model.name, name): made / model.name / f"{name}-{fingerprint(config, model.identity, sources)}.jsonl"
        for model in models
        for name, (_, sources) in tasksets.items()
    }
    missing = {key: missing_tasks(config, file, tasksets[key[1]][0]) for key, file in files.items()}
    todo = {
        model: {name: tasks for name, (tasks, _) in tasksets.items() if missing[model.name, name]} for model in models
    }
    if any(todo.values()):
        for model in models:
            check_length(model.path, length := config.model.max_length, "model.max_length")
            check_cache(model.path, length, config.model.dtype, config.explorer.engine, "explorer.engine")
        plan = plan_placement(config)
        say(show_plan(run, plan))
        check_room(plan, config.placement.wait_s, say)
        gpu_gb = check_gpus(plan, say)
        for model in models:
            of_model = config.model.model_copy(update={"path": model.path})
            check_memory(config.model_copy(update={"model": of_model}), gpu_gb)
        folder.mkdir(parents=True, exist_ok=True)
        images = (image for tasks, _ in tasksets.values() for task in tasks for image in task.images)
        named = named_files(config, images)
        named["bench.models"] = [model.path for model in models]
        check_shared(folder, named, fitting_nodes(plan))
        placement, groups, rewards = Placement(run, plan), dict[str, EngineGroup](), list[Handle[RewardActor]]()
        budget, pause_s = budget or Budget(config.restarts), -1.0
        try:
            placement.reserve([each.name for each in plan if not each.served], config.placement.wait_s, say)
            groups |= EngineGroup.auxiliary(placement, config.auxiliary, config.seed)
            serve_engines(groups.values(), config.monitor.stall_s)
            pools = {name: group.pool for name, group in groups.items()}
            rewards = reward_actors(config, placement, pools)
            with _rewards_open(config, pools):
                for model in models:
                    if todo[model]:
                        _attempt(config, placement, model, pools, rewards, todo[model], files, say)
        except RayrftError as error:
            error.remedy = error.remedy or "start the bench again: it resumes"
            now = {key: missing_tasks(config, file, tasksets[key[1]][0]) for key, file in files.items()}
            if not isinstance(error, ActorDied | ActorUnreachable) or now == missing:
                raise
            pause_s = budget.spend(error)
            say(f"{error.field}: {error.problem}; the bench continues with new actors in {pause_s:.0f} s")
        finally:
            end([*rewards, *(actor for group in groups.values() for actor in group.actors)])
            placement.remove()
        if pause_s >= 0:
            time.sleep(pause_s)
            return attempt_all(config, run, folder, models, tasksets, say, budget)
    return {(model, name): attempts_in(config, file, tasksets[name][0]) for (model, name), file in files.items()}


def _rewards_open(config: RunConfig, pools: dict[str, Handle[EnginePool]]) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that serves the rewards that belong on Ray Serve."""
    service = reward_service(config)
    if service is None:
        return contextlib.nullcontext()
    from rayrft.rewards.service import rewards_open

    owner = actor_name(service.name, "rewards")
    return rewards_open(service, owner, HttpSettings(), models=remote_models(config, pools))


def _attempt(
    config: RunConfig,
    placement: Placement,
    model: BenchModel,
    pools: dict[str, Handle[EnginePool]],
    rewards: list[Handle[RewardActor]],
    tasksets: Mapping[str, list[Task]],
    files: Mapping[tuple[str, str], Path],
    say: Callable[[str], None],
) -> None:
    """Attempt task sets with one model, on actors of its own: the next model may be of another kind."""
    policy, stall_s = EngineGroup(placement, policy_model(config, model.path)), config.monitor.stall_s
    worker = placement.actor(BenchWorker, "explorer", name="explorer")(
        config, model.path, policy.pool, remote_scoring(config, rewards), pools
    )
    try:
        starting = worker.call(BenchWorker.start)
        serve_engines([policy], stall_s)
        answer(starting, "explorer", stall_s)
        for name, tasks in tasksets.items():
            file, what = files[model.name, name], f"{model.name} on {name}"
            left, seen = len(missing_tasks(config, file, tasks)), 0
            say(f"{what}: {left} of {len(tasks)} tasks to attempt")
            running = worker.call(BenchWorker.run, tasks, file)
            while True:
                answered = worker.call(BenchWorker.answered, seen)
                ready, _ = ray.wait([running, answered], timeout=stall_s)
                if running in ready:
                    answer(running, "bench")
                    break
                if not ready:
                    remedy = "see the engines' logs in the Ray dashboard; if it takes long, raise monitor.stall_s"
                    raise Stalled(f"no task was answered for {stall_s:g} s", remedy, field="bench", value=what)
                before, seen = seen, answer(answered, "bench")
                if 10 * seen // left > 10 * before // left:
                    say(f"{what}: {seen} of {left}")
    finally:
        end([worker, *policy.actors])


def _tasksets(config: RunConfig, say: Callable[[str], None]) -> dict[str, tuple[list[Task], list[TaskSourceConfig]]]:
    """Read the task sets, each with its sources, and say which rows are left out."""
    left_out: list[RowsRead] = []
    tasksets = {
        name: (load_taskset(taskset, f"bench.tasksets.{name}", config.seed, left_out.append), taskset.sources)
        for name, taskset in config.bench.tasksets.items()
    }
    reports = [*map(read_report, left_out)]
    if config.tasks is not None:
        bench = [task for tasks, _ in tasksets.values() for task in tasks]
        splits, found = load_splits(config, bench, task_engines(config))
        tasksets = {_HELD_OUT: (splits.evaluation, config.tasks.sources), **tasksets}
        reports += found
    for line in summary(reports):
        say(f"tasks: {line}")
    return tasksets


def find_weights(name: str, model: str, storage: Path, folder: Path, field: str | None = None) -> BenchModel:
    """Find a model by its value in ``bench.models``, or of config key ``field``. Weights of a checkpoint are written
    below ``folder``, once. Raises ModelError if there is none, or if it is a reward model."""
    field = field or f"bench.models.{name}"
    found = _weights(name, model, storage, folder, field)
    config = Path(found.path) / "config.json"
    kinds = json.loads(config.read_text()).get("architectures") or [] if config.is_file() else []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        remedy = "give the weights of a stage that trains the policy, such as RUN@STAGE"
        raise ModelError("a reward model cannot answer", remedy, field=field, value=model)
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
    return json_digest([str(folder.absolute()), stats])


def fingerprint(config: RunConfig, model: str, sources: Sequence[TaskSourceConfig]) -> str:
    """Digest all that an attempt at a task depends on; ``model`` is the identity of its weights."""
    explorer = config.explorer
    return json_digest(
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


def attempts_in(config: RunConfig, file: Path, tasks: list[Task]) -> list[Attempt]:
    """Return the attempts at these tasks in a file, as many as the config asks for."""
    ids = {task.id for task in tasks}
    found = read_attempts(file)
    return [attempt for attempt in found if attempt.task_id in ids and attempt.repeat < config.bench.samples]


def missing_tasks(config: RunConfig, file: Path, tasks: list[Task]) -> list[Task]:
    """Return the tasks that have not all their attempts in a file."""
    done = Counter(attempt.task_id for attempt in attempts_in(config, file, tasks))
    return [task for task in tasks if done[task.id] < config.bench.samples]
