"""Run folders and their checkpoints: finding, writing, restoring, pruning and exporting them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from rayrft.buffer.buffer import Buffer
from rayrft.config import RunConfig, load_run_config
from rayrft.config.stage import CheckpointConfig
from rayrft.errors import ConfigError, RunNotFound, StorageError, nearest
from rayrft.files import atomic_file, held, local_path, replace_folder, storage_errors, sync
from rayrft.runtime.handle import Handle
from rayrft.trainer.api import RankApi
from rayrft.trainer.trainer import Trainer, ask_ranks

RUNS = Path("runs")


def find_folder(run: str, storage: Path = RUNS) -> Path:
    """Return the folder of a run, given as a folder or as a name in ``storage``. Raises RunNotFound."""
    for folder in (Path(run), storage / run):
        if (folder / "config.yaml").is_file():
            return folder
    known = sorted(path.parent.name for path in storage.glob("*/config.yaml"))
    remedy = nearest(run, known) if known else f"{storage} contains no runs: give a run folder"
    raise RunNotFound("no such run folder", remedy, field="run", value=run)


_MANIFEST = "manifest.json"


@dataclass
class Progress:
    """Run state in a checkpoint's manifest, from which a run resumes with the trainer's state and the Buffer's log."""

    run_id: str
    step: int = 0
    """Optimiser steps taken: also the version of the weights."""
    stage: int = 0
    """Index of the current stage, from 0."""
    stage_step: int = 0
    """Steps taken in the current stage."""
    stage_began: int = 0
    """``step`` at the start of the current stage."""
    stage_asked: int | None = None
    """The configured number of steps, set when the stage has ended (all steps taken, or its data exhausted)."""
    records: int = 0
    logged: list[int] = field(default_factory=lambda: [0, 0])
    """Lower bound of the Buffer's journal position: see `Buffer.flush`."""
    stages_done: dict[str, int] = field(default_factory=dict)
    """Steps taken in every stage that has ended."""
    accuracy: float | None = None
    """Accuracy of the current policy at the first temperature, if it was evaluated."""
    reward: float | None = None
    """Mean reward of the latest step, see `StepRecord`, if any."""

    def needs(self, steps: int) -> bool:
        """Return whether the current stage is unfinished, or ``steps`` exceeds its number of steps when it ended."""
        return self.stage_asked is None or self.stage_asked < steps

    def begin(self, stage: int) -> None:
        """Enter a stage by its index, or re-enter the current one."""
        if stage != self.stage:
            self.stage, self.stage_step, self.stage_began = stage, 0, self.step
        self.stage_asked = None

    def end(self, name: str, asked: int) -> None:
        """Mark the current stage as ended; ``asked`` is its configured number of steps."""
        self.stage_asked = asked
        self.stages_done[name] = self.stage_step


_progress: TypeAdapter[Progress] = TypeAdapter(Progress)


