"""Random numbers that follow from a run's seed."""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return the generator for one purpose of a run and, for example, one epoch of it.

    The purpose keeps choices apart: two orders that are both drawn from ``[seed, 1]`` are the same order, so that a
    shuffled epoch could show first whatever the other purpose has picked.
    """
    return np.random.default_rng([zlib.crc32(purpose.encode()), seed, *numbers])
