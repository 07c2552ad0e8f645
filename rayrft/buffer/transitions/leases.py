"""Transitions of leases: taken, returned, acknowledged and rolled back; and of the trainer that takes them."""

from __future__ import annotations

from dataclasses import field

from rayrft.buffer.events import Event, Extent, GroupReport, ModelTerms
from rayrft.buffer.expert_cursor import ExpertCursor
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.schedule import PoolSchedule
from rayrft.buffer.state import LeaseRecord, State


class BatchLeased(Event):
    step: int
    slots: list[int]
    weights: list[float]
    """Importance weights of the groups."""
    expert: list[int]

    def apply(self, state: State) -> None:
        training, plan, groups = state.training, state.stage.plan, state.groups
        for slot in self.slots:
            groups.set_status(slot, GroupStatus.LEASED)
            groups.pending[slot] += 1
            groups.last_step[slot] = self.step
        state.stage.schedule.take(self.slots)
        training.step = max(training.step, self.step)
        name = plan.demonstrations if plan and self.expert else None
        cursor = ExpertCursor(Extent(0), 0) if name is None else state.contents.experts[name]
        record = LeaseRecord(
            self.step,
            training.draws,
            training.version,
            self.slots,
            self.weights,
            name,
            cursor.extent,
            self.expert,
            cursor.unit,
            mini_batches=plan.mini_batches if plan else 1,
            staleness=[training.version - version for version in groups.version[self.slots].tolist()],
            rollouts=training.reports,
        )
        if self.expert:
            cursor.advance(len(self.expert))
        training.draws += 1
        training.leases[self.step] = record
        training.reports = GroupReport()


class StepAcked(Event):
    step: int
    scores: dict[int, float] = field(default_factory=dict)
    """New scores by slot, if training reported any."""

    def apply(self, state: State) -> None:
        record, groups = state.training.leases[self.step], state.groups
        if record.acked:
            return
        record.acked = True
        for slot, score in self.scores.items():
            groups.score[slot] = score
            state.training.greatest_error = max(state.training.greatest_error, score)
        groups.uses[record.slots] += 1
        for slot in _release(state, record.slots):
            if groups.uses[slot] >= state.config.max_uses:
                state.retire("", slot)
            else:
                _make_ready(state, slot)


class RowsBlamed(Event):
    """Training failed on one of these groups (by slot) and demonstrations (by row)."""

    step: int
    attempt: str
    """Attempt of the run."""
    slots: list[int]
    expert: list[int]

    def apply(self, state: State) -> None:
        record = state.training.leases[self.step]
        if record.blamed_in == self.attempt:
            return
        record.blamed_in = self.attempt
        for slot in self.slots:
            if slot not in record.blamed:
                record.blamed.append(slot)
                continue
            kept = [place for place, other in enumerate(record.slots) if other != slot]
            record.slots, record.weights = [record.slots[i] for i in kept], [record.weights[i] for i in kept]
            record.staleness = [record.staleness[i] for i in kept]
            record.blamed.remove(slot)
            state.retire("failed_twice", *_release(state, [slot]))
        for row in self.expert:
            if row not in record.blamed_expert:
                record.blamed_expert.append(row)
                continue
            record.expert = [other for other in record.expert if other != row]
            record.blamed_expert.remove(row)
            cursor = state.contents.experts.get(record.demonstrations or "")
            if cursor is not None and cursor.extent.segment == record.extent.segment:
                cursor.exclude([row])
        if not record.slots and not record.expert:
            _discard(state, record)


class BatchDiscarded(Event):
    """Training failed on the batch of a step as a whole; the step gets another one."""

    step: int

    def apply(self, state: State) -> None:
        record = state.training.leases[self.step]
        state.retire("not_finite", *_release(state, record.slots))
        _discard(state, record)


def _discard(state: State, record: LeaseRecord) -> None:
    """Discard a lease, so that the step leases again."""
    del state.training.leases[record.step]
    state.stage.schedule.discard_lease()
    state.training.reports = record.rollouts + state.training.reports


