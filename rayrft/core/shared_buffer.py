"""Buffers that belong to no run: starting, joining, listing and stopping them."""

from __future__ import annotations

import uuid

from rayrft.buffer.shared import FeedProgress, SharedBuffer, SharedStatus
from rayrft.config import RunConfig
from rayrft.core.parts.buffer import BUFFER
from rayrft.core.placement import Placement, actor_name, named_actors, remove_groups, running_runs
from rayrft.core.preflight import PreparedRun
from rayrft.errors import ActorDied, PlacementError, RunNotFound, nearest
from rayrft.runtime.handle import Handle, answer, end, fetch, find_actor

_ANSWER_S = 60.0
_PREFIX = "buffers/"
"""Names of runs have no slash."""


def open_shared_buffer(config: RunConfig) -> Handle[SharedBuffer]:
    """Return the Buffer that the config names; start it if it is not running, in a placement group that no job's end
    removes. Any number of jobs may do so at once. Raises PlacementError if there is no room for it, ConfigError if it
    has other settings, and StorageError if its log cannot be used."""
    name, folder = config.buffer.name, config.buffer_folder
    assert name is not None  # checked by the caller
    placement = Placement(_PREFIX + name, [BUFFER], detached=True)
    placement.reserve([BUFFER.name])
    create = placement.actor(SharedBuffer, BUFFER.name, name=BUFFER.name, restarts=-1)
    settings = config.buffer, config.seed, config.monitor.stall_s / 2, config.plugins
    buffer = create(name, folder, *settings)
    try:
        answer(buffer.call(SharedBuffer.check, folder, config.buffer), buffer.name)
    except ActorDied:  # it could not begin
        remove_groups(_PREFIX + name)
        raise
    return buffer


async def join_feed(buffer: Handle[SharedBuffer], config: RunConfig, prepared: PreparedRun) -> FeedProgress:
    """Start or resume the feed of an explore job; return its progress."""
    stage = config.explored_stage
    assert prepared.task_set is not None  # the mode needs tasks
    return await buffer.call(
        SharedBuffer.join_feed,
        prepared.run_id,
        uuid.uuid4().hex,
        config.name,
        prepared.terms,
        prepared.task_set,
        in_flight=(config.max_staleness + 1) * stage.groups,
        group_size=stage.group_size,
    )


async def join_trainer(buffer: Handle[SharedBuffer], config: RunConfig, prepared: PreparedRun, step: int) -> None:
    """Let a train job, which has taken ``step`` steps, take the batches."""
    await buffer.call(SharedBuffer.join_trainer, prepared.run_id, config.name, prepared.terms, step, running_runs())


def find_buffer(name: str) -> Handle[SharedBuffer]:
    """Return the running Buffer of that name. Raises RunNotFound."""
    if (buffer := find_actor(shared_actor_name(name))) is not None:
        return buffer
    remedy = nearest(name, names) if (names := buffers()) else "no named Buffer is running"
    raise RunNotFound("no Buffer of that name is on this cluster", remedy, field="buffer.name", value=name)


def shared_actor_name(name: str) -> str:
    """Return the name of a named Buffer's actor."""
    return actor_name(_PREFIX + name, BUFFER.name)


def buffers() -> list[str]:
    """Return the names of the Buffers on this cluster that belong to no run."""
    suffix = actor_name("", BUFFER.name)
    return sorted(name.removeprefix(_PREFIX).removesuffix(suffix) for name in named_actors(_PREFIX))


def buffer_status(name: str) -> SharedStatus:
    """Return the contents and jobs of a named Buffer. Raises RunNotFound."""
    return fetch(find_buffer(name).call(SharedBuffer.status), name, _ANSWER_S)


def stop_buffer(name: str, *, force: bool = False) -> SharedStatus:
    """End a named Buffer; return its last status. Its log stays: the next job that names it resumes it. Raises
    RunNotFound, and PlacementError while a job uses it, which would fail, unless ``force``."""
    buffer, status = find_buffer(name), buffer_status(name)
    if (using := sorted(status.jobs & set(running_runs()))) and not force:
        remedy = "stop them first, or give --force"
        raise PlacementError("jobs use this Buffer", remedy, field="buffer.name", value=using)
    fetch(buffer.call(SharedBuffer.flush), name, _ANSWER_S)
    end([buffer])
    remove_groups(_PREFIX + name)
    return status
