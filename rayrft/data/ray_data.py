"""Ray Data with ordered rows and without progress output."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray.data


def ordered_blocks(dataset: ray.data.Dataset) -> list[Any]:
    """Return references to a dataset's blocks as Arrow tables, in its order, which Ray Data does not keep by itself."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return dataset.to_arrow_refs()
    finally:
        options.preserve_order = before


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
