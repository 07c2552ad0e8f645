"""The actor of a named Buffer, which belongs to no run: explore jobs fill it, and a train job empties it.

An explore job has a `Feed`: tickets and tasks of its own, as many as may be under way at once and as the Buffer has
room for, whether or not anybody trains. All of it is in the log: a job that is resumed gets the tickets that its last
life had under way, and no task is handed out twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from rayrft.buffer import events as e
from rayrft.buffer.buffer import Buffer
from rayrft.buffer.events import GroupReport, ModelTerms
from rayrft.buffer.ingest import Arrivals
from rayrft.buffer.ledger import Ledger
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.transitions import apply
from rayrft.buffer.validation import Limits
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import ConfigError, DataError, PlacementError


@dataclass(frozen=True)
class FeedProgress:
    """What an explore job has put into the Buffer in all its lives: groups that were stored, dropped or gave no rows,
    and the sum of their reports; and the ledger of the whole Buffer."""

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
    """A Buffer that outlives the jobs that meet at it. ``folder`` and ``config`` are those of the first of them."""

    def __init__(self, name: str, folder: Path, config: BufferConfig, seed: int) -> None:
        super().__init__(f"buffer {name}", folder, config, seed)
        self._name = name
        self._check_rows()

    async def join_feed(
        self, feed: str, life: str, job: str, model: ModelTerms, tasks: TaskSetSpec, in_flight: int, group_size: int
    ) -> FeedProgress:
        """Begin the feed of an explore job, or go on with it in another life of the job: its last life's tickets are
        issued again, and what comes under them from there is ignored.

        Raises ConfigError for another model than the Buffer's, StorageError for other tasks than the feed's.
        """
        self._check_model(model)
        await self._store.add_task_set(feed, tasks)
        meta = self._state.meta
        if life not in meta.lives:
            held = {held.producer for held in meta.outstanding.values() if held.ticket.feed == feed}
            known = set(meta.feeds[feed].calls) if feed in meta.feeds else set()
            gone = [e.Abandoned(producer) for producer in sorted(held | known)]
            await self._store.commit(*gone, e.FeedJoined(feed, life, job, model, in_flight, group_size))
            self._check_rows()
        return self._progress(feed)

    async def join_trainer(self, run: str, job: str, model: ModelTerms, step: int, running: Collection[str]) -> None:
        """Let a train job take the batches, at whose ``step`` it begins; ``running`` are the names of the jobs on the
        cluster, itself among them. A new train job goes on where the last one ended.

        Raises ConfigError for another model than the Buffer's, or if the batches before ``step`` went to another job;
        PlacementError while another train job is running.
        """
        self._check_model(model)
        meta = self._state.meta
        if meta.trainer == run:
            return await self._store.commit()
        if meta.trainer_job in running and meta.trainer_job != job:
            raise PlacementError(
                "another job trains on this Buffer",
                f"end it with: rayrft stop {meta.trainer_job}, or give another buffer.name",
                field="buffer.name",
                value=meta.trainer_job,
            )
        if step:
            raise ConfigError(
                f"the job has taken {step} steps, and this Buffer knows none of them: since then it was emptied by "
                f"{meta.trainer_job or 'nobody'!r}, or begun anew",
                "start a new train job from its checkpoint (rayrft export, model.path)",
                field="buffer.name",
                value=self._name,
            )
        await self._store.commit(e.TrainerJoined(run, job, model))
        self._check_rows()

    async def check(self, folder: Path, config: BufferConfig) -> None:
        """Raise ConfigError unless a job wants this Buffer to be as it is."""
        if folder != self._store.storage.folder:
            raise ConfigError(
                f"the Buffer {self._name!r} keeps its log in {self._store.storage.folder}",
                "give its jobs one buffer.storage, or, where there is none, one storage",
                field="buffer.storage",
                value=str(folder),
            )
        # The folder is compared above; what is too old is for the train job to say.
        ours, theirs = (each.model_dump(exclude={"storage", "max_age"}) for each in (self._store.config, config))
        for key, value in ours.items():
            if theirs[key] != value:
                raise ConfigError(
                    f"the Buffer {self._name!r} was started with {value!r}",
                    f"give all its jobs one buffer section; to change it: rayrft buffer stop {self._name}",
                    field=f"buffer.{key}",
                    value=theirs[key],
                )

    async def admit_to(self, feed: str, producer: str, call: int, count: int) -> list[Ticket]:
        """Wait for room and return up to ``count`` tickets of a feed, none if its tasks are exhausted: as `admit`."""
        meta = self._state.meta

        def answered() -> bool:
            return producer in meta.gone or meta.feeds[feed].calls.get(producer, (-1, []))[0] >= call

        await self._store.wait_for(lambda: answered() or meta.feeds[feed].ended or self._room(feed) > 0)
        if producer in meta.gone:
            raise DataError(
                "the producer was abandoned, because its job was resumed",
                "restart it under another name",
                field="producer",
                value=producer,
            )
        if answered():
            number, given = meta.feeds[feed].calls[producer]
            await self._store.commit()
            return given if number == call else []
        wanted = 0 if meta.feeds[feed].ended else min(count, self._room(feed))
        event = e.Admitted(producer, call, wanted, [], feed)
        tickets: list[Ticket] = apply(self._state, event)
        await self._store.record(replace(event, tasks=[ticket.task for ticket in tickets]))
        return tickets

    async def progress(self, feed: str, groups: int) -> FeedProgress:
        """Return what a feed has put once that is ``groups`` groups, or its last ones. Waits without a deadline, like
        `admit_to`."""
        meta = self._state.meta

        def reached() -> bool:
            state = meta.feeds[feed]
            return state.groups >= groups or (state.ended and not self._state.in_flight(feed))

        await self._store.wait_for(reached)
        return self._progress(feed)

    async def status(self) -> SharedStatus:
        """Return the Buffer's contents and jobs."""
        meta = self._state.meta
        feeds = [
            FeedStatus(feed.job, feed.groups, self._state.in_flight(name), feed.ended)
            for name, feed in meta.feeds.items()
        ]
        folder, step = self._store.storage.folder, meta.step
        return SharedStatus(self._name, folder, meta.trainer_job, step, feeds, self._state.ledger(recount=True))

    def _progress(self, feed: str) -> FeedProgress:
        state = self._state.meta.feeds[feed]
        return FeedProgress(state.groups, state.report, self._state.ledger())

    def _room(self, feed: str) -> int:
        """Return the number of groups that a feed may begin."""
        state, meta, config = self._state.meta.feeds[feed], self._state.meta, self._store.config
        under_way = self._state.in_flight(feed)
        free = state.in_flight - under_way
        if config.when_full != "wait":
            return free
        rows = config.max_rows - self._state.groups.held_rows - under_way * state.group_size
        # The last group may exceed the bound by a part of itself.
        room = 0 if self._retention.full else -(-rows // state.group_size)
        if meta.open and meta.plan is not None and all(lease.acked for lease in meta.leases.values()):
            # The next step must get its groups even if those that are held have more rows than usual: it frees room.
            room = max(room, meta.plan.groups - self._state.eligible - under_way)
        return max(0, min(free, room))

    def _check_rows(self) -> None:
        """Check rows against the limits of the jobs' model, once it is known."""
        if (model := self._state.meta.model) is not None:
            self._limits = Limits(model.vocabulary, model.max_length)
            self._arrivals = Arrivals(self._store, self._retention, self._limits)

    def _check_model(self, model: ModelTerms) -> None:
        known = self._state.meta.model
        if known is None or known == model:
            return
        what = (
            "the tokenizer or model.template"
            if known.tokenizer != model.tokenizer
            else "vocabulary or model.max_length"
        )
        raise ConfigError(
            f"{what} differs from that of the Buffer {self._name!r}, of {known.vocabulary} tokens and rows of up to "
            f"{known.max_length}",
            "give the jobs that meet at a Buffer the same model, model.template and model.max_length",
            field="model",
            value=[model.vocabulary, model.max_length],
        )
