"""Where runs lie."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayrft.config import RunConfig, load_config
from rayrft.config.stage import CheckpointConfig
from rayrft.core.actors import Actors
from rayrft.errors import ConfigError, RunNotFound, StorageError, nearest
from rayrft.files import replace_folder, sync
from rayrft.trainer.commands import Checkpoint, Restore, Save

STORAGE = Path("runs")


def find_folder(run: str, storage: Path = STORAGE) -> Path:
    """The folder of a run: the one given, or that of its name. Raises RunNotFound."""
    for folder in (Path(run), storage / run):
        if (folder / "config.yaml").is_file():
            return folder
    known = sorted(path.parent.name for path in storage.glob("*/config.yaml"))
    remedy = nearest(run, known) if known else f"there are none in {storage}: give a run folder"
    raise RunNotFound("no such run folder", field="run", value=run, remedy=remedy)


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
    stage_asked: int | None = None
    """Once it has ended, for it took them all or its data came to an end: how many steps it was asked for."""
    records: int = 0
    logged: list[int] = field(default_factory=lambda: [0, 0])
    """How far the Buffer's journal reached at least: see `Buffer.flush`."""
    stages_done: list[dict[str, Any]] = field(default_factory=list)
    accuracy: float | None = None
    """Of the policy as it is, at the first of the temperatures, where it was evaluated."""
    reward: float | None = None
    """Mean over what was sampled for the latest step, where it sampled anything."""

    def needs(self, steps: int) -> bool:
        """Whether the present stage has more to do when it is asked for so many steps: it may be asked for more than
        before."""
        return self.stage_asked is None or self.stage_asked < steps

    def begin(self, stage: int) -> None:
        """Enter the stage of that number, or enter the present one again."""
        if stage != self.stage:
            self.stage, self.stage_step, self.stage_began = stage, 0, self.step
        self.stage_asked = None

    def end(self, name: str, asked: int) -> None:
        """The present stage, of that name, has done what it was asked for."""
        self.stage_asked = asked
        done = {"name": name, "steps": self.stage_step, "final_step": self.step}
        self.stages_done = [each for each in self.stages_done if each["name"] != name] + [done]


