"""A real Buffer actor for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.config.buffer import BufferConfig
from tests.buffer.actor import Start


@pytest.fixture
def start(tmp_path: Path, ray_cluster: Any) -> Iterator[Start]:
    """Starts a Buffer actor with the given settings; a second call with the same folder opens the same log."""
    actors: list[Any] = []

    def begin(tasks: Any = None, folder: str = "buffer", **settings: Any) -> Any:
        config = BufferConfig.model_validate(settings)
        actor = ray.remote(Buffer).options(num_cpus=0, max_concurrency=100)
        actors.append(actor.remote("run", tmp_path / folder, config, 0, tasks))
        return actors[-1]

    yield begin
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def buffer(start: Start) -> Any:
    return start()
