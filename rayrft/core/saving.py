"""What a run writes: checkpoints to go on from, in the background, and folders in Hugging Face format."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

from rayrft.config import RunConfig
from rayrft.core.cast import Cast
from rayrft.core.progress import Checkpoints, Progress
from rayrft.trainer.commands import Checkpoint, Restore, Save


class Saving:
    """Saves the trainer as ``progress`` stands, one checkpoint at a time."""

    def __init__(self, config: RunConfig, cast: Cast, progress: Progress) -> None:
        self._config = config
        self._cast = cast
        self._progress = progress
        self._checkpoints = Checkpoints(config.folder, config.checkpoint)
        self._writing: asyncio.Future[None] | None = None

    def due(self) -> bool:
        """Whether there is to be a checkpoint between this step of the stage and the next."""
        return self._checkpoints.due(self._progress.stage_step)

    async def restore(self, *, whole: bool) -> None:
        """Put the checkpoint of the present step in place: weights, or ``whole`` what the open stage has."""
        await self._cast.trainer.command.remote(Restore(self._checkpoints.at(self._progress.step), whole))

    async def checkpoint(self, records: int) -> None:
        """Begin to write what a resumed run needs, ``records`` being how many it keeps; steps go on meanwhile.

        Raises StorageError when the checkpoint before it cannot be written.
        """
        await self.done()
        self._progress.records = records
        self._progress.logged = await self._cast.buffer.settle.remote()
        if self._checkpoints.holds(self._progress.step):
            return await asyncio.to_thread(self._checkpoints.renew, self._progress)
        folder = await asyncio.to_thread(self._checkpoints.begin, self._progress.step)
        await self._cast.trainer.command.remote(Checkpoint(folder))
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
        await self._cast.trainer.command.remote(Save(self.exported(name)))

    def exported(self, name: str) -> Path:
        """Where weights of that name lie in Hugging Face format."""
        return self._config.folder / "checkpoints" / name

    async def _commit(self, folder: Path, progress: Progress) -> None:
        await self._cast.trainer.written.remote(folder)
        await asyncio.to_thread(self._checkpoints.commit, progress)
        # The batches since then are kept, in case the newest turns out to be damaged.
        await self._cast.buffer.cover.remote(await asyncio.to_thread(self._checkpoints.fallback))
