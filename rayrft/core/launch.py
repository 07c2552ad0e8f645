"""Starting and resuming runs, and attaching to running ones."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayrft.config import RunConfig, load_config, load_run_config
from rayrft.core.bundles import check_room, fitting_nodes
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.cluster import connect
from rayrft.core.doctor import check_gpus
from rayrft.core.janitor import Guard
from rayrft.core.master import Master
from rayrft.core.parts.table import plan_placement
from rayrft.core.placement import Placement, actor_name, clear_run, reserve_name, running_runs, show_plan, starting_runs
from rayrft.core.plan import check_memory, engine_share
from rayrft.core.preflight import prepare
from rayrft.core.run import ANSWER_S, Run
from rayrft.core.run_files import read_run
from rayrft.core.run_folder import write_config
from rayrft.core.services import task_engines
from rayrft.core.shared_files import check_shared, check_storage, named_files
from rayrft.core.steering import latest_config
from rayrft.errors import ClusterError, ConfigError, PlacementError, RayrftError, RunFinished, RunNotFound, nearest
from rayrft.monitor.records import read_records
from rayrft.monitor.summary import RunStatus, read_summary
from rayrft.runtime.handle import Handle, fetch, find_actor
from rayrft.runtime.ray_api import ray


def start(
    config: str | Path | dict[str, Any] | RunConfig, *, say: Callable[[str], None] = print, **overrides: Any
) -> Run:
    """Check a config, place the run on the cluster and start it; return while it is running. ``overrides`` are dotted
    keys: ``start("run.yaml", **{"trainer.ranks": 1})``. ``say`` receives the placement plan. Raises a RayrftError,
    before any actor starts, if config, data, model or cluster are unsuitable; RunFinished if ``on_existing: resume``
    finds the run finished."""
    checked = load_config(config, overrides)
    if checked.mode == "bench":
        raise ConfigError("a bench is not a run", "use rayrft.bench, or: rayrft bench", field="mode", value="bench")
    _until_ended(checked, say)
    if checked.on_existing == "rename" or not (checked.folder / "config.yaml").exists():
        return _start(checked, None, say)
    if checked.on_existing == "refuse":
        remedy = "choose another name, or set on_existing to rename or resume"
        raise ConfigError("a run of this name exists", remedy, field="name", value=str(checked.folder))
    checked = latest_config(checked)
    return _start(checked, _find_progress(checked), say)


def resume(folder: str | Path, *, say: Callable[[str], None] = print, **overrides: Any) -> Run:
    """Resume a crashed or stopped run from its latest checkpoint; rows leased since are leased again in their order.

    ``overrides`` may raise a stage's steps, change resources and so on. Raises ConfigError if there is no such run,
    RunFinished if it is finished, StorageError if its latest checkpoint is incomplete, and the errors of `start`.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        remedy = "give the folder of a run: <storage>/<name>"
        raise ConfigError("not a run folder (no config.yaml)", remedy, field="run", value=str(folder))
    config = load_run_config(folder, overrides, trusted=True)
    if config.folder != folder.absolute():  # it was moved, or the storage is mounted elsewhere
        config = load_config(config, {"storage": str(folder.absolute().parent), "name": folder.name})
    _until_ended(config, say)
    progress = _find_progress(config)
    if progress is None:
        raise ConfigError("the run was never started", "start it instead", field="run", value=str(folder))
    return _start(config, progress, say)


def _until_ended(config: RunConfig, say: Callable[[str], None]) -> None:
    """Wait for the end of a run in this folder that saves its weights: it was stopped, or who started it has died."""
    summary = read_summary(config.folder)
    if summary is None or summary.status != "killed":  # see `Master.stop`
        return
    connect()
    if (master := find_actor(actor_name(config.name, "master"))) is not None:
        say("the run of this name saves its weights: waiting for its end")
        with contextlib.suppress(RayrftError):  # why it failed is in its summary
            Run(config.name, config.folder, master, master.call(Master.run, [])).result()


