"""Stacks of actors that do not progress, by py-spy, which Ray installs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle
from rayrft.runtime.ray_api import ray

_DUMP_S, _ANSWER_S = 10.0, 30.0
_FRAMES = 4
"""Innermost calls of a thread that are shown."""
_LIBRARY = re.compile(r".*\((asyncio/|concurrent/|multiprocessing/|queue\.py|selectors\.py|threading\.py)")
"""A call of which a thread that waits for work consists, or with which it begins."""


async def find_stack(actor: Handle[Any]) -> str:
    """Return the calls in which the threads of an actor and of its child processes are, the innermost first; "" if they
    are not found: it has no process, its node does not answer, or py-spy may not look into its processes."""
    found = await asyncio.to_thread(ray_api.actors, actor.actor._actor_id.hex())
    if not found or found["State"] != "ALIVE":
        return ""
    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(found["Address"]["NodeID"], soft=False)
    look = ray.remote(num_cpus=0, max_retries=0)(dump).options(scheduling_strategy=where)
    try:
        return await asyncio.wait_for(look.remote(found["Pid"]), _ANSWER_S)
    except (ray.exceptions.RayError, TimeoutError):
        return ""


def dump(pid: int) -> str:
    """Return the stacks of a process of this machine and of its children, without threads that wait for work."""
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
        if calls:
            stacks.append(" < ".join(calls[:_FRAMES]))
    return "; ".join(stacks)
