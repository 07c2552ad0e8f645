"""An endpoint over a scripted policy with the tokenizer of a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.endpoint.scripted import Served, serve


@pytest.fixture
async def served(tiny_model: Path) -> AsyncIterator[Served]:
    async with serve(tiny_model) as served:
        yield served