class Checkpoints:
    """The folders ``checkpoints/step-…`` of a run, created and deleted atomically."""

    def __init__(self, run_folder: Path, config: CheckpointConfig) -> None:
        self.folder = run_folder / "checkpoints"
        self.config = config
        self.evaluating: set[int] = set()
        """Steps whose evaluation has not ended: their checkpoints are kept until `judge`."""
        self._begun: Path | None = None
        """The folder that is being written to."""
        self._changing = threading.Lock()  # an evaluation may end while a checkpoint is written

    def mark_beginning(self, progress: Progress) -> None:
        """Write a checkpoint of step 0 without trainer state; a run without a later one resumes from it."""
        self.begin(0)
        self.commit(progress)

    def holds(self, step: int) -> bool:
        """Return whether there is a checkpoint of that step."""
        return (self.at(step) / _MANIFEST).is_file()

    def check(self, step: int) -> None:
        """Raise StorageError if a file of the checkpoint of that step is missing or has another size."""
        folder = self.at(step)
        for name, size in json.loads((folder / _MANIFEST).read_text())["files"].items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size:
                problem = f"is incomplete: {name} is {'truncated' if file.is_file() else 'missing'}"
                remedy = "delete the folder: the run then resumes from the previous checkpoint"
                raise StorageError(problem, remedy, field="checkpoint", value=str(folder))

    @held
    def begin(self, step: int) -> Path:
        """Create an empty folder for the trainer to write to."""
        partial = self._begun = self.folder / f".step-{step:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with storage_errors(partial):
            partial.mkdir(parents=True)
        return partial

    @held
    def update_manifest(self, progress: Progress) -> None:
        """Rewrite a checkpoint's manifest, for a new state at its step. Raises StorageError, and changes nothing."""
        with self._changing, storage_errors(self.at(progress.step)):
            self._write_manifest(progress, self.at(progress.step))

    def commit(self, progress: Progress) -> None:
        """Publish the folder from `begin` as the checkpoint of ``progress.step``, and prune old checkpoints. Raises
        StorageError if it cannot be written; earlier checkpoints are then unchanged."""
        partial = self.folder / f".step-{progress.step:06d}.partial"
        with self._changing:
            with storage_errors(partial):
                self._write_manifest(progress, partial)
                replace_folder(partial, self.at(progress.step))
            self._begun = None
            self._prune()

    @held
    def judge(self, step: int, accuracy: float | None) -> None:
        """End the evaluation of a step: write its accuracy to its checkpoint, if there is one, and prune. Raises
        StorageError if it cannot be written."""
        with self._changing:
            self.evaluating.discard(step)
            if not self.holds(step):
                return
            progress = dataclasses.replace(_read(self.at(step) / _MANIFEST), accuracy=accuracy)
            with storage_errors(self.at(step)):
                self._write_manifest(progress, self.at(step))
            self._prune()

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def all(self) -> list[Progress]:
        """Return all checkpoints, the oldest first. Raises StorageError for a damaged or foreign manifest."""
        return sorted(map(_read, self.folder.glob(f"step-*/{_MANIFEST}")), key=lambda progress: progress.step)

    def latest(self) -> Progress | None:
        return next(reversed(self.all()), None)

    def fallback(self) -> int:
        """Return the step of the oldest of the ``keep_last`` checkpoints, from which the run can resume, too."""
        return self.all()[-self.config.keep_last :][0].step

    def _prune(self) -> None:
        kept = self.all()
        needed = {progress.step for progress in kept[-self.config.keep_last :]} | self.evaluating
        scores = ((getattr(progress, self.config.best_by), progress.step) for progress in kept)
        best = sorted((-score, step) for score, step in scores if score is not None)
        needed |= {step for _, step in best[: self.config.keep_best]}
        for step in sorted({progress.step for progress in kept} - needed):
            # Renamed first, so that a partly deleted folder is not taken for a checkpoint.
            self.at(step).rename(self.folder / f".step-{step:06d}.gone")
        for partial in self.folder.glob(".step-*"):  # also those of a run that was killed while writing or deleting
            if partial != self._begun:
                shutil.rmtree(partial, ignore_errors=True)

    def _write_manifest(self, progress: Progress, folder: Path) -> None:
        found = [path for path in folder.rglob("*") if path.is_file() and _MANIFEST not in path.name]
        files = {str(path.relative_to(folder)): path.stat().st_size for path in found}
        with atomic_file(folder / _MANIFEST) as draft:
            draft.write_text(json.dumps({"progress": dataclasses.asdict(progress), "files": files}, indent=2) + "\n")
        sync(folder)


def _read(manifest: Path) -> Progress:
    try:
        return _progress.validate_python(json.loads(manifest.read_text())["progress"])
    except (ValueError, KeyError, TypeError):
        problem = "the checkpoint's manifest is damaged, or another version of rayrft wrote it"
        remedy = "use the version that wrote it; if the manifest is damaged, delete the folder"
        raise StorageError(problem, remedy, field="checkpoint", value=str(manifest.parent)) from None


