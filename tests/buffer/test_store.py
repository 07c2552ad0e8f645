"""The ledger closes after everything that can happen to a group, and demonstrations are drawn fairly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayrft.buffer.schedule import Ticket
from rayrft.buffer.store import ExpertStore, StoredGroup, UsualStore


class Ledger(RuleBasedStateMachine):
    """Every way a row can go, in any order; the ledger must close after each."""

    def __init__(self) -> None:
        super().__init__()
        self.store = UsualStore()
        self.next = 0

    @rule(rows=st.integers(1, 8))
    def add(self, rows: int) -> None:
        self.store.add(StoredGroup(Ticket(self.next, 0, 0), None, rows, rows * 5, 0))
        self.next += 1

    @rule(rows=st.integers(1, 8), reason=st.sampled_from(["zero_variance", "late"]))
    def drop(self, rows: int, reason: str) -> None:
        self.store.drop(rows, reason)

    @precondition(lambda self: self.store.ready)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.store.ready)), min_size=1, unique=True))
        self.store.lease(self.next, chosen)
        self.next += 1

    @precondition(lambda self: self.store.leased)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self.store.ack(data.draw(st.sampled_from(sorted(self.store.leased))))

    @precondition(lambda self: self.store.ready)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.store.discard([data.draw(st.sampled_from(sorted(self.store.ready)))], "stale")

    @invariant()
    def closes(self) -> None:
        ledger = self.store.ledger()
        assert ledger["sampled"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["held"]


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_ledger_that_does_not_close_is_an_error() -> None:
    store = UsualStore()
    store.sampled = 3
    with pytest.raises(AssertionError, match="rows are lost or doubled: sampled 3"):
        store.ledger()


def test_demonstrations_are_drawn_once_per_epoch_in_a_new_order_each() -> None:
    store = ExpertStore(None, np.ones(10), seed=0)
    first, second = store.draw(10), store.draw(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_draw_crosses_the_end_of_an_epoch() -> None:
    store = ExpertStore(None, np.ones(3), seed=0)
    assert len(store.draw(7)) == 7
    assert (store.epoch, store.cursor, store.drawn) == (2, 1, 7)


def test_the_order_follows_from_the_seed() -> None:
    assert ExpertStore(None, np.ones(50), seed=1).draw(20) == ExpertStore(None, np.ones(50), seed=1).draw(20)
    assert ExpertStore(None, np.ones(50), seed=1).draw(20) != ExpertStore(None, np.ones(50), seed=2).draw(20)
