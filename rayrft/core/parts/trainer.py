"""The Trainer, and the ranks that it commands."""

from __future__ import annotations

import asyncio
from functools import partial

from rayrft.config import RunConfig
from rayrft.config.trainer import TrainerConfig
from rayrft.core.bundles import Bundles
from rayrft.core.parts.base import Part, RunParts
from rayrft.errors import NotFinite, OutOfMemory, RayrftError
from rayrft.runtime.handle import Handle
from rayrft.trainer.api import RankSetup
from rayrft.trainer.batch_pipeline import BatchPipeline, batch_chain
from rayrft.trainer.trainer import Trainer


class TrainerPart(Part[Trainer]):
    """The Trainer of a run that trains."""

    name = "trainer"
    on_death = "replace"
    rewinds = True
    loads = True
    _rollbacks, _divisor = 0, 1

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        if not config.trains:
            return []
        ranks = [] if config.colocated else [ranks_bundles(config, "FSDP2 under Ray Train")]
        return [Bundles(cls.name, 1, 0.05, 0, 0.3, "commands the ranks"), *ranks]

    def create(self) -> list[Handle[Trainer]]:
        return [self.track(self._make(), labels={Trainer.call_ranks: lambda call: call.method})]

    @property
    def settings(self) -> TrainerConfig:
        """Config of the present ranks: those after a shortage of memory have half the tokens in a micro-batch."""
        tokens = self.config.trainer.micro_batch_tokens // self._divisor
        return self.config.trainer.model_copy(update={"micro_batch_tokens": tokens, "gpus": _rank_gpus(self.config)})

    def prepare_successor(self, cause: RayrftError) -> str | None:
        before, most = self.settings.micro_batch_tokens, self.config.trainer.rollbacks
        if isinstance(cause, OutOfMemory) and self._divisor == 1:
            self._divisor = 2
            return f"trainer.micro_batch_tokens is {self.settings.micro_batch_tokens} from now on, not {before}"
        if isinstance(cause, NotFinite) and self.config.trainer.not_finite == "rollback" and self._rollbacks < most:
            self._rollbacks += 1
            return f"rollback {self._rollbacks} of at most {most} to the latest checkpoint, without the batch"
        if isinstance(cause, OutOfMemory | NotFinite):
            raise cause
        return None

    def __init__(self, run: RunParts) -> None:
        super().__init__(run)
        self.up = asyncio.Event()
        """Set while the ranks have loaded the model."""
        self.loading = asyncio.Lock()
        """Held while ranks load, and while engines beside them start."""

    async def replace(self, actor: Handle[Trainer]) -> None:
        self.up.clear()
        actor.succeed(self._make())
        await self.start()

    def _make(self) -> Handle[Trainer]:
        config, run, batches = self.config, self.run, None
        if config.pipelines.batch:
            batches = partial(BatchPipeline, config.pipelines, batch_chain(config, run.prepared.model))
        create = run.placement.actor(Trainer, self.name, name=self.name)
        return create(self.settings, run.placement.ranks, batches)

    async def start(self) -> str | None:
        warning = None
        for trainer in self.actors:
            setup = RankSetup(trainer, self.config, self.settings, self.run.prepared.model)
            async with self.loading:
                warning = await trainer.call(Trainer.start, self.config.folder, setup)
        self.up.set()
        return warning and f"trainer: {warning}"


def ranks_bundles(config: RunConfig, note: str) -> Bundles:
    """Return the placement group of the ranks."""
    trainer = config.trainer
    return Bundles("ranks", trainer.ranks, trainer.cpus, _rank_gpus(config), trainer.memory_gib, note)


def _rank_gpus(config: RunConfig) -> float:
    """Return the GPUs of a rank in Ray's books."""
    return 1.0 if config.lends_gpus else config.trainer.gpus