class Checkpoints:
    """The folders ``checkpoints/step-…`` of a run. One appears whole or not at all, and goes at once."""

    def __init__(self, run_folder: Path, config: CheckpointConfig) -> None:
        self._folder = run_folder / "checkpoints"
        self._config = config

    def due(self, stage_step: int) -> bool:
        return self._config.every is not None and stage_step % self._config.every == 0

    def mark_beginning(self, progress: Progress) -> None:
        """A checkpoint without a trainer's state, from which a run that has no other begins again."""
        self.begin(0)
        self.commit(progress)

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of that step."""
        return (self.at(step) / _MANIFEST).is_file()

    def check(self, step: int) -> None:
        """Raises StorageError where a file of the checkpoint of that step is missing, or is not as long as it was."""
        folder = self.at(step)
        for name, size in json.loads((folder / _MANIFEST).read_text())["files"].items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size:
                raise StorageError(
                    f"the checkpoint is not whole: {name} is {'cut off' if file.is_file() else 'missing'}",
                    field="checkpoint",
                    value=str(folder),
                    remedy="delete the folder: the run then goes on from the checkpoint before it",
                )

    def begin(self, step: int) -> Path:
        """An empty folder into which the trainer may write."""
        partial = self._folder / f".step-{step:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with _writing(partial):
            partial.mkdir(parents=True)
        return partial

    def update_manifest(self, progress: Progress) -> None:
        """The run stands elsewhere without a step: what the trainer wrote at this one holds, and the manifest changes.

        Raises StorageError when the disk does not take it; the checkpoint is as it was.
        """
        with _writing(self.at(progress.step)):
            self._write_manifest(progress, self.at(progress.step))

    def commit(self, progress: Progress) -> None:
        """What was written is complete: give it its name, and delete what need not be kept any more.

        Raises StorageError when the disk does not take it; the earlier checkpoints are as they were.
        """
        partial = self._folder / f".step-{progress.step:06d}.partial"
        with _writing(partial):
            self._write_manifest(progress, partial)
            replace_folder(partial, self.at(progress.step))
        self._prune()

    def at(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def all(self) -> list[Progress]:
        """What there is, the oldest first."""
        manifests = self._folder.glob(f"step-*/{_MANIFEST}")
        found = [Progress(**json.loads(manifest.read_text())["progress"]) for manifest in manifests]
        return sorted(found, key=lambda each: each.step)

    def latest(self) -> Progress | None:
        return next(reversed(self.all()), None)

    def fallback(self) -> int:
        """The step of the oldest of the last: from there a run can go on when later ones are damaged."""
        return self.all()[-self._config.keep_last :][0].step

    def _prune(self) -> None:
        kept = self.all()
        needed = {each.step for each in kept[-self._config.keep_last :]}
        metric = self._config.best_by
        scored = [each for each in kept if getattr(each, metric) is not None]
        scored.sort(key=lambda each: (-getattr(each, metric), each.step))
        needed |= {each.step for each in scored[: self._config.keep_best]}
        for each in kept:
            if each.step not in needed:
                # Deleted halfway it must not look like one that is whole.
                self.at(each.step).rename(self._folder / f".step-{each.step:06d}.gone")
        for left in self._folder.glob(".step-*"):  # also of a run that was killed while it wrote or deleted
            shutil.rmtree(left, ignore_errors=True)

    def _write_manifest(self, progress: Progress, folder: Path) -> None:
        files = {str(each.relative_to(folder)): each.stat().st_size for each in folder.rglob("*") if each.is_file()}
        files = {name: size for name, size in files.items() if not name.endswith(_MANIFEST)}
        draft = folder / f".{_MANIFEST}"
        draft.write_text(json.dumps({"progress": dataclasses.asdict(progress), "files": files}, indent=2) + "\n")
        sync(draft)
        draft.rename(folder / _MANIFEST)
        sync(folder)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"a checkpoint cannot be written: {error.strerror}",
            field="storage",
            value=str(folder),
            remedy="make room or mend the storage, then: rayrft resume RUN",
        ) from None


class Saver:
    """Saves the trainer as ``progress`` stands, one checkpoint at a time."""

    def __init__(self, config: RunConfig, actors: Actors, progress: Progress) -> None:
        self._config = config
        self._actors = actors
        self._progress = progress
        self._checkpoints = Checkpoints(config.folder, config.checkpoint)
        self._writing: asyncio.Future[None] | None = None

    def due(self) -> bool:
        """Whether there is to be a checkpoint between this step of the stage and the next."""
        return self._checkpoints.due(self._progress.stage_step)

    async def restore(self, *, whole: bool) -> None:
        """Put the checkpoint of the present step in place: weights, or ``whole`` what the open stage has."""
        await self._actors.trainer.command.remote(Restore(self._checkpoints.at(self._progress.step), whole))

    async def checkpoint(self, records: int) -> None:
        """Begin to write what a resumed run needs, ``records`` being how many it keeps; steps go on meanwhile.

        Raises StorageError when the checkpoint before it cannot be written.
        """
        await self.done()
        self._progress.records = records
        self._progress.logged = await self._actors.buffer.flush.remote()
        if self._checkpoints.holds(self._progress.step):
            return await asyncio.to_thread(self._checkpoints.update_manifest, self._progress)
        folder = await asyncio.to_thread(self._checkpoints.begin, self._progress.step)
        await self._actors.trainer.command.remote(Checkpoint(folder))
        self._writing = asyncio.ensure_future(self._commit(folder, copy.deepcopy(self._progress)))

    def check(self) -> None:
        """Raises StorageError when a checkpoint could not be written."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def done(self) -> None:
        """Returns when the checkpoint that is being written is there. Raises StorageError when it cannot be."""
        if self._writing is not None:
            await self._writing

    async def export(self, name: str) -> None:
        """Write the weights in Hugging Face format."""
        await self._actors.trainer.command.remote(Save(self.exported(name)))

    def exported(self, name: str) -> Path:
        """Where weights of that name lie in Hugging Face format."""
        return self._config.folder / "checkpoints" / name

    async def _commit(self, folder: Path, progress: Progress) -> None:
        await self._actors.trainer.written.remote(folder)
        await asyncio.to_thread(self._checkpoints.commit, progress)
        # The batches since then are kept, in case the newest turns out to be damaged.
        await self._actors.buffer.cover.remote(await asyncio.to_thread(self._checkpoints.fallback))


def export(run_folder: Path, to: Path, step: int | None = None, *, merged: bool = True) -> int:
    """Write a run's checkpoint of that step (the latest by default) to the folder ``to``; gives the step.

    An adapter is ``merged`` into the model's weights, or written by itself as peft loads it. In this process, on the
    CPU, without Ray: a run need not be under way. Raises RunNotFound where there is no such checkpoint, and ConfigError
    where ``to`` holds something already, or a run without an adapter is to be written without merging.
    """
    import torch

    from rayrft.trainer.dcp import load_weights, read_base
    from rayrft.trainer.lora import Lora
    from rayrft.trainer.model import load_policy, write_adapter, write_hf

    config = load_config(run_folder / "config.yaml")
    lora = config.trainer.lora
    if lora is None and not merged:
        raise ConfigError(
            "the run has no adapter: its checkpoints are whole models", field="merge", value=merged, remedy="leave out"
        )
    checkpoints = Checkpoints(run_folder, config.checkpoint)
    steps = [each.step for each in checkpoints.all() if each.step]
    wanted = max(steps, default=None) if step is None else step
    if wanted is None or wanted not in steps:
        raise RunNotFound(
            "no such checkpoint",
            field="step",
            value=step,
            remedy=f"there are those of steps {steps}" if steps else "the run has none yet",
        )
    if to.exists() and any(to.iterdir()):
        raise ConfigError("the folder is not empty", field="to", value=str(to), remedy="give a new one")
    model = str(run_folder / "model") if config.model.tiny is not None else str(config.model.path)
    base = (lora is not None and read_base(checkpoints.at(wanted))) or model
    policy = load_policy(base)
    if lora is not None:
        policy.lora = Lora(policy.model, lora, origin=base, compute=torch.float32, seed=config.seed)
    trained = {name: each.detach() for name, each in policy.model.named_parameters() if each.requires_grad}
    load_weights(checkpoints.at(wanted), trained)
    if merged:
        write_hf(policy, policy.model.state_dict(), model, to)
    else:
        write_adapter(policy, base, model, to)
    return wanted
