"""How far a run has come, and the checkpoints that say so."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayrft.config.stage import CheckpointConfig
from rayrft.errors import StorageError

_MANIFEST = "manifest.json"


@dataclass
class Progress:
    """With a checkpoint of the trainer and the Buffer's log, all that a resumed run needs to go on from ``step``."""

    run_id: str
    step: int = 0
    """Optimiser steps taken: also the version of the weights."""
    stage: int = 0
    """The present stage by its number, the first being 0."""
    stage_step: int = 0
    """Steps of it that are taken."""
    stage_began: int = 0
    """The step before its first."""
    stage_ended: bool = False
    """It needs no more steps, for it has taken all, or its data came to an end."""
    records: int = 0
    stages_done: list[dict[str, Any]] = field(default_factory=list)
    saved: dict[str, str] = field(default_factory=dict)
    """Folders in Hugging Face format, by stage."""
    accuracy: float | None = None
    """Of the latest evaluation, at the first of the temperatures."""
    reward: float | None = None
    """Mean over what was sampled for the latest step that sampled anything."""


class Checkpoints:
    """The folders ``checkpoints/step-…`` of a run. One appears whole or not at all."""

    def __init__(self, run_folder: Path, config: CheckpointConfig) -> None:
        self._folder = run_folder / "checkpoints"
        self._config = config

    def due(self, stage_step: int) -> bool:
        return self._config.every is not None and stage_step % self._config.every == 0

    def mark_beginning(self, progress: Progress) -> None:
        """A checkpoint without a trainer's state, from which a run that has no other begins again."""
        self.begin(0)
        self.commit(progress)

    def begin(self, step: int) -> Path:
        """An empty folder into which the trainer may write."""
        partial = self._folder / f".step-{step:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, progress: Progress) -> None:
        """What was written is complete: give it its name, and delete what need not be kept any more.

        Raises StorageError when the disk does not take it; the earlier checkpoints are as they were.
        """
        partial = self._folder / f".step-{progress.step:06d}.partial"
        try:
            manifest = partial / _MANIFEST
            manifest.write_text(json.dumps(dataclasses.asdict(progress), indent=2) + "\n")
            _sync(manifest)
            _sync(partial)
            shutil.rmtree(self.at(progress.step), ignore_errors=True)
            partial.rename(self.at(progress.step))
            _sync(self._folder)
        except OSError as error:
            raise StorageError(
                f"a checkpoint cannot be written: {error.strerror}", field="storage", value=str(partial)
            ) from None
        self._prune()

    def at(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def all(self) -> list[Progress]:
        """What there is, the oldest first."""
        manifests = sorted(self._folder.glob(f"step-*/{_MANIFEST}"))
        return [Progress(**json.loads(manifest.read_text())) for manifest in manifests]

    def latest(self) -> Progress | None:
        return max(self.all(), key=lambda each: each.step, default=None)

    def _prune(self) -> None:
        kept = self.all()
        needed = {each.step for each in kept[-self._config.keep_last :]}
        metric = self._config.best_by
        scored = [each for each in kept if getattr(each, metric) is not None]
        if self._config.keep_best and scored:
            scored.sort(key=lambda each: (getattr(each, metric), each.step))
            needed |= {each.step for each in scored[-self._config.keep_best :]}
        for partial in self._folder.glob(".step-*.partial"):  # of a run that was killed while it wrote
            shutil.rmtree(partial, ignore_errors=True)
        for each in kept:
            if each.step not in needed:
                shutil.rmtree(self.at(each.step), ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
