"""What is put is answered for at once: what was refused and why, and what was here before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rayrft.algorithms import build
from rayrft.buffer.client import put_groups
from rayrft.buffer.validation import Limits
from rayrft.errors import DataError
from rayrft.experience import Experience, VersionSpan
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import expert_rows, group, packed, plan, trained_ids
from tests.errors import about
from tests.scripted import remote

LIMITS = Limits(vocabulary=1000, max_length=4)
FUTURE = "unpublished weight version"
OTHER = "group stored before with other rows"
USED = "group_id of another group"
BESIDE = "another row of the group invalid"


@pytest.fixture
def buffer(opened: Callable[..., LocalBuffer]) -> LocalBuffer:
    return opened(limits=LIMITS)


def hand_in(buffer: LocalBuffer, rows: list[Experience], algorithm: str = "grpo", group_size: int = 2) -> None:
    """As `Run.put` does."""
    put_groups(remote(buffer.buffer), rows, [build(algorithm)], group_size)


def refused(buffer: LocalBuffer, rows: list[Experience], **how: Any) -> dict[str, str]:
    """Why each row of these was refused."""
    with pytest.raises(DataError) as raised:
        hand_in(buffer, rows, **how)
    assert raised.value.field == "rows"
    reasons: dict[str, str] = raised.value.value
    return reasons


def changed(rows: list[Experience], place: int = 0, **changes: Any) -> list[Experience]:
    """The same rows, with one of them changed."""
    return [row.with_fields(**changes) if at == place else row for at, row in enumerate(rows)]


def ledger(buffer: LocalBuffer) -> tuple[int, int, dict[str, int]]:
    stats = buffer.do("stats")
    return stats.ledger.sampled, stats.ledger.held, stats.ledger.dropped


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": np.full(4, 1000, np.int32)}, "token outside the vocabulary"),
        ({"weight_versions": (VersionSpan(1, 4, 1),)}, FUTURE),
        ({"logprobs": np.array([0, -np.inf, 0, 0], np.float32)}, "logprobs not finite"),
        ({"token_ids": np.full(5, 1, np.int32)}, "longer than max_length"),
        ({"experience_id": "1/1"}, "duplicate experience_id"),
    ],
)
def test_a_group_with_a_faulty_row_is_refused_whole_and_the_rows_are_named(
    buffer: LocalBuffer, changes: dict[str, Any], reason: str
) -> None:
    rows = changed(group(1), **changes)
    assert reason in refused(buffer, [*rows, *group(2)], algorithm="ppo").values()
    assert buffer.held() == [("2/0", 0.0), ("2/1", 1.0)], "other groups of the call are taken"
    assert ledger(buffer) == (4, 2, {f"rejected: {reason}": 1, f"rejected: {BESIDE}": 1})
    assert buffer.buffer.state.training.reports.rows == 2, "it says nothing of the step's rewards"


def test_what_is_missing_or_of_another_type_or_number_is_refused_before_anything_is_put(buffer: LocalBuffer) -> None:
    unrewarded = [row.with_fields(greedy_reward=0.5, reward=None) for row in group(1)]
    for rows, algorithm, size, named in (
        ([*group(2), *changed(group(1), reward="good")], "grpo", 2, about("reward")),
        (unrewarded, "grpo", 2, about("reward", "1")),
        (unrewarded, "ppo", 2, about("reward", "1")),
        (group(1), "remax", 2, about("greedy_reward", "1")),
        ([*group(2, 4), *group(1, 1)], "grpo", 4, about("group_id", "1")),
        ([*group(2, 4), *group(1, 8)], "grpo", 4, about("group_id", "1")),
    ):
        with pytest.raises(DataError, check=named):
            hand_in(buffer, rows, algorithm, size)
        assert ledger(buffer)[0] == 0


def test_a_refused_group_is_counted_once_and_may_come_again_repaired(buffer: LocalBuffer) -> None:
    broken = changed(group(1), reward=float("nan"))
    for _ in range(3):
        assert refused(buffer, broken) == {"1/0": "reward not finite"}
        buffer.restart()
    assert ledger(buffer)[0] == 2
    hand_in(buffer, group(1))
    assert ledger(buffer)[:2] == (4, 2)


def test_the_same_group_again_is_passed_over_and_other_rows_of_its_id_are_refused(buffer: LocalBuffer) -> None:
    hand_in(buffer, group(1))
    buffer.do("feedback", "1/0", 5.0)  # the rows that lie there now are not those that were put
    for _ in range(2):
        hand_in(buffer, group(1))
        assert refused(buffer, changed(group(1), reward=3.0)) == {"1": OTHER}
        buffer.restart()
    assert ledger(buffer) == (4, 2, {f"rejected: {OTHER}": 2})
    assert buffer.held() == [("1/0", 5.0), ("1/1", 1.0)]


def test_weights_that_a_trained_step_published_are_not_of_the_future(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, scheduled=False))
    hand_in(buffer, group(1))
    buffer.lease(0)
    assert set(refused(buffer, group(2, version=1)).values()) == {FUTURE}
    buffer.do("ack", 0)
    hand_in(buffer, group(2, version=1))  # engines may have them before the Buffer is told
    assert set(refused(buffer, group(3, version=2)).values()) == {FUTURE}
    buffer.do("advance", 5)
    hand_in(buffer, group(3, version=5))


def test_a_group_without_a_ticket_takes_a_free_place_of_a_scheduled_stage(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(2))
    hand_in(buffer, group(1))
    [ticket] = buffer.do("admit", "explorer", 1, 4)
    buffer.put([(group(2), ticket)])
    buffer.restart()
    assert trained_ids(buffer.do("lease", 0, 1, 5)) == [10, 11, 20, 21]


def test_a_group_without_a_ticket_is_refused_where_a_scheduled_stage_has_no_place_for_it(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    [ticket] = buffer.do("admit", "explorer", 1, 4)
    for _ in range(2):
        [reason] = set(refused(buffer, group(1)).values())
        assert reason == "the group was dropped: it is too old, or the stage has no place for it"
        buffer.restart()
    assert ledger(buffer) == (2, 0, {"late": 2})
    buffer.put([(group(2), ticket)])
    assert trained_ids(buffer.do("lease", 0, 1, 5)) == [20, 21]


def test_a_group_that_waits_for_a_stage_is_scheduled_or_dropped_when_one_opens(buffer: LocalBuffer) -> None:
    hand_in(buffer, group(1))
    hand_in(buffer, group(2))
    assert ledger(buffer) == (4, 4, {})
    buffer.do("open_stage", plan(1))
    assert ledger(buffer) == (4, 2, {"late": 2})
    assert trained_ids(buffer.do("lease", 0, 1, 5)) == [10, 11]


def test_a_group_of_masked_rows_alone_is_refused(buffer: LocalBuffer) -> None:
    rows = [row.with_fields(status="masked") for row in group(1)]
    assert set(refused(buffer, rows).values()) == {"all rows of the group masked"}


def test_a_group_need_not_have_as_many_rows_as_the_group_size(buffer: LocalBuffer) -> None:
    hand_in(buffer, group(2, 1), algorithm="ppo", group_size=2)  # a critic compares it with no other
    several = [row.with_fields(experience_id=f"1/{at // 4}/{at}") for at, row in enumerate(group(1, 8))]
    hand_in(buffer, several, group_size=2)  # of two trajectories
    assert ledger(buffer)[1] == 1 + 8


def test_a_group_of_the_explorer_keeps_its_right_rows_and_the_others_are_counted(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    [ticket] = buffer.do("admit", "explorer", 1, 1)
    buffer.put([(changed(group(1, 2), token_ids=np.full(4, 5000, np.int32))[:1], ticket)])
    [ticket] = buffer.do("admit", "explorer", 2, 1)  # the place of a group without a right row is free again
    buffer.put([(changed(group(2, 4), token_ids=np.full(4, 5000, np.int32)), ticket)])
    assert ledger(buffer) == (5, 3, {"rejected: token outside the vocabulary": 2})
    assert buffer.trained(0) == ["2/1", "2/2", "2/3"]


def test_a_second_group_of_one_name_is_refused_and_its_place_is_free_again(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(3))
    first, second, third = buffer.do("admit", "explorer", 1, 3)
    buffer.put([(group(1), first), (group(1), second)])  # in one call, and
    buffer.put([(group(1), third)])  # in one of its own
    assert ledger(buffer) == (6, 2, {f"rejected: {USED}": 4})
    assert len(buffer.do("admit", "explorer", 2, 3)) == 2


def test_demonstrations_beyond_the_limits_are_refused(buffer: LocalBuffer) -> None:
    longer = group(90, 3, length=5)[1].with_fields(source="expert")
    for rows in (changed(expert_rows(3), token_ids=np.full(4, 1000, np.int32)), [*expert_rows(2), longer]):
        assert buffer.do("load", "gold", packed(rows))[0] == "DataError"
    assert buffer.do("load", "gold", packed(expert_rows(3))) == 3


def test_feedback_on_an_unknown_row_or_with_a_reward_that_is_no_number_is_refused(buffer: LocalBuffer) -> None:
    hand_in(buffer, group(1))
    for unknown in ("2/0", "1/9"):
        assert buffer.do("feedback", unknown, 1.0) == ("DataError", unknown)
    with pytest.raises(DataError, check=about("feedback")):
        buffer.run(buffer.buffer.feedback("1/0", float("nan")))
