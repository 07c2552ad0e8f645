"""The loop of an explore job: its Explorers fill a Buffer that belongs to no run."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from rayrft.buffer.ledger import Ledger
from rayrft.buffer.shared import FeedProgress, SharedBuffer
from rayrft.config import StageConfig
from rayrft.core.restarts import Restarts
from rayrft.core.supervision import unless_stopped
from rayrft.explorer.explorer import Explorer
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import RolloutRecord
from rayrft.runtime.handle import Handle


@dataclass
class ExploreLoop:
    """Explores until the tasks are exhausted, and records the groups. Nothing is lost when it is stopped or killed:
    groups in flight are restarted when the job resumes."""

    stage: StageConfig
    explorers: list[Handle[Explorer]]
    buffer: Handle[SharedBuffer]
    feed: str
    progress: FeedProgress
    """Progress of the feed, in earlier attempts of the job too."""
    recorder: Recorder
    stop: asyncio.Event
    restarts: Restarts
    published: ClassVar[int] = 0
    """The engines keep the weights that they were started with."""

    @property
    def ledger(self) -> Ledger:
        """Ledger of rows at the last record."""
        return self.progress.ledger

    async def run(self) -> None:
        """Fill the Buffer. Raises Stopped if the user asked for it, and the error of an Explorer that fails."""
        explore = partial(self.restarts.explore, self.buffer, lambda: self.stage)
        exploring = asyncio.gather(*map(explore, self.explorers))
        recording = asyncio.ensure_future(self._record_all())
        try:
            await unless_stopped(self.stop, asyncio.gather(exploring, recording))
        finally:
            exploring.cancel()
            recording.cancel()

    async def _record_all(self) -> None:
        """Write a record for each step's number of groups, and one for the rest."""
        ended = False
        while not ended:
            started = time.perf_counter()
            wanted = self.progress.groups + self.stage.groups
            progress = await self.buffer.call(SharedBuffer.progress, self.feed, wanted)
            ended = progress.groups < wanted
            await self._record(progress, time.perf_counter() - started)

    async def _record(self, progress: FeedProgress, seconds: float) -> None:
        new, before = progress.report, self.progress.report
        groups = progress.groups - self.progress.groups
        rows = new.rows - before.rows
        if not groups:
            return
        scored, tokens = new.scored - before.scored, new.tokens - before.tokens
        record = RolloutRecord(
            stage=self.stage.name,
            step=progress.groups,
            time=time.time(),
            groups=groups,
            rows=rows,
            tokens=tokens,
            reward=(new.reward_sum - before.reward_sum) / scored if scored else None,
            truncated_share=(new.truncated - before.truncated) / rows if rows else None,
            lost=progress.ledger.lost_since(self.ledger),
            held=progress.ledger.held,
            tokens_per_s=tokens / seconds,
            seconds=seconds,
            timings=await self.restarts.timings(self.explorers),
        )
        self.progress = progress
        await self.recorder.add(record)
