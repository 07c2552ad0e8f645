"""A run in a process of its own that may be killed, and what it trained."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rayrft.config import RunConfig, load_config
from rayrft.core.steering import histories
from rayrft.monitor.records import StepRecord, read_records
from tests.core.resumable import Wishes, run
from tests.e2e.conftest import small_config
from tests.runtime.forks import FORKS
from tests.trainer.learners import qwen3


def write_model(folder: Path) -> Path:
    """Write the model that these runs train; return its folder."""
    torch.manual_seed(0)
    qwen3(50, 16, 32, layers=2, heads=2).save_pretrained(folder)
    return folder


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


def steps(config: RunConfig) -> list[StepRecord]:
    return [record for record in read_records(config.folder) if isinstance(record, StepRecord)]


def assert_same(config: RunConfig, reference: RunConfig) -> None:
    """Compare two runs that have ended: rows, weights, steps, ledgers, and the changes of their configs."""
    assert trained(config) == trained(reference)
    weights = [torch.load(each.folder / "weights.pt") for each in (config, reference)]
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)
    assert end_of(config) == end_of(reference)
    numbers = [record.step for record in steps(config)]
    assert numbers == [record.step for record in steps(reference)], "a step was counted twice, or not at all"
    assert numbers == [*range(1, len(numbers) + 1)]
    values = [
        {key: [change.new for change in changes] for key, changes in histories(each.folder).items()}
        for each in (config, reference)
    ]
    assert values[0] == values[1], "a change was made twice, or is lost"
