"""The actor of a named Buffer, which belongs to no run: explore jobs fill it, and a train job empties it.

An explore job has a `Feed`: tickets and tasks of its own, as many as the job may have in flight and as the Buffer has
room for, whether or not anybody trains. All of it is in the log: a job that is resumed gets the tickets that its last
attempt held, and no task is issued twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.events import GroupReport, ModelTerms
from rayrft.buffer.ledger import Ledger
from rayrft.buffer.transitions.admission import FeedJoined, ProducerAbandoned
from rayrft.buffer.transitions.leases import TrainerJoined
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import ConfigError, PlacementError


@dataclass(frozen=True)
class FeedProgress:
    """Results of an explore job over all its attempts: its groups that were stored, dropped or gave no rows, and the
    sum of their reports; and the ledger of the whole Buffer."""

    groups: int
    report: GroupReport
    ledger: Ledger


@dataclass(frozen=True)
class FeedStatus:
    """An explore job that fills the Buffer, or did."""

    job: str
    groups: int
    in_flight: int
    ended: bool
    """Whether its tasks are exhausted."""


@dataclass(frozen=True)
class SharedStatus:
    """Contents and jobs of a named Buffer; ``trainer`` is the name of the train job, empty before the first."""

    name: str
    folder: Path
    trainer: str
    step: int
    """The latest step that was leased."""
    feeds: list[FeedStatus]
    ledger: Ledger

    @property
    def jobs(self) -> set[str]:
        """Names of the jobs that have met here."""
        return {feed.job for feed in self.feeds} | ({self.trainer} if self.trainer else set())


class SharedBuffer(Buffer):
    """A Buffer that outlives the jobs that meet at it. ``folder``, ``config`` and ``plugins`` are those of the first of
    them."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: BufferConfig,
        seed: int,
        room_s: float = 0.0,
        plugins: Sequence[Path] = (),
    ) -> None:
        super().__init__(f"buffer {name}", folder, config, seed, room_s=room_s, plugins=plugins)
        self._name = name

    async def join_feed(
        self, feed: str, attempt: str, job: str, model: ModelTerms, tasks: TaskSetSpec, in_flight: int, group_size: int
    ) -> FeedProgress:
        """Start the feed of an explore job, or resume it in another attempt of the job: the tickets of the last attempt
        are issued again, and its results are ignored.

        Raises ConfigError for another model than the Buffer's, StorageError for other tasks than the feed's.
        """
        self._check_model(model)
        await self.store.add_task_set(feed, tasks)
        state = self.state
        if attempt not in state.training.attempts:
            gone = [ProducerAbandoned(producer) for producer in state.producers(feed)] if feed in state.feeds else []
            await self.store.commit(*gone, FeedJoined(feed, attempt, job, model, in_flight, group_size))
        return self._progress(feed)

    async def join_trainer(self, run: str, job: str, model: ModelTerms, step: int, running: Collection[str]) -> None:
        """Let a train job take the batches, from ``step`` on; ``running`` are the names of the jobs on the cluster,
        itself among them. A new train job starts with what the last one left.

        Raises ConfigError for another model than the Buffer's, or if the batches before ``step`` went to another job;
        PlacementError while another train job is running.
        """
        self._check_model(model)
        trainer = self.state.training
        if trainer.run == run:
            return await self.store.commit()
        if trainer.job in running and trainer.job != job:
            remedy = f"end it with: rayrft stop {trainer.job}, or give another buffer.name"
            raise PlacementError("another job trains on this Buffer", remedy, field="buffer.name", value=trainer.job)
        if step:
            why = f"job {trainer.job or 'none'!r} consumed it, or it was recreated"
            problem = f"this Buffer has no record of the job's {step} steps: {why}"
            remedy = "start a new train job from its checkpoint (rayrft export, model.path)"
            raise ConfigError(problem, remedy, field="buffer.name", value=self._name)
        await self.store.commit(TrainerJoined(run, job, model))

    async def check(self, folder: Path, config: BufferConfig) -> None:
        """Raise ConfigError unless a job wants this Buffer to be as it is."""
        if folder != self.store.storage.folder:
            problem = f"the Buffer {self._name!r} keeps its log in {self.store.storage.folder}"
            remedy = "give its jobs one buffer.storage, or, where there is none, one storage"
            raise ConfigError(problem, remedy, field="buffer.storage", value=str(folder))
        # The folder is compared above; what is too old is for the train job to say.
        ours, theirs = (each.model_dump(exclude={"storage", "max_age"}) for each in (self.store.config, config))
        for key, value in ours.items():
            if theirs[key] != value:
                problem = f"the Buffer {self._name!r} was started with {value!r}"
                remedy = f"give all its jobs one buffer section; to change it: rayrft buffer stop {self._name}"
                raise ConfigError(problem, remedy, field=f"buffer.{key}", value=theirs[key])

    async def progress(self, feed: str, groups: int) -> FeedProgress:
        """Wait, without a deadline, until a feed has ``groups`` groups, or all of them; return its progress."""

        def reached() -> bool:
            state = self.state.feeds[feed]
            return state.groups >= groups or (state.ended and not self.state.in_flight(feed))

        await self.store.wait_for(reached)
        return self._progress(feed)

    async def status(self) -> SharedStatus:
        """Return the Buffer's contents and jobs."""
        state, folder = self.state, self.store.storage.folder
        feeds = [FeedStatus(feed.job, feed.groups, state.in_flight(id), feed.ended) for id, feed in state.jobs.items()]
        job, step = state.training.job, state.training.step
        return SharedStatus(self._name, folder, job, step, feeds, state.ledger(recount=True))

    def _progress(self, feed: str) -> FeedProgress:
        state = self.state.feeds[feed]
        return FeedProgress(state.groups, state.report, self.state.ledger())

    def _check_model(self, model: ModelTerms) -> None:
        known = self.state.meta.model
        if known is None or known == model:
            return
        same = known.tokenizer == model.tokenizer
        what = "vocabulary or model.max_length" if same else "the tokenizer or model.template"
        limits = f"{known.vocabulary} tokens and rows of up to {known.max_length}"
        problem = f"{what} differs from that of the Buffer {self._name!r}, of {limits}"
        remedy = "give the jobs that meet at a Buffer the same model, model.template and model.max_length"
        raise ConfigError(problem, remedy, field="model", value=[model.vocabulary, model.max_length])
