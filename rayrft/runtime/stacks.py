"""Stacks of actors that do not progress, by py-spy, which Ray installs; and whether they are stopped by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil

from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle
from rayrft.runtime.ray_api import ray

R = TypeVar("R")
_DUMP_S, _ANSWER_S = 10.0, 30.0
_FRAMES = 4
"""Innermost calls of a thread that are shown."""
_LIBRARY = re.compile(r".*\((asyncio/|concurrent/|multiprocessing/|queue\.py|selectors\.py|threading\.py)")
"""A call of which a thread that waits for work consists, or with which it begins."""
_SERVANT = re.compile(
    r"\b(TMonitor\.run|RayMetrics\._export|_Template\.run|Parent\.call|SignalCallback\._run|_process_input_queue"
    r"|process_(input|output)_sockets|monitor_engine_liveness) \(|\(multiprocessing/resource_tracker"
)
"""A call in which a thread of a library waits for as long as its process lives."""


async def look_at(actor: Handle[Any], look: Callable[[int], R]) -> R | None:
    """Call ``look`` with an actor's process id on its node; None if it has no process, or its node does not answer."""
    found = await asyncio.to_thread(ray_api.actors, actor.actor._actor_id.hex())
    if not found or found["State"] != "ALIVE":
        return None
    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(found["Address"]["NodeID"], soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(look).options(scheduling_strategy=where)
    try:
        return cast(R, await asyncio.wait_for(task.remote(found["Pid"]), _ANSWER_S))
    except (ray.exceptions.RayError, TimeoutError):
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, or a child without a session of its own, such as vLLM's core."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):  # one that has just ended
        process = psutil.Process(pid)
        own = [each for each in process.children(recursive=True) if os.getsid(each.pid) == os.getsid(pid)]
        return any(each.status() == psutil.STATUS_STOPPED for each in (process, *own))
    return False


def dump(pid: int) -> str:
    """Return the calls in which the threads of a process and of its children are, the innermost first. Threads that
    wait for work are left out. "" if there are none, or py-spy may not look into the process."""
    spy = Path(sysconfig.get_path("scripts")) / "py-spy"
    command = [str(spy), "dump", "--nonblocking", "--subprocesses", "--pid", str(pid)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    stacks = []
    for thread in text.split("\nThread ")[1:]:
        calls = [call for call in re.findall(r"^    (.+)$", thread, re.M) if "(ray/" not in call]
        while calls and _LIBRARY.match(calls[-1]):
            calls.pop()
        if calls and not any(map(_SERVANT.search, calls)):
            stacks.append(" < ".join(calls[:_FRAMES]))
    return "; ".join(stacks)
