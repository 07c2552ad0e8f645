"""The experience schema: rows survive the trip through Arrow, and faulty ones are found."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rayrft.buffer.validation import Limits, find_faults, group_starts, stored_rows
from rayrft.errors import DataError
from rayrft.experience import SCHEMA, Experience, Task, VersionSpan, from_batch, pack, to_batch, unpack


def make_row(**changes: Any) -> Experience:
    row = Experience(
        experience_id="run/stage/0/0",
        group_id="run/stage/0",
        task_id="t",
        token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        prompt_length=2,
        action_mask=np.array([0, 0, 1, 1], dtype=np.uint8),
        logprobs=np.array([0, 0, -0.5, -1.5], dtype=np.float32),
        weight_versions=(VersionSpan(2, 3, 6), VersionSpan(3, 4, 7)),
        reward=1.0,
        reward_components={"parsed": 1.0},
        greedy_reward=0.5,
        turns=({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}),
        metrics={"length": 2.0},
    )
    return dataclasses.replace(row, **changes)


def test_a_row_survives_the_trip_through_arrow() -> None:
    rows = [make_row(), make_row(experience_id="e", source="expert", weight_versions=(), turns=())]
    back = from_batch(to_batch(rows))
    for row, again in zip(rows, back, strict=True):
        for field in dataclasses.fields(Experience):
            before, after = getattr(row, field.name), getattr(again, field.name)
            if isinstance(before, np.ndarray):
                assert np.array_equal(before, after) and before.dtype == after.dtype, field.name
            else:
                assert before == after, field.name


def test_a_batch_has_the_schema_whatever_its_rows_leave_out() -> None:
    assert to_batch([make_row()]).schema.equals(SCHEMA)
    assert to_batch([]).schema.equals(SCHEMA)


@pytest.mark.parametrize("mixed", [False, True])
def test_arrays_of_any_kind_and_lists_are_stored_alike(mixed: bool) -> None:
    """Rows whose arrays are those of the schema are converted together, others one by one."""
    wide = np.arange(12, dtype=np.int32 if not mixed else np.int64)
    tokens = [wide[::3], wide[:0], wide[5:9], [7] if mixed else wide[-1:]]
    logprobs = [np.array([np.nan, -1.0], np.float32), np.zeros(0, np.float64 if mixed else np.float32)] * 2
    rows = [make_row(token_ids=ids, logprobs=of) for ids, of in zip(tokens, logprobs, strict=True)]
    back = from_batch(to_batch(rows))
    assert [row.token_ids.tolist() for row in back] == [[0, 3, 6, 9], [], [5, 6, 7, 8], [7] if mixed else [11]]
    assert [row.logprobs.tolist() for row in back[1:]] == [[], pytest.approx([np.nan, -1.0], nan_ok=True), []]
    assert {(row.token_ids.dtype, row.logprobs.dtype) for row in back} == {(np.dtype("int32"), np.dtype("float32"))}


def test_slices_of_a_batch_give_their_own_rows() -> None:
    batch = to_batch([make_row(experience_id=str(i), token_ids=np.arange(i, i + 4, dtype=np.int32)) for i in range(5)])
    [row] = from_batch(batch.slice(3, 1))
    assert row.experience_id == "3" and row.token_ids.tolist() == [3, 4, 5, 6]


def test_rows_travel_as_one_message() -> None:
    batch = to_batch([make_row(), make_row(labels={"quality": "good"})])
    assert unpack(pack(batch)).equals(batch)
    assert from_batch(unpack(pack(batch.slice(1))))[0].labels == {"quality": "good"}


def test_groups_are_found_with_their_tokens_and_oldest_versions() -> None:
    def row(group: str, repeat: int, version: int) -> Experience:
        spans = (VersionSpan(2, 3, 9), VersionSpan(3, 4, version))
        return make_row(group_id=group, experience_id=f"{group}/{repeat}", weight_versions=spans)

    expert = make_row(group_id="c", experience_id="c", source="expert", weight_versions=())
    batch = to_batch([row("z", 0, 8), row("a", 0, 5), row("a", 1, 4), expert]).slice(1)
    starts = group_starts(batch)
    found = stored_rows(batch, starts, np.zeros(2), 10, 90)
    assert starts.tolist() == [0, 2]
    assert [(each.row, each.rows, each.tokens, each.nbytes, each.version) for each in found] == [
        (10, 2, 8, 60, 4),
        (12, 1, 4, 30, 0),
    ]


def test_a_right_row_has_no_fault() -> None:
    expert = make_row(source="expert", weight_versions=())
    assert find_faults(to_batch([make_row(), expert, make_row(experience_id="run/stage/0")])) == {}


STEP_FAULT = "step reward not finite or not at a model token"
LIMITS = Limits(vocabulary=9, max_length=4, version=7)


def test_a_row_at_every_limit_has_no_fault() -> None:
    steps = {"token_reward_2": 0.5, "token_reward_3": -1.0, "token_reward_words": 7.0}
    row = make_row(logprobs=np.array([0, 0, -0.5, 1e-6], dtype=np.float32), metrics=steps)
    assert find_faults(to_batch([row]), LIMITS) == {}


@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        ({"vocabulary": 8}, "token outside the vocabulary"),
        ({"max_length": 3}, "longer than max_length"),
        ({"version": 6}, "unpublished weight version"),
    ],
)
def test_a_row_one_beyond_a_limit_is_named(limits: dict[str, int], fault: str) -> None:
    assert find_faults(to_batch([make_row()]), dataclasses.replace(LIMITS, **limits)) == {0: fault}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("group_id", 7),
        ("group_id", None),
        ("token_ids", None),
        ("token_ids", np.array([1.5, 2.0])),
        ("token_ids", np.zeros((2, 2), np.int32)),
        ("prompt_length", 1.5),
        ("token_ids", [1 << 40]),
        ("reward", "good"),
        ("labels", ["good"]),
        ("weight_versions", (7,)),
        ("turns", "said"),
    ],
)
def test_a_row_of_wrong_types_is_an_error_that_names_the_column(column: str, value: Any) -> None:
    with pytest.raises(DataError) as raised:
        to_batch([make_row(), make_row(**{column: value})])
    assert raised.value.field == column


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"logprobs": np.zeros(3, dtype=np.float32)}, "logprobs and token_ids differ in length"),
        ({"logprobs": np.array([0, 0, np.nan, 0], dtype=np.float32)}, "logprobs not finite"),
        ({"greedy_reward": float("nan")}, "greedy_reward not finite"),
        ({"reward": None}, "missing reward"),
        ({"source": "expert", "status": "masked"}, "masked row that is not usual"),
        ({"teacher_logprobs": np.zeros(5, dtype=np.float32)}, "teacher_logprobs and token_ids differ in length"),
        ({"action_mask": np.zeros(4, dtype=np.uint8)}, "empty action_mask"),
        ({"action_mask": np.array([0, 1, 1, 1], dtype=np.uint8)}, "action_mask on prompt tokens"),
        ({"prompt_length": 4}, "empty prompt or answer"),
        ({"reward": float("nan")}, "reward not finite"),
        ({"source": "stranger"}, "unknown source"),
        ({"weight_versions": (VersionSpan(2, 3, 6),)}, "action token without weight version"),
        ({"weight_versions": ()}, "action token without weight version"),
        # Two spans over one token count it twice and hide that another is not covered.
        ({"weight_versions": (VersionSpan(2, 3, 6), VersionSpan(2, 3, 7))}, "action token without weight version"),
        ({"weight_versions": (VersionSpan(2, 9, 6),)}, "action token without weight version"),
        ({"token_ids": np.array([5, -6, 7, 8], dtype=np.int32)}, "token outside the vocabulary"),
        ({"token_ids": [5, None, 7, 8]}, "null in token_ids"),
        ({"action_mask": [0, 0, 1, None]}, "null in action_mask"),
        ({"logprobs": [0, 0, None, -1.0]}, "logprobs not finite"),
        ({"logprobs": np.array([0, 0, 0.1, -1], dtype=np.float32)}, "logprobs above 0"),
        ({"teacher_logprobs": np.array([0, 0, 0.1, -1], dtype=np.float32)}, "teacher_logprobs above 0"),
        ({"weight_versions": (VersionSpan(2, 4, -1),)}, "unpublished weight version"),
        ({"metrics": {"token_reward_3": 1.0, "token_reward_1": 1.0}}, STEP_FAULT),
        ({"metrics": {"token_reward_4": 1.0}}, STEP_FAULT),
        ({"metrics": {"token_reward_3": float("nan")}}, STEP_FAULT),
        ({"experience_id": "else"}, "experience_id does not start with group_id"),
    ],
)
def test_a_faulty_row_is_named(changes: dict[str, Any], fault: str) -> None:
    rows = [
        make_row(),
        make_row(**{"experience_id": "run/stage/0/1", **changes}),
        make_row(experience_id="run/stage/0"),
    ]
    assert find_faults(to_batch(rows)) == {1: fault}
    assert find_faults(to_batch(rows).slice(1)) == {0: fault}


def test_task_ids_follow_from_content() -> None:
    assert Task.create("s", "q", "a").id == Task.create("s", "q", "a", difficulty=3.0).id
    assert Task.create("s", "q", "a").id != Task.create("s", "q", "b").id
