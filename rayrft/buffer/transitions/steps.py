"""Transitions of leases: taken, returned, acknowledged and rolled back."""

from __future__ import annotations

from rayrft.buffer import events as e
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.log.segments import Extent
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.state import LeaseRecord, State, rule


@rule(e.Leased)
def leased(state: State, event: e.Leased) -> LeaseRecord:
    meta, groups = state.meta, state.groups
    for slot in event.slots:
        groups.set_status(slot, GroupStatus.LEASED)
        groups.pending[slot] += 1
        groups.last_step[slot] = event.step
    meta.schedule.take(event.slots)
    meta.step = max(meta.step, event.step)
    name = meta.plan.demonstrations if meta.plan and event.expert else None
    extent, unit = Extent(0), 1
    if name is not None:
        extent, unit = meta.experts[name].extent, meta.experts[name].unit
        meta.experts[name].advance(len(event.expert))
    mini_batches = meta.plan.mini_batches if meta.plan else 1
    staleness = [meta.version - version for version in groups.version[event.slots].tolist()]
    record = LeaseRecord(
        event.step,
        meta.draws,
        meta.version,
        event.slots,
        event.weights,
        name,
        extent,
        event.expert,
        unit,
        mini_batches,
        staleness,
        meta.reports,
    )
    meta.draws += 1
    meta.leases[event.step] = record
    meta.reports = e.GroupReport()
    return record


@rule(e.Acked)
def acked(state: State, event: e.Acked) -> None:
    record, groups = state.meta.leases[event.step], state.groups
    if record.acked:
        return
    record.acked = True
    for slot, score in event.scores.items():
        groups.score[slot] = score
        state.meta.greatest_error = max(state.meta.greatest_error, score)
    for slot in record.slots:
        groups.pending[slot] -= 1
        groups.uses[slot] += 1
        if groups.pending[slot] == 0:
            if groups.uses[slot] >= state.config.max_uses:
                state.retire(slot, "")
            else:
                _make_ready(state, [slot])


@rule(e.Blamed)
def blamed(state: State, event: e.Blamed) -> None:
    record, groups = state.meta.leases[event.step], state.groups
    if record.blamed_in == event.life:
        return
    record.blamed_in = event.life
    for slot in event.slots:
        if slot not in record.blamed:
            record.blamed.append(slot)
            continue
        kept = [place for place, other in enumerate(record.slots) if other != slot]
        record.slots, record.weights = [record.slots[i] for i in kept], [record.weights[i] for i in kept]
        record.staleness = [record.staleness[i] for i in kept]
        record.blamed.remove(slot)
        groups.pending[slot] -= 1
        if groups.pending[slot] == 0:
            state.retire(slot, "failed_twice")
    for row in event.expert:
        if row not in record.blamed_expert:
            record.blamed_expert.append(row)
            continue
        record.expert = [other for other in record.expert if other != row]
        record.blamed_expert.remove(row)
        cursor = state.meta.experts.get(record.demonstrations or "")
        if cursor is not None and cursor.extent.segment == record.extent.segment:
            cursor.exclude([row])
    if not record.slots and not record.expert:  # the batch is empty: the step gets another one
        del state.meta.leases[event.step]
        state.meta.schedule.lose()
        state.meta.reports = record.rollouts + state.meta.reports


@rule(e.Covered)
def covered(state: State, event: e.Covered) -> None:
    state.meta.checkpointed_step = max(state.meta.checkpointed_step, event.step)
    state.meta.leases = {s: lease for s, lease in state.meta.leases.items() if s >= event.step or not lease.acked}


@rule(e.Requeued)
def requeued(state: State, event: e.Requeued) -> None:
    record = state.meta.leases.pop(event.step)
    if record.acked:
        return
    for slot in record.slots:
        state.groups.pending[slot] -= 1
    ready = _make_ready(state, [slot for slot in record.slots if state.groups.pending[slot] == 0])
    schedule = state.meta.schedule
    tickets = zip(state.groups.sequence[ready].tolist(), state.groups.version[ready].tolist(), strict=True)
    schedule.give_back(
        {
            slot: Ticket(sequence, version, version + schedule.max_staleness)
            for slot, (sequence, version) in zip(ready, tickets, strict=True)
        }
    )


@rule(e.RolledBack)
def rolled_back(state: State, event: e.RolledBack) -> None:
    state.meta.lives.add(event.life)
    state.meta.opened = {}
    for record in state.meta.leases.values():
        if record.step < event.step or not record.acked:
            continue
        record.acked = False
        for slot in record.slots:
            if state.groups.status[slot] == GroupStatus.TRAINED:
                state.meta.ledger.trained -= state.groups.trainable(slot)
            state.groups.set_status(slot, GroupStatus.LEASED)
            state.groups.pending[slot] += 1
            state.groups.uses[slot] -= 1
    meta = state.meta
    meta.replaying = any(not lease.acked and lease.version < meta.version for lease in meta.leases.values())


@rule(e.Advanced)
def advanced(state: State, event: e.Advanced) -> None:
    meta = state.meta
    meta.replaying = meta.replaying and event.version < meta.version
    if event.version <= meta.version:
        return  # a repeated step publishes an old version again
    meta.version = event.version
    meta.reissued_tickets = [ticket for ticket in meta.reissued_tickets if ticket.deadline >= event.version]
    for slot in meta.schedule.advance(event.version):
        state.retire(slot, "stale")
    drop_stale(state)


def drop_stale(state: State) -> None:
    """Drop the ready groups of a pool that are too old for the next step."""
    schedule = state.meta.schedule
    if not schedule.pooled or schedule.oldest <= 0:
        return
    ready = state.groups.where(GroupStatus.READY)
    old = ready[state.groups.version[ready] < schedule.oldest]
    for slot in old.tolist():
        state.retire(slot, "stale")


def _make_ready(state: State, slots: list[int]) -> list[int]:
    """Make leased groups ready again, and remove those that have become too old; return the ready ones."""
    ready = []
    for slot in slots:
        if state.groups.version[slot] < state.meta.schedule.oldest:
            state.retire(slot, "stale")
        else:
            state.groups.set_status(slot, GroupStatus.READY)
            ready.append(slot)
    return ready
