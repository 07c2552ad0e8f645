from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.viewer.recorded import RecordedRun


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the viewer's files, of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield Path(os.environ["XDG_CACHE_HOME"])


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Path]:
    """Three runs: `words`, which finished after 12 steps, `other`, which failed, and `fresh`, which has no step yet."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("runs")
    words = RecordedRun(folder, "words", Tokenizer.from_file(str(tiny_model / "tokenizer.json")))
    (words.folder / "model").symlink_to(tiny_model)
    words.train(7)
    words.note("stages.mix.algorithm.mu: 0.1 -> 0.05", key="stages.mix.algorithm.mu", old=0.1, new=0.05)
    words.restart("its process died")
    words.train(5)
    words.buffer.do("feedback", "words/mix/0/task00/1", 1.0, {"quality": "good"})
    words.finish()
    other = RecordedRun(folder, "other", seed=1)
    other.train(4)
    other.finish("failed", "trainer rank 0: out of memory")
    fresh = RecordedRun(folder, "fresh", seed=2)
    for run in (words, other, fresh):
        run.close()
    yield folder
