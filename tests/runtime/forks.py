"""Processes that start at once: forked from one that has imported torch and the rest, which takes seconds each time."""

from __future__ import annotations

import multiprocessing
from typing import Any

FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.core.resumable", "transformers.models.qwen3.modeling_qwen3"])
