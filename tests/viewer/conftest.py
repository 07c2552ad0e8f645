from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the viewer's files, of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield Path(os.environ["XDG_CACHE_HOME"])


@pytest.fixture(scope="session")
def storage(recorded_runs: Path) -> Path:
    return recorded_runs


@pytest.fixture
def copied(storage: Path, tmp_path: Path) -> Path:
    """A storage with a copy of `words`, to be changed."""
    shutil.copytree(storage / "words", tmp_path / "words", symlinks=True)
    return tmp_path
