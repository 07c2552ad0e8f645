"""What tests of runs begin with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from rayrft.config import RunConfig, dump_config, load_config
from rayrft.config.placement import RestartsConfig
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.restarts import Restarts
from tests.config.given import GRPO, base
from tests.e2e.conftest import small_config


def run_folder(storage: Path, name: str, **changes: Any) -> RunConfig:
    """The config of a run whose folder has nothing else."""
    config = load_config(small_config(storage, name, **changes))
    config.folder.mkdir()
    (config.folder / "config.yaml").write_text(dump_config(config))
    return config


def restarts(per_hour: int = 0, parts: Any = None) -> Restarts:
    """Restarts of these parts, by default of none."""
    parts = parts or SimpleNamespace(supervised=dict)
    return Restarts(parts, RestartsConfig(per_hour=per_hour, backoff_s=0), AsyncMock(), AsyncMock(), AsyncMock())


def write(checkpoints: Checkpoints, progress: Progress, *files: str) -> None:
    """Write a checkpoint with these files, each with its name in it."""
    folder = checkpoints.begin(progress.step)
    for name in files or ("weights",):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode())
    checkpoints.commit(progress)


def config_of(model: str, ranks: int, **overrides: Any) -> Any:
    explorer = {"engine": {"gpus": 1, "count": 2}, "sampling": {"max_prompt_tokens": 512, "max_tokens": 1024}}
    raw = {**base(), "model": {"path": model, "dtype": "bfloat16", "max_length": 2048}, "explorer": explorer}
    raw |= {"demonstrations": {}, "stages": [{**GRPO, "batch_size": 1024, "group_size": 8}]}
    return load_config({**raw, "trainer": {"ranks": ranks, "gpus": 1, "micro_batch_tokens": 16384, **overrides}})
