"""Expert data from every kind of file: the same rows, masks on the assistant only, and no row lost without a count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrft.buffer.events import Extent
from rayrft.buffer.expert_cursor import ExpertCursor
from rayrft.config import load_config
from rayrft.config.demonstrations import DemonstrationsConfig, RowFormat
from rayrft.data.demonstrations import RowEncoder, from_dataset, from_source, from_tasks, hold_out
from rayrft.data.inputs import load_demonstrations
from rayrft.data.task_splits import TaskSplits
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError
from rayrft.experience import Experience, Task, from_batch, to_batch
from tests.config.given import base
from tests.data import expert_data
from tests.data.expert_data import MULTI_TURN, SHAPES, Rows, described, fetched, jsonl, load, spoken
from tests.errors import about


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("write", [expert_data.parquet, expert_data.parquet_folder, expert_data.saved_dataset])
def test_every_kind_of_file_gives_the_same_rows(
    tokenizer: ChatTokenizer, tmp_path: Path, write: Callable[[Rows, Path], Path], shape: str
) -> None:
    expected, _ = load(jsonl(SHAPES[shape], tmp_path), tokenizer)
    rows, left_out = load(write(SHAPES[shape], tmp_path), tokenizer)
    assert described(rows) == described(expected) and rows
    assert len(left_out) == 0


def test_what_was_read_is_told_before_the_run(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}", "response": "it is" if i < 1200 else "it is " * 30} for i in range(2500)]
    gold = {"path": jsonl(rows, tmp_path), "prompt": "prompt"}
    config = load_config(base(), {"demonstrations": {"expert": gold}, "model.max_length": 64})
    demonstrations, notices = load_demonstrations(config, TaskSplits([], [], [], {}), tokenizer)
    assert len(demonstrations["expert"]) == 1200
    assert notices == [
        "demonstrations 'expert': 2,500 rows, prompt and response: prompt → prompt, response → response",
        "demonstrations 'expert': 1,300 left out as too long",
    ]


def test_the_mask_of_a_conversation_holds_all_turns_of_the_assistant(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    [row], _ = load(jsonl([{"messages": MULTI_TURN}], tmp_path), tokenizer)
    assert spoken(tokenizer, row) == "2<|eos|>3<|eos|>"
    assert row.action_mask[: row.prompt_length].sum() == 0 and row.action_mask[row.prompt_length] == 1
    assert row.turns == tuple(MULTI_TURN)


def test_a_preference_pair_is_two_rows_of_one_group(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    rows, _ = load(jsonl(SHAPES["preferences"][:1], tmp_path), tokenizer)
    assert [(row.experience_id, row.group_id, row.pair_id, row.chosen) for row in rows] == [
        ("gold/1/chosen", "gold/1", "gold/1", True),
        ("gold/1/rejected", "gold/1", "gold/1", False),
    ]
    assert [spoken(tokenizer, row) for row in rows] == ["yes 0<|eos|>", "no 0<|eos|>"]
    chosen, rejected = rows
    assert chosen.token_ids[: chosen.prompt_length].tolist() == rejected.token_ids[: rejected.prompt_length].tolist()


def test_a_pair_may_say_by_how_much_its_chosen_side_is_better(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    pairs = [{**SHAPES["preferences"][0], **extra} for extra in ({"margin": 1.5}, {"margin": -1}, {"margin": None}, {})]
    rows, _ = load(jsonl(pairs, tmp_path), tokenizer)
    assert [row.margin for row in rows] == [1.5, 1.5, -1.0, -1.0, None, None, None, None]
    assert [row.margin for row in from_batch(to_batch(rows))] == [row.margin for row in rows]
    [single], _ = load(jsonl([{"prompt": "p", "response": "r", "margin": "wide"}], tmp_path), tokenizer)
    assert single.margin is None, "of no pair it means something else"


def test_answers_have_labels_where_a_stage_needs_them(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """As TRL's data sets of unpaired preferences have them."""
    chat = [{"role": "user", "content": "one"}]
    rated: Rows = [
        {"prompt": "one", "completion": "two", "label": True},
        {"prompt": chat, "completion": [{"role": "assistant", "content": "six"}], "label": False},
    ]
    path = jsonl(rated, tmp_path)
    encoder = RowEncoder("gold", DemonstrationsConfig(path=path, response="completion"), tokenizer, 64, labelled=True)
    rows, _ = from_source(encoder)
    found = [(row.experience_id, row.pair_id, row.chosen) for row in rows]
    assert found == [("gold/1", None, True), ("gold/2", None, False)]
    described(rows)
    unlabelled, _ = load(path, tokenizer, response="completion")
    assert [row.chosen for row in unlabelled] == [None, None]
    for label in (None, 1, "good"):
        jsonl([{**rated[0], "label": label}], tmp_path)
        with pytest.raises(DataError, match="needs true or false in 'label'"):
            from_source(encoder)