class StepsCovered(Event):
    """A checkpoint covers all steps before ``step``."""

    step: int

    def apply(self, state: State) -> None:
        training = state.training
        training.checkpointed_step = max(training.checkpointed_step, self.step)
        training.leases = {s: lease for s, lease in training.leases.items() if s >= self.step or not lease.acked}


class LeaseRequeued(Event):
    step: int

    def apply(self, state: State) -> None:
        record, groups = state.training.leases.pop(self.step), state.groups
        if record.acked:
            return
        ready = [slot for slot in _release(state, record.slots) if _make_ready(state, slot)]
        state.stage.schedule.give_back(
            {slot: (int(groups.sequence[slot]), int(groups.version[slot])) for slot in ready}
        )


class StepsRolledBack(Event):
    """The run resumes at ``step``: leases from there on are trained again."""

    step: int
    attempt: str
    """Attempt of the run."""

    def apply(self, state: State) -> None:
        training, groups = state.training, state.groups
        training.attempts.add(self.attempt)
        state.stage.opened = {}
        for record in training.leases.values():
            if record.step < self.step or not record.acked:
                continue
            record.acked = False
            for slot in record.slots:
                if groups.status[slot] == GroupStatus.TRAINED:
                    state.contents.ledger.trained -= groups.trainable(slot)
                groups.set_status(slot, GroupStatus.LEASED)
                groups.pending[slot] += 1
                groups.uses[slot] -= 1
        leases = training.leases.values()
        training.replaying = any(not lease.acked and lease.version < training.version for lease in leases)


class VersionAdvanced(Event):
    version: int

    def apply(self, state: State) -> None:
        training, feed = state.training, state.feeds[""]
        training.replaying = training.replaying and self.version < training.version
        if self.version <= training.version:
            return  # a repeated step publishes an old version again
        training.version = self.version
        feed.reissued = [ticket for ticket in feed.reissued if ticket.deadline >= self.version]
        state.retire("stale", *state.stage.schedule.advance(self.version))
        drop_stale(state)


def drop_stale(state: State) -> None:
    """Drop the ready groups of a pool that are too old for the next step."""
    schedule = state.stage.schedule
    if not schedule.pooled or schedule.oldest <= 0:
        return
    ready = state.groups.where(GroupStatus.READY)
    state.retire("stale", *ready[state.groups.version[ready] < schedule.oldest].tolist())


def _release(state: State, slots: list[int]) -> list[int]:
    """Release groups from a lease; return the slots of groups that no other lease has."""
    state.groups.pending[slots] -= 1
    return [slot for slot in slots if state.groups.pending[slot] == 0]


def _make_ready(state: State, slot: int) -> bool:
    """Make a leased group ready again; drop it, and return False, if it has become too old."""
    if state.groups.version[slot] < state.stage.schedule.oldest:
        state.retire("stale", slot)
        return False
    state.groups.set_status(slot, GroupStatus.READY)
    return True


class TrainerJoined(Event):
    """The train job ``job``, whose run has this id, takes the batches from now on."""

    run: str
    job: str
    model: ModelTerms

    def apply(self, state: State) -> None:
        """A run that has joined before continues. A new trainer starts at step 0: unacknowledged leases are requeued,
        and held groups get version 0, since their age in steps of another trainer means nothing."""
        training, stage, groups = state.training, state.stage, state.groups
        state.meta.model = state.meta.model or self.model
        if training.run not in ("", self.run):
            for step in [lease.step for lease in training.leases.values() if not lease.acked]:
                LeaseRequeued(step).apply(state)
            training.leases, training.version, training.step, training.checkpointed_step = {}, 0, 0, 0
            training.replaying, training.greatest_error, state.feeds[""].ended = False, 0.0, False
            stage.opened, stage.plan, stage.open = {}, None, False
            stage.schedule = PoolSchedule(next_sequence=stage.schedule.next_sequence)
            ready = groups.where(GroupStatus.READY)
            groups.version[ready], groups.last_step[ready] = 0, -1
        training.run, training.job = self.run, self.job
