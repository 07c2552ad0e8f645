"""Ray Data with ordered rows and without progress output."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_ray_data() -> Iterator[None]:
    """Make datasets that are created inside keep the order of their rows, and Ray Data log errors alone."""
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    # The newer reader stalls for seconds on small files.
    context.use_datasource_v2 = False
    context.execution_options.preserve_order = True
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ray.data.DataContext.current(context):
            yield
    finally:
        logger.setLevel(before)
