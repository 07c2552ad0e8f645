"""A Ray of the bench's own."""

from __future__ import annotations

import os

import ray


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
