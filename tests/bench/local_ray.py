"""A Ray of the bench's own, and actors in it."""

from __future__ import annotations

import os
from typing import Any

import ray

from rayrft.runtime.handle import Handle


def start_ray(cpus: int, *, dashboard: bool = False) -> None:
    """Start Ray with so many logical CPUs.

    Its workers run at the niceness of any other process. By default they give way to everything, also to what they are
    measured beside.
    """
    os.environ.update(RAY_worker_niceness="0")
    ray.init(
        address="local",
        num_cpus=cpus,
        namespace="rayrft",
        log_to_driver=False,
        logging_level="ERROR",
        include_dashboard=dashboard,
    )


def actor(cls: Any, name: str, *arguments: Any) -> Handle[Any]:
    """Start an actor whose calls run concurrently."""
    return Handle(name, ray.remote(cls).options(num_cpus=0, max_concurrency=100_000).remote(*arguments))