class Saver:
    """Writes the checkpoint of the current ``progress``, one at a time, in the background."""

    def __init__(self, config: RunConfig, buffer: Handle[Buffer], trainer: Handle[Trainer], progress: Progress) -> None:
        self._buffer = buffer
        self._trainer = trainer
        self._progress = progress
        self.checkpoints = Checkpoints(config.folder, config.checkpoint)
        self._writing: asyncio.Future[None] | None = None
        self._judging: asyncio.Future[None] | None = None
        self._exporting: dict[str, asyncio.Future[None]] = {}
        """Writing of exports, by name."""

    def due(self) -> bool:
        """Return whether a checkpoint is due after this step of the stage."""
        every = self.checkpoints.config.every
        return every is not None and self._progress.stage_step % every == 0

    async def restore(self, *, whole: bool) -> None:
        """Restore the trainer from the checkpoint of the current step: ``whole``, or its weights only."""
        await ask_ranks(self._trainer, RankApi.restore, self.checkpoints.at(self._progress.step), whole)

    async def checkpoint(self, records: int) -> None:
        """Start writing a checkpoint in the background; ``records`` is the number of records a resumed run keeps.
        Raises StorageError if the previous checkpoint, or an export, could not be written."""
        await self.done()
        self._progress.records = records
        self._progress.logged = await self._buffer.call(Buffer.flush)
        if self.checkpoints.holds(self._progress.step):
            return await asyncio.to_thread(self.checkpoints.update_manifest, self._progress)
        folder = await asyncio.to_thread(self.checkpoints.begin, self._progress.step)
        await ask_ranks(self._trainer, RankApi.checkpoint, folder)
        self._writing = asyncio.ensure_future(self._commit(folder, copy.deepcopy(self._progress)))

    def evaluated(self, step: int, accuracy: float | None) -> None:
        """Note the accuracy of a step, the current one or one that is over; None if it is not known."""
        if step == self._progress.step:
            self._progress.accuracy = accuracy
        self._judging = asyncio.ensure_future(self._judge(self._judging, step, accuracy))

    def check(self) -> None:
        """Raise StorageError if a checkpoint could not be written."""
        for future in self._pending:
            if future.done():
                future.result()

    async def done(self) -> None:
        """Wait until the checkpoint in progress is written and judged, and exports are written. Raises StorageError if
        one cannot be."""
        for future in self._pending:
            await future

    async def settle(self) -> None:
        """Wait until nothing is being written or judged, whether or not that succeeds."""
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def export(self, name: str) -> None:
        """Start to write the weights in Hugging Face format in the background. The next checkpoint waits for them."""
        folder = self.checkpoints.folder / name
        await ask_ranks(self._trainer, RankApi.save, folder)
        self._exporting[name] = asyncio.ensure_future(self._trainer.call(Trainer.written, folder))

    async def exported(self, name: str) -> Path:
        """Return the folder of the weights exported under that name, once they are written."""
        if name in self._exporting:
            await self._exporting[name]
        return self.checkpoints.folder / name

    @property
    def _pending(self) -> list[asyncio.Future[None]]:
        return [*self._exporting.values(), *filter(None, (self._writing, self._judging))]

    async def _judge(self, before: asyncio.Future[None] | None, step: int, accuracy: float | None) -> None:
        for earlier in filter(None, (before, self._writing)):  # the step's checkpoint may be the one being written
            await earlier
        await asyncio.to_thread(self.checkpoints.judge, step, accuracy)

    async def _commit(self, folder: Path, progress: Progress) -> None:
        await self._trainer.call(Trainer.written, folder)
        await asyncio.to_thread(self.checkpoints.commit, progress)
        # Keep the batches since the oldest of them, in case the newest turns out to be damaged.
        await self._buffer.call(Buffer.cover, await asyncio.to_thread(self.checkpoints.fallback))


def export(run_folder: Path, to: Path, step: int | None = None, *, merged: bool = True) -> int:
    """Write a run's checkpoint of that step (the latest by default) to the folder ``to``; return the step.

    A stage that trains a reward model gives a sequence classifier. An adapter is ``merged`` into the model's weights,
    or written in peft format. Works in this process, on the CPU, without Ray; the run need not be running.

    Raises RunNotFound if there is no such checkpoint, and ConfigError if ``to`` is an address or not empty, or if
    ``merged`` is False for a full model or a reward model.
    """
    from rayrft.trainer.dcp import export_checkpoint

    config, to = load_run_config(run_folder), local_path(to, "to")
    if not merged and config.trainer.lora is None:
        raise ConfigError("the run trains a full model without an adapter", "omit it", field="merge", value=merged)
    checkpoints = Checkpoints(run_folder, config.checkpoint)
    stages = {progress.step: config.stages[progress.stage] for progress in checkpoints.all() if progress.step}
    step = max(stages, default=None) if step is None else step
    if step is None or step not in stages:
        remedy = f"choose one of the steps {[*stages]}" if stages else "the run has none yet"
        raise RunNotFound("no such checkpoint", remedy, field="step", value=step)
    reward_model = stages[step].algorithm.build().trains_reward_model
    if not merged and reward_model:
        raise ConfigError("a reward model's adapter needs its head", "omit it", field="merge", value=merged)
    if to.exists() and any(to.iterdir()):
        raise ConfigError("the folder is not empty", "give a new folder", field="to", value=str(to))
    model = str(run_folder / "model") if config.model.tiny is not None else str(config.model.path)
    export_checkpoint(config, model, checkpoints.at(step), to, reward_model=reward_model, merged=merged)
    return step