def test_a_side_that_holds_its_own_prompt_is_not_given_it_twice(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    question, answer = MULTI_TURN[1], MULTI_TURN[2]
    wrong = {"role": "assistant", "content": "3"}
    ways: Rows = [
        {"prompt": question["content"], "chosen": [question, answer], "rejected": [question, wrong]},
        {"prompt": question["content"], "chosen": [answer], "rejected": [wrong]},
        {"prompt": [question], "chosen": [answer], "rejected": "3"},
        {"chosen": [question, answer], "rejected": [question, wrong]},
    ]
    rows, _ = load(jsonl(ways, tmp_path), tokenizer)
    assert len({tuple(row.token_ids) for row in rows if row.chosen}) == 1
    assert len({tuple(row.token_ids) for row in rows if not row.chosen}) == 1


def test_fields_go_by_the_names_that_the_config_gives(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    rows: Rows = [{"q": "one", "a": "two"}, {"chat": MULTI_TURN}, {"q": "one", "good": "two", "bad": "three"}]
    names = {"prompt": "q", "response": "a", "messages": "chat", "chosen": "good", "rejected": "bad"}
    made, _ = load(jsonl(rows, tmp_path), tokenizer, **names)
    assert [row.experience_id for row in made] == ["gold/1", "gold/2", "gold/3/chosen", "gold/3/rejected"]


MIXED: Rows = [
    {"prompt": "held out?", "response": "yes"},
    {"prompt": "fine", "response": "yes"},
    {"messages": [*MULTI_TURN[1:4], {"role": "assistant", "content": "x" * 60}]},
    {"prompt": "broken"},
    {"messages": [*MULTI_TURN[1:3], {"role": "user", "content": "held out?"}, MULTI_TURN[4]]},
    {"prompt": "fine", "chosen": "a", "rejected": "b" * 80},
    {"prompt": "fine", "chosen": "a", "rejected": "b"},
    {"prompt": "fine", "response": "again"},
    {"messages": MULTI_TURN[1:3]},
]


def test_held_out_and_too_long_rows_are_left_out_and_counted(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    rows, left_out = load(jsonl(MIXED, tmp_path), tokenizer, held_out={"held out?"}, on_broken="skip")
    assert [row.experience_id for row in rows] == ["gold/2", "gold/7/chosen", "gold/7/rejected", "gold/8", "gold/9"]
    assert left_out.excluded == {1: "held-out question", 3: "too long", 5: "held-out question", 6: "too long"}
    assert left_out.counts == {"held-out question": 2, "too long": 2, "broken (lines 4)": 1}
    described(rows)


def test_a_row_of_exactly_the_greatest_length_is_taken(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path = jsonl(SHAPES["pairs of texts"][:1], tmp_path)
    [row], _ = load(path, tokenizer)
    assert load(path, tokenizer, max_length=len(row.token_ids))[0]
    with pytest.raises(DataError, match=r"no usable row \(left out: \{'too long': 1\}\)"):
        load(path, tokenizer, max_length=len(row.token_ids) - 1)


def test_size_counts_usable_rows_and_never_parts_a_pair(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    rows, _ = load(jsonl(MIXED, tmp_path), tokenizer, held_out={"held out?"}, on_broken="skip", size=2)
    assert [row.experience_id for row in rows] == ["gold/2", "gold/7/chosen", "gold/7/rejected"]


class Gate:
    """Lets nobody pass before it is open."""

    def __init__(self) -> None:
        self._open = asyncio.Event()

    async def passed(self) -> None:
        await self._open.wait()

    async def open(self) -> None:
        self._open.set()


@pytest.mark.usefixtures("ray_cluster")
class TestRayDataset:
    def test_it_gives_the_rows_of_a_file_and_what_is_left_out_is_known_by_number(
        self, tokenizer: ChatTokenizer, tmp_path: Path
    ) -> None:
        import ray.data

        skip = RowFormat(on_broken="skip", size=2)
        dataset = ray.data.from_items(MIXED, override_num_blocks=3)
        rows, left_out = from_dataset(dataset, RowEncoder("gold", skip, tokenizer, 64, {"held out?"}))
        config = DemonstrationsConfig(path=jsonl(MIXED, tmp_path), on_broken="skip", size=2)
        expected, expected_left_out = from_source(RowEncoder("gold", config, tokenizer, 64, {"held out?"}))
        assert left_out == expected_left_out
        assert described(fetched(rows)) == described(expected)

    def test_values_of_several_types_are_those_of_a_file(self, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
        import ray.data

        parts = [{"type": "text", "text": "1 + 1?"}]
        rows: Rows = [{"messages": [{**MULTI_TURN[1], "content": parts}, *MULTI_TURN[2:]]}, {"messages": MULTI_TURN}]
        path = jsonl(rows, tmp_path)
        data = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        dataset = ray.data.from_arrow(data.with_format("arrow")[:])
        made, _ = from_dataset(dataset, RowEncoder("gold", RowFormat(), tokenizer, 64))
        assert described(fetched(made)) == described(load(path, tokenizer)[0])

    def test_numbers_follow_the_files_though_the_first_block_finishes_last(
        self, tokenizer: ChatTokenizer, tmp_path: Path
    ) -> None:
        import ray.data

        rows = [{"prompt": f"say {i}", "response": "" if i % 10 == 3 else f"{i}"} for i in range(40)]
        for part, (start, end) in enumerate([(0, 1), (1, 26), (26, 28), (28, 40)]):
            pq.write_table(pa.Table.from_pylist(rows[start:end]), tmp_path / f"{part}.parquet")
        gate = ray.remote(Gate).options(num_cpus=0).remote()

        def first_last(table: pa.Table) -> pa.Table:
            prompts = table.column("prompt").to_pylist()
            if "say 0" in prompts:
                ray.get(gate.passed.remote(), timeout=60)
            elif "say 39" in prompts:
                gate.open.remote()
            return table

        ray.data.DataContext.get_current().use_datasource_v2 = False
        dataset = ray.data.read_parquet(str(tmp_path), override_num_blocks=4)
        dataset = dataset.map_batches(first_last, batch_format="pyarrow", batch_size=None)
        made, left_out = from_dataset(dataset, RowEncoder("gold", RowFormat(on_broken="skip"), tokenizer, 64))
        assert list(left_out.broken) == [4, 14, 24, 34]
        said = [(row.experience_id, spoken(tokenizer, row)) for row in fetched(made)]
        assert said == [(f"gold/{i + 1}", f"{i}<|eos|>") for i in range(40) if i % 10 != 3]
        assert dataset.context.execution_options.preserve_order is False, "the caller's options were changed"

    def test_broken_rows_are_refused_with_their_numbers_and_so_is_no_row(self, tokenizer: ChatTokenizer) -> None:
        import ray.data

        broken = r"demonstrations\.gold: 1 broken rows of 9: line 4: no known layout"
        with pytest.raises(DataError, match=broken):
            from_dataset(ray.data.from_items(MIXED), RowEncoder("gold", RowFormat(), tokenizer, 64))
        with pytest.raises(DataError, check=about("demonstrations.gold")):
            from_dataset(ray.data.from_items(MIXED).limit(0), RowEncoder("gold", RowFormat(), tokenizer, 64))


def some_pairs(prompts: list[str]) -> list[Experience]:
    """A pair of answers to each prompt, the chosen one first."""
    return [
        Experience(
            f"gold/{number}/{side}", f"gold/{number}", "t", np.arange(3, dtype=np.int32), 1, np.ones(3, np.uint8),
            np.zeros(3, np.float32), source="expert", pair_id=f"gold/{number}", chosen=side == "chosen",
            turns=({"role": "user", "content": prompt}, {"role": "assistant", "content": f"{number} {side}"}),
        )
        for number, prompt in enumerate(prompts)
        for side in ("chosen", "rejected")
    ]  # fmt: skip


@pytest.mark.parametrize(("wanted", "held"), [(0.25, 3), (0.2, 3), (1, 1), (5, 5)])
def test_pairs_are_held_out_by_share_or_number_and_the_same_ones_every_time(wanted: float, held: int) -> None:
    rows = some_pairs([f"question {number}" for number in range(12)])
    kept, out = hold_out("gold", rows, wanted, seed=3)
    assert len(out) == 2 * held and len(kept) == 24 - 2 * held
    names = [row.experience_id for row in rows]
    assert sorted(map(id, kept + out)) == sorted(map(id, rows))
    for part in (kept, out):
        assert [row.chosen for row in part] == [True, False] * (len(part) // 2)
        assert part == sorted(part, key=lambda row: names.index(row.experience_id)), "in their order"
    assert hold_out("gold", rows, wanted, seed=3) == (kept, out)
    assert any(hold_out("gold", rows, wanted, seed=seed)[1] != out for seed in range(4, 8))


def test_all_pairs_of_a_prompt_are_held_out_or_none() -> None:
    rows = some_pairs(["a", "b", "c"] * 4)
    for seed in range(5):
        kept, out = hold_out("gold", rows, 2, seed)
        one, other = ({row.turns[0]["content"] for row in part} for part in (kept, out))
        assert len(out) == 8 and not one & other


@pytest.mark.parametrize(("prompts", "wanted"), [(["a", "b"], 2), (["a", "a"], 1), (["a", "b"], 9)])
def test_holding_out_all_pairs_is_refused(prompts: list[str], wanted: float) -> None:
    with pytest.raises(DataError, match="leaves 0 of 2 pairs", check=about("demonstrations.gold.held_out")):
        hold_out("gold", some_pairs(prompts), wanted, seed=0)


def test_rows_that_are_no_pairs_cannot_be_held_out() -> None:
    rows = some_pairs(["a", "b"])
    for wrong in (rows[:3], [*rows[:2], replace(rows[2], pair_id=None), replace(rows[3], pair_id=None)], rows[1:3]):
        with pytest.raises(DataError, match="not preference pairs", check=about("demonstrations.gold.held_out")):
            hold_out("gold", wrong, 1, seed=0)


@pytest.mark.parametrize("seed", range(3))
def test_wrong_demonstrations_are_spread_over_every_epoch(tokenizer: ChatTokenizer, seed: int) -> None:
    """An order that is drawn from the same random numbers as the wrong ones shows all of these first."""
    tasks = [Task(str(n), f"say {n}", answer="right", metadata={"word": "wrong"}) for n in range(400)]
    config = DemonstrationsConfig(size=400, wrong_share=0.5, wrong_field="word")
    rows = from_tasks("warmup", tasks, config, tokenizer, seed)
    cursor = ExpertCursor(Extent(0, len(rows)), seed)
    for epoch in range(4):
        half = [rows[index].turns[-1]["content"] for index in cursor.peek(200)]
        assert 70 <= half.count("wrong") <= 130, f"of the 200 wrong ones, in the first half of epoch {epoch}"
        cursor.advance(400)
