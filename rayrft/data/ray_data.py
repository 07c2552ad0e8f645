"""Ray Data, as it is used here: in order, and without a word about how it goes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_ray_data() -> Iterator[None]:
    """Datasets that are created inside keep the order of their rows; while they are executed inside, Ray Data tells
    only errors: its plans and progress say nothing to who starts a run."""
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
