"""Leases: what a step takes, gives back, and takes again."""

from __future__ import annotations

from rayrft.buffer import events as e
from rayrft.buffer.groups import Fate
from rayrft.buffer.log.segments import Extent
from rayrft.buffer.schedule import Schedule, Ticket
from rayrft.buffer.state import LeaseRecord, State, rule


@rule(e.Leased)
def leased(state: State, event: e.Leased) -> LeaseRecord:
    book, groups = state.book, state.groups
    for slot in event.slots:
        groups.settle(slot, Fate.LEASED)
        groups.pending[slot] += 1
        groups.last_step[slot] = event.step
    if isinstance(book.schedule, Schedule):
        sequences = groups.sequence[event.slots].tolist()
        book.schedule.take(sequences)
        for sequence in sequences:
            del state.by_sequence[sequence]
    else:
        if book.schedule is not None:
            book.schedule.drawn()
        state.pool.leave(event.slots)
    book.step = max(book.step, event.step)
    name = book.plan.demonstrations if book.plan and event.expert else None
    extent, unit = Extent(0), 1
    if name is not None:
        extent, unit = book.experts[name].extent, book.experts[name].unit
        book.experts[name].advance(len(event.expert))
    mini_batches = book.plan.mini_batches if book.plan else 1
    staleness = [book.version - version for version in groups.version[event.slots].tolist()]
    record = LeaseRecord(
        event.step,
        book.draws,
        book.version,
        event.slots,
        event.weights,
        name,
        extent,
        event.expert,
        unit,
        mini_batches,
        staleness,
        book.reports,
    )
    book.draws += 1
    book.leases[event.step] = record
    book.reports = e.GroupReport()
    return record


@rule(e.Acked)
def acked(state: State, event: e.Acked) -> None:
    record, groups = state.book.leases[event.step], state.groups
    if record.acked:
        return
    record.acked = True
    for slot, score in event.scores.items():
        groups.score[slot] = score
        state.book.greatest_error = max(state.book.greatest_error, score)
    back = []
    for slot in record.slots:
        groups.pending[slot] -= 1
        groups.uses[slot] += 1
        if groups.pending[slot] == 0:
            if groups.uses[slot] >= state.config.max_uses:
                state.retire(slot, "")
            else:
                back.append(slot)
    state.pool.add(_still_in_time(state, back), groups)


@rule(e.Blamed)
def blamed(state: State, event: e.Blamed) -> None:
    record, groups = state.book.leases[event.step], state.groups
    if record.blamed_in == event.life:
        return
    record.blamed_in = event.life
    for slot in event.slots:
        if slot not in record.blamed:
            record.blamed.append(slot)
            continue
        kept = [place for place, each in enumerate(record.slots) if each != slot]
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
        record.expert = [each for each in record.expert if each != row]
        record.blamed_expert.remove(row)
        cursor = state.book.experts.get(record.demonstrations or "")
        if cursor is not None and cursor.extent == record.extent:
            cursor.failed.append(row)
    if not record.slots and not record.expert:  # nothing is left of the batch: the step gets another
        del state.book.leases[event.step]
        state.book.reports = record.rollouts + state.book.reports


@rule(e.Covered)
def covered(state: State, event: e.Covered) -> None:
    state.book.covered = max(state.book.covered, event.step)
    state.book.leases = {s: lease for s, lease in state.book.leases.items() if s >= event.step or not lease.acked}


@rule(e.Requeued)
def requeued(state: State, event: e.Requeued) -> None:
    record = state.book.leases.pop(event.step)
    if record.acked:
        return
    for slot in record.slots:
        state.groups.pending[slot] -= 1
    back = _still_in_time(state, [slot for slot in record.slots if state.groups.pending[slot] == 0])
    if isinstance(state.book.schedule, Schedule):
        sequences, versions = state.groups.sequence[back].tolist(), state.groups.version[back].tolist()
        state.by_sequence.update(zip(sequences, back, strict=True))
        bound = state.book.schedule.max_staleness
        state.book.schedule.give_back([Ticket(s, v, v + bound) for s, v in zip(sequences, versions, strict=True)])
    else:
        if state.book.schedule is not None:
            state.book.schedule.give_back()
        # They are older than what came since, and order may matter.
        state.pool.refill(state.groups, state.clock)


@rule(e.RolledBack)
def rolled_back(state: State, event: e.RolledBack) -> None:
    state.book.lives.add(event.life)
    if event.whole_run:
        state.book.opened = {}
    for record in state.book.leases.values():
        if record.step < event.step or not record.acked:
            continue
        record.acked = False
        for slot in record.slots:
            if state.groups.fate[slot] == Fate.TRAINED:
                state.book.ledger.trained -= int(state.groups.rows[slot])
            elif state.groups.fate[slot] == Fate.READY:
                state.pool.leave([slot])
            state.groups.settle(slot, Fate.LEASED)
            state.groups.pending[slot] += 1
            state.groups.uses[slot] -= 1
    book = state.book
    book.behind = any(not each.acked and each.version < book.version for each in book.leases.values())


@rule(e.Advanced)
def advanced(state: State, event: e.Advanced) -> None:
    book = state.book
    book.behind = book.behind and event.version < book.version
    if event.version <= book.version:
        return  # a step that is repeated publishes what was published before
    book.version = event.version
    book.returned = [ticket for ticket in book.returned if ticket.deadline >= event.version]
    if isinstance(book.schedule, Schedule):
        for sequence in book.schedule.advance(event.version):
            state.retire(state.by_sequence.pop(sequence), "stale")
    elif book.plan is not None and book.schedule is not None:
        book.schedule.advance(event.version)
        drop_stale(state, book.plan.max_staleness)


def drop_stale(state: State, max_staleness: int) -> None:
    """Groups of the pool that are too old for the next step leave."""
    ready = state.groups.where(Fate.READY)
    old = ready[state.groups.version[ready] < state.book.version - max_staleness]
    state.pool.leave(old.tolist())
    for slot in old.tolist():
        state.retire(slot, "stale")


def _still_in_time(state: State, slots: list[int]) -> list[int]:
    """Make leased groups ready again; those that have become too old meanwhile leave, and are not among the result."""
    book, back = state.book, []
    oldest = book.version - book.schedule.max_staleness if book.schedule is not None else None
    for slot in slots:
        if oldest is not None and state.groups.version[slot] < oldest:
            state.retire(slot, "stale")
        else:
            state.groups.settle(slot, Fate.READY)
            back.append(slot)
    return back
