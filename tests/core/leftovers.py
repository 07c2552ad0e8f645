"""What runs leave in the cluster when they have ended: groups, actors, resources."""

from __future__ import annotations

import time

import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table

SHARED_BY_RUNS = {"_AutoscalingCoordinatorActor"}  # of Ray: the first to train starts it, for the whole cluster


def groups() -> set[str]:
    """Ids of the placement groups that hold something."""
    return {key for key, entry in placement_group_table().items() if entry["state"] != "REMOVED"}


def alive() -> set[str]:
    """The ids of actors that live or will."""
    found = actors().items()
    return {key for key, each in found if each["State"] != "DEAD" and each["ActorClassName"] not in SHARED_BY_RUNS}


def free() -> dict[str, float]:
    found = ray.available_resources()
    return {key: round(found.get(key, 0.0), 4) for key in ("CPU", "memory")}


def until_free(living: set[str], room: dict[str, float]) -> None:
    """Return when no other actors live than these, and as much is free: processes end, and Ray reports what they held,
    a moment later, also that of a run before."""
    deadline = time.monotonic() + 60
    while not (alive() <= living and all(free()[key] >= amount for key, amount in room.items())):
        assert time.monotonic() < deadline, (alive() - living, free(), room)
        time.sleep(0.1)
