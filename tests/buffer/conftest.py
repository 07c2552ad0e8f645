"""Buffers under test: in this process, and as real actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayrft.buffer.validation import Limits
from tests.buffer.in_process import LocalBuffer, ObjectTable, small

_NO_LIMITS = Limits()


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> ObjectTable:
    return ObjectTable(monkeypatch)


@pytest.fixture
def opened(tmp_path: Path, objects: ObjectTable) -> Iterator[Callable[..., LocalBuffer]]:
    """Opens Buffers in this process, with small segments and other settings as given."""
    made: list[LocalBuffer] = []

    def begin(folder: str = "buffer", *, tasks: Any = None, limits: Any = _NO_LIMITS, **settings: Any) -> LocalBuffer:
        config = small(**{"segment_bytes": 6000, **settings})
        made.append(LocalBuffer(tmp_path / folder, config, tasks, limits=limits))
        return made[-1]

    yield begin
    for buffer in made:
        buffer.kill()


@pytest.fixture
def buffer(opened: Callable[..., LocalBuffer]) -> LocalBuffer:
    return opened()


@pytest.fixture
def start(tmp_path: Path, ray_cluster: Any) -> Iterator[Callable[..., Any]]:
    """Starts actors on the log in this test's folder."""
    from tests.buffer.live import buffers  # which imports much

    with buffers() as begin:
        yield partial(begin, tmp_path)