def _find_progress(config: RunConfig) -> Progress | None:
    """Return where a run continues: its latest checkpoint, or None if it was never started. Raises RunFinished, and
    StorageError if the checkpoint is incomplete."""
    checkpoints = Checkpoints(config.folder, config.checkpoint)
    progress = checkpoints.latest()
    if progress is None:
        return None
    last = config.stages[-1]
    ended = read_summary(config.folder)
    # A run killed after its last step and before the summary may lack its final weights.
    finished = ended is not None and ended.status == "finished" and ended.steps == progress.step
    if finished and progress.stage == len(config.stages) - 1 and not progress.needs(last.steps):
        remedy = f"to continue training, raise stages.{last.name}.steps"
        problem = f"the run is finished after {progress.step} steps"
        raise RunFinished(problem, remedy, field="run", value=str(config.folder))
    checkpoints.check(progress.step)
    return progress


def _start(checked: RunConfig, progress: Progress | None, say: Callable[[str], None]) -> Run:
    """Start a run, or resume one from ``progress``."""
    check_storage(checked)
    connect()
    if checked.name in running_runs():
        remedy = f"choose another name (name=…), or run: rayrft stop {checked.name}"
        raise PlacementError("a run of this name is running", remedy, field="name", value=checked.name)
    reserve_name(checked.name)
    guard = Guard(checked.name, checked.monitor.stall_s)
    try:
        return _place(checked, progress, guard, say)
    except BaseException:
        guard.end()
        clear_run(checked.name)
        raise


def _place(checked: RunConfig, progress: Progress | None, guard: Guard, say: Callable[[str], None]) -> Run:
    """Check that the cluster suits the run, prepare it, and start its Master, which outlives this process."""
    parts = plan_placement(checked)
    say(show_plan(checked.name, parts))
    check_room(parts, checked.placement.wait_s, say)
    share = None
    if (gpu_gb := check_gpus(parts, say)) is not None:
        check_memory(checked, gpu_gb)
        share = engine_share(checked, gpu_gb)
    placement = Placement(checked.name, parts, detached=True)
    placement.reserve(["master"], checked.placement.wait_s, say)
    began = progress or Progress(uuid.uuid4().hex)
    # The Master keeps as many: see `Recorder`.
    earlier = began.records if checked.trains or not progress else len(read_records(checked.folder))
    resumed, models, nodes = progress is not None, task_engines(checked, say), fitting_nodes(parts)
    check_shared(checked.folder if resumed else checked.storage, named_files(checked), nodes)
    prepared = prepare(checked, began.run_id, resumed=resumed, engines=models, say=say)
    prepared = replace(prepared, engine_share=share)
    check_shared(checked.folder, named_files(checked, prepared.images), nodes)
    if progress is None:
        Checkpoints(checked.folder, checked.checkpoint).mark_beginning(began)
    else:
        write_config(checked)  # the overrides apply to later resumes, too
        (checked.folder / "summary.json").unlink(missing_ok=True)

    guard.until_up()  # before there is a Master
    create = placement.actor(Master, "master", name="master", restarts=checked.restarts.per_hour)
    master = create(checked, began)
    guard.attend(master)
    outcome = master.call(Master.run, [ray.put(prepared)])
    return Run(checked.name, checked.folder, master, outcome, earlier, guard)


def attach(name: str) -> Run:
    """Return the running run of that name, from any process. Raises RunNotFound, and ClusterError without a cluster."""
    connect(start=False)
    master: Handle[Master] | None = find_actor(actor_name(name, "master"))
    if master is None:
        names, problem = running_runs(), "no run of that name is on this cluster"
        remedy = nearest(name, names) if names else "no run is running"
        if name in starting_runs():
            problem, remedy = "the run is starting", "try again once it is up"
        raise RunNotFound(problem, remedy, field="name", value=name)
    status = fetch(master.call(Master.status), actor_name(name, "master"), ANSWER_S)
    assert status.folder is not None  # as it has a Master
    return Run(name, status.folder, master)


def find_status(run: str) -> RunStatus:
    """Return the status of a run of this name on this cluster; else of an ended one, by its folder or its name in
    ``runs/``. Raises the errors of `attach` if there is neither."""
    try:
        return attach(run).status()
    except (RunNotFound, ClusterError) as error:
        if isinstance(error, RunNotFound) and run in starting_runs():
            return RunStatus(run, "starting", None, 0, 0, None)
        try:
            return read_run(run).status()
        except RunNotFound:
            raise error from None
