"""Rows of a live Buffer as Ray Datasets and back, on a real actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.dataset import dataset, load_dataset, newest
from rayrft.errors import DataError
from rayrft.experience import SCHEMA, Experience, from_batch, to_batch
from rayrft.runtime.handle import Handle, fetch
from tests.buffer.live import buffers, put
from tests.buffer.rows import expert_rows, group, plan, train_rows
from tests.errors import about
from tests.scripted import handle

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def filled(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle[Any]]:
    """A Buffer of two groups of five rows, the first of which finished last."""
    with buffers() as begin:
        actor = begin(tmp_path_factory.mktemp("filled"))
        for number, finished in ((1, 20.0), (2, 10.0)):
            put(actor, [replace(row, finished_at=finished + at) for at, row in enumerate(group(number, rows=5))])
        yield handle(actor)


def ids(made: Any) -> list[str]:
    return sorted(row["experience_id"] for row in made.take_all())


def rows_of(made: Any) -> list[Experience]:
    return [row for table in ray.get(made.to_arrow_refs()) for part in table.to_batches() for row in from_batch(part)]


def test_a_dataset_has_every_held_row_as_it_was_put_and_without_any_it_knows_its_columns(
    start: Callable[..., Any],
) -> None:
    buffer = start()
    made = dataset(handle(buffer))
    assert made.count() == 0 and newest(handle(buffer), 3) == []
    assert made.schema().base_schema.equals(SCHEMA)
    assert dataset(handle(buffer), columns=["reward", "labels"]).schema().names == ["reward", "labels"]
    assert list(dataset(handle(buffer), columns=["reward"]).to_pandas().columns) in (["reward"], [])
    rich = replace(
        group(3)[0],
        labels={"quality": "good"},
        reward_components={"format": 0.5},
        turns=({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}),
    )
    put(buffer, group(1), group(2), [rich.with_fields(labels={})])
    ray.get(buffer.feedback.remote("3/0", labels=rich.labels))  # its row is there once
    made = dataset(handle(buffer))
    assert ids(made) == ["1/0", "1/1", "2/0", "2/1", "3/0"]
    [found] = [row for row in rows_of(made) if row.experience_id == "3/0"]
    assert (found.labels, found.reward_components, found.turns) == (rich.labels, rich.reward_components, rich.turns)
    assert found.token_ids.tolist() == rich.token_ids.tolist() and found.weight_versions == rich.weight_versions


def test_what_happens_later_does_not_disturb_a_dataset(start: Callable[..., Any]) -> None:
    buffer = start(segment_bytes=4096, memory_bytes=1 << 20, log_bytes=1 << 20)
    put(buffer, *(group(number) for number in range(8)))
    made = dataset(handle(buffer))
    ray.get(buffer.feedback.remote("0/0", reward=9.0))
    ray.get(buffer.open_stage.remote(plan(8, scheduled=False)))
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get([buffer.ack.remote(0), buffer.cover.remote(1)])
    put(buffer, *(group(number, length=4000) for number in range(10, 40)))
    assert ids(made) == sorted(f"{number}/{row}" for number in range(8) for row in range(2))
    assert {row["reward"] for row in made.take_all()} == {0.0, 1.0}
    assert not {"0/0", "7/1"} & set(ids(dataset(handle(buffer), columns=["experience_id"])))


def test_columns_and_a_condition_on_a_column_that_is_not_selected(filled: Handle[Any]) -> None:
    made = dataset(filled, columns=["experience_id", "token_ids"], where="reward >= 3")
    assert made.schema().names == ["experience_id", "token_ids"]
    assert ids(made) == ["1/3", "1/4", "2/3", "2/4"]
    assert made.count() == 4
    assert dataset(filled, where="reward > 100").count() == 0


def test_rows_keep_their_order_under_a_condition(start: Callable[..., Any]) -> None:
    buffer = start()
    many = [replace(row, reward=float(n % 3)) for n, row in enumerate(group(1, rows=70_000, length=2))]
    put(buffer, many)
    kept = dataset(handle(buffer), columns=["experience_id"], where="reward = 1").to_pandas()
    assert kept["experience_id"].tolist() == [row.experience_id for row in many if row.reward == 1]


def test_what_cannot_be_read_is_refused_before_anything_is_read(filled: Handle[Any]) -> None:
    for asked, problem in (
        ({"store": "expert/gld"}, r"store: no such store \(found 'expert/gld'\).*usual"),
        ({"columns": ["tokens_ids"]}, r"columns: no such column \(found 'tokens_ids'\). Did you mean 'token_ids"),
        ({"where": "rewards > 1"}, r"where: not a valid condition: .*\(found 'rewards > 1'\).*\"reward\""),
    ):
        with pytest.raises(DataError, match=problem):
            dataset(filled, **asked)


def test_rows_can_be_looked_at_while_a_run_has_every_cpu(filled: Handle[Any]) -> None:
    everything = ray.util.placement_group([{"CPU": ray.available_resources()["CPU"]}])
    ray.get(everything.ready(), timeout=30)
    try:
        assert len(ids(dataset(filled))) == 10 and dataset(filled).count() == 10
        assert len(dataset(filled, where="reward = 1").to_pandas()) == 2
        assert load_dataset(filled, dataset(filled), "looked_at") == 10
        assert len(newest(filled, 5)) == 5
    finally:
        ray.util.remove_placement_group(everything)


def test_what_a_run_found_can_be_imitated(filled: Handle[Any]) -> None:
    assert load_dataset(filled, dataset(filled, where="reward >= 3"), "found") == 4
    fetch(filled.call(Buffer.open_stage, plan(0, expert_rows=4, demonstrations="found")))
    rows = train_rows(fetch(filled.call(Buffer.lease, 0, 1, 5)), "sft")
    assert sorted(int(row.token_ids[0]) for row in rows) == [13, 14, 23, 24]
    assert all(row.expert and not row.advantages.any() for row in rows)
    assert dataset(filled).count() == 10, "expert rows are a store of their own"
    found = rows_of(dataset(filled, "expert/found"))
    assert [row.source for row in found] == ["expert"] * 4
    assert all(row.reward in (3.0, 4.0) and row.weight_versions for row in found), "where they came from is kept"


def test_loaded_rows_keep_the_order_of_the_dataset(filled: Handle[Any]) -> None:
    rows = expert_rows(64)
    tables = [pa.Table.from_batches([to_batch([row])]) for row in rows]
    assert load_dataset(filled, ray.data.from_arrow(tables).map_batches(lambda batch: batch), "gold") == 64
    kept = rows_of(dataset(filled, "expert/gold"))
    assert [row.experience_id for row in kept] == [row.experience_id for row in rows]


def test_rows_come_back_whole_from_what_ray_data_does_with_them(filled: Handle[Any]) -> None:
    turns = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})
    rich = {"turns": turns, "labels": {"a": "b"}, "metrics": {"m": 0.5}, "reward": 1.0, "pair_id": "p"}
    given = [replace(row, **rich, chosen=at == 0) for at, row in enumerate(group(1))]
    assert load_dataset(filled, pa.Table.from_batches([to_batch(given)]), "given") == 2
    functions: dict[str, Callable[[Any], Any]] = {
        "map": lambda made: made.map(lambda row: row),
        "filter": lambda made: made.filter(lambda row: row["reward"] > 0),
        "pandas": lambda made: made.map_batches(lambda batch: batch, batch_format="pandas"),
        "numpy": lambda made: made.map_batches(lambda batch: batch, batch_format="numpy"),
        "another-column": lambda made: made.add_column("mine", lambda batch: batch["reward"]),
    }
    for function, call in functions.items():
        assert load_dataset(filled, call(dataset(filled, "expert/given")), function) == 2
        for before, after in zip(given, rows_of(dataset(filled, f"expert/{function}")), strict=True):
            for name, value in vars(replace(before, source="expert")).items():
                assert np.array_equal(getattr(after, name), value), (function, name)


def test_rows_that_cannot_be_experiences_are_refused_and_so_is_a_name_that_is_no_file_name(filled: Handle[Any]) -> None:
    table = pa.Table.from_batches([to_batch(expert_rows(2))])

    def with_column(name: str, values: list[Any]) -> pa.Table:
        return table.set_column(table.schema.get_field_index(name), name, pa.array(values))

    for broken, problem in (
        (with_column("token_ids", ["a", "b"]), "not experiences"),
        (with_column("token_ids", [[1, None, 2, 3], [1, 2, 3, 4]]), "'token_ids' has missing values"),
        (with_column("group_id", [None, "90"]), "'group_id' has missing values"),
        (with_column("prompt_length", [4, 1]), "row 0 is invalid: empty prompt or answer"),
        (table.slice(0, 0), "there are no rows"),
        (dataset(filled, columns=["experience_id", "group_id", "task_id"]), ""),
    ):
        with pytest.raises(DataError, match=rf"demonstrations\.bad: .*{problem}"):
            load_dataset(filled, broken, "bad")
    for name in ("../journal", "a/b", "", ".hidden"):
        with pytest.raises(DataError, check=about("name")):
            load_dataset(filled, table, name)
    assert "bad" not in fetch(filled.call(Buffer.stats)).expert


def test_the_newest_rows_are_those_that_finished_last(filled: Handle[Any]) -> None:
    assert [row.experience_id for row in newest(filled, 6)] == ["1/4", "1/3", "1/2", "1/1", "1/0", "2/4"]
    assert len(newest(filled, 100)) == 10
    assert newest(filled, 0) == []
