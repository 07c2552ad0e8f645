"""A run in a process of its own that may be killed, and what it trained."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayrft.config import RunConfig, load_config
from tests.core.resumable import Wishes, run
from tests.e2e.conftest import small_config
from tests.runtime.forks import FORKS


def make_config(storage: Path, model: Path, name: str, **overrides: Any) -> RunConfig:
    raw = small_config(storage, name, model={"path": str(model)}, evaluation={"enabled": False})
    warmup, mix = raw["stages"]
    warmup |= {"steps": 5, "batch_size": 4}
    mix |= {"algorithm": {"name": "mix", "mu": 0.3, "kl": "k3", "kl_coef": 0.1}, "steps": 10, "batch_size": 10}
    mix |= {"group_size": 2, "optimizer": {"lr": 1e-3, "schedule": "cosine"}}
    mix["update"] = {"mini_batches": 2, "reference_refresh": 4}
    config = load_config(raw, {"trainer.micro_batch_tokens": 40, "checkpoint.every": 3, **overrides})
    (config.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return config


class Process:
    """The run in a process of its own, and what it says."""

    def __init__(self, config: RunConfig, poisoned: int | None = None, wishes: Wishes | None = None) -> None:
        self._receiving, sending = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=run, args=(config, sending, poisoned, wishes or {}))
        self._process.start()
        sending.close()

    def events(self) -> Iterator[str]:
        with contextlib.suppress(EOFError):
            while True:
                yield self._receiving.recv()

    def kill_at(self, event: str) -> None:
        """Kill it as soon as it says that."""
        assert event in self.events()
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        self._process.join(60)
        assert self._process.exitcode == 0, self._process.exitcode


def trained(config: RunConfig) -> dict[int, list[str]]:
    """The rows of each step, which must be the same as often as it is repeated."""
    rows: dict[int, list[str]] = {}
    for line in (config.folder / "trained.jsonl").read_text().splitlines():
        step, ids = json.loads(line)
        assert rows.setdefault(step, ids) == ids, f"step {step} was repeated with other rows"
    return rows


def end_of(config: RunConfig) -> Any:
    return json.loads((config.folder / "end.json").read_text())
