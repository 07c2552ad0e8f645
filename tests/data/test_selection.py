"""Columns and rows of Arrow batches, chosen by name and by a condition in SQL."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rayrft.data.selection import Selection
from rayrft.errors import DataError
from rayrft.experience import SCHEMA, to_batch
from tests.buffer.rows import expert_rows, group
from tests.errors import about


def batch(rewards: list[float | None]) -> pa.RecordBatch:
    """Rows 0, 1 … of group 1, with these rewards; the odd ones have labels, metrics and turns."""
    rich = {
        "labels": {"quality": "good"},
        "metrics": {"length": 0.5},
        "turns": ({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}),
        "stop_reason": "stop",
        "chosen": True,
        "teacher_logprobs": np.zeros(4, np.float32),
    }
    rows = zip(rewards, group(1, len(rewards)), strict=True)
    return to_batch([replace(row, reward=reward, **rich if n % 2 else {}) for n, (reward, row) in enumerate(rows)])


def chosen(where: str, rewards: list[float | None]) -> list[int]:
    found = Selection(SCHEMA, ["experience_id"], where).apply(batch(rewards))
    return [int(name.removeprefix("1/")) for name in found.column(0).to_pylist()]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("reward > 0.5", [1, 3]),
        ("REWARD = 0.1 or reward is null", [2, 5]),
        ("not reward > 0.5", [0, 2, 4]),
        ("reward > 0.5 and stop_reason = 'stop' -- and no more", [1, 3]),
        ("source in ('usual', 'human') and experience_id like '%/4'", [4]),
        ("chosen", [1, 3, 5]),
        ("true", [0, 1, 2, 3, 4, 5]),
        ("len(token_ids) > 3 and token_ids[1] % 10 < 2", [0, 1]),
        ("list_sum(action_mask) = 4", []),
        ("list_min(logprobs) = -1 and teacher_logprobs is null", [0, 2, 4]),
        ("labels['quality'] = 'good' and metrics['length'] = 0.5", [1, 3, 5]),
        ("labels['quality'] is null", [0, 2, 4]),
        ("turns[-1]['content'] = '2'", [1, 3, 5]),
        ("weight_versions[1].version = 0 and prompt_length < reward", [3]),
        ("exists (from unnest(token_ids) as t(token) where token = 13)", [3]),
    ],
)
def test_a_condition_may_use_any_column(where: str, rows: list[int]) -> None:
    assert chosen(where, [0.0, 1.0, 0.1, 2.0, -1.0, None]) == rows and chosen(where, []) == []


def test_rows_are_those_that_meet_the_condition_among_those_asked_for_in_order() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=5000).astype(np.float32)
    whole = batch([None if n % 7 == 0 else reward for n, reward in enumerate(rewards.tolist())])
    positive = (rewards > 0) & (np.arange(5000) % 7 != 0)
    rows = np.flatnonzero(rng.random(5000) < 0.5)
    for wanted, asked in ((np.arange(5000), None), (rows, rows), (rows[:0], rows[:0])):
        found = Selection(SCHEMA, where="reward > 0").apply(whole, asked)
        assert found.equals(whole.take(pa.array(wanted[positive[wanted]])))
        assert found.schema.equals(SCHEMA, check_metadata=True)


BAD = [
    *("", " ", "-- reward > 1", "reward >"),
    *("reward", "null", "*", "'true'", "reward > 0.5, true", "reward > 0.5) or (true"),
    *("reward > 0.5 order by reward", "reward > 0.5 limit 1", "true from rows", "select 1", "select true"),
    *("true; drop table x", "copy (select 1) to 'out.csv'", "set threads = 2"),
    *("reward > 1 and rewards > 1", "stop_reason = stop", 'stop_reason = "stop"', "unknown(reward) > 1"),
    *("source > 1", "labels > 1", "labels = 'good'", "labels['quality'] > 1", "reward like '1%'", "reward ~ 1"),
    *("chosen = 'maybe'", "reward > 1 or uses = 'x'", "reward = $1", "reward = ?"),
    *("avg(reward) > 1", "reward > (select avg(reward))", "row_number() over () < 3", "unnest(token_ids) > 1"),
    "exists (from batch)",  # a variable of Python
    "regexp_matches(source, '(')",
]


@pytest.mark.parametrize("where", BAD)
def test_a_bad_condition_is_refused_before_a_row_is_read(where: str) -> None:
    with pytest.raises(DataError, check=about("where", where)) as caught:
        Selection(SCHEMA, where=where)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("where", "near"),
    [("rewards > 1", '"reward"'), ("label['quality'] = 'good'", '"labels"'), ("stop_reason = stop", "single quotes")],
)
def test_the_remedy_names_columns_of_a_like_name_and_how_text_is_quoted(where: str, near: str) -> None:
    with pytest.raises(DataError) as caught:
        Selection(SCHEMA, where=where)
    assert near in caught.value.remedy


@pytest.mark.parametrize("reads", ["(select content from read_text('{}')) = 'x'", "exists (from '{}')"])
def test_a_condition_cannot_read_files(tmp_path: Path, reads: str) -> None:
    (tmp_path / "secret.csv").write_text("x")
    where = reads.format(tmp_path / "secret.csv")
    with pytest.raises(DataError, check=about("where", where)):
        Selection(SCHEMA, where=where)


def test_a_condition_that_fails_on_a_value_names_it_and_an_unknown_column_is_refused() -> None:
    selection = Selection(SCHEMA, where="source::int > 1")
    with pytest.raises(DataError, match="usual", check=about("where", "source::int > 1")):
        selection.apply(batch([1.0]))
    with pytest.raises(DataError, match="token_ids", check=about("columns", "tokens_ids")):
        Selection(SCHEMA, ["reward", "tokens_ids"])


def test_threads_evaluate_conditions_at_once() -> None:
    selection = Selection(SCHEMA, where="token_ids[1] % 10 = 3")
    batches = [to_batch(expert_rows(rows)) for rows in range(1, 100)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(selection.apply, batches))
    assert [part.num_rows for part in found] == [(rows + 6) // 10 for rows in range(1, 100)]


def test_duckdb_is_not_loaded_before_a_condition_is_given() -> None:
    code = (
        "import rayrft, rayrft.cli.main, rayrft.cli.data, rayrft.buffer.dataset, rayrft.buffer.reader, sys\n"
        "rayrft.buffer.reader.Selection(rayrft.buffer.reader.ARCHIVE_SCHEMA, ['reward'])\n"
        "print('duckdb' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
