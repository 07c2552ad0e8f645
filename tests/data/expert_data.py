"""Expert data for tests: every shape of row, written to every kind of file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrft.buffer.validation import find_faults
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.data.demonstrations import RowEncoder, from_source
from rayrft.data.formats import SkippedRows
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import SCHEMA, Experience, from_batch, to_batch

Rows = list[dict[str, Any]]
MULTI_TURN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 1 more?"},
    {"role": "assistant", "content": "3"},
]
SHAPES: dict[str, Rows] = {
    "pairs of texts": [{"prompt": f"say {i}", "response": f"it is {i}"} for i in range(7)],
    "messages": [{"messages": MULTI_TURN}, {"messages": MULTI_TURN[1:3]}] * 3,
    "preferences": [{"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(5)],
    "preferences of messages": [
        {"chosen": MULTI_TURN, "rejected": [*MULTI_TURN[:-1], {"role": "assistant", "content": "4"}]}
    ],
}


def jsonl(rows: Rows, folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(rows: Rows, folder: Path) -> Path:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def parquet_folder(rows: Rows, folder: Path) -> Path:
    path = folder / "parts"
    path.mkdir()
    table, half = pa.Table.from_pylist(rows), len(rows) // 2
    pq.write_table(table.slice(half), path / "part-1.parquet")
    pq.write_table(table.slice(0, half), path / "part-0.parquet")
    return path


def saved_dataset(rows: Rows, folder: Path) -> Path:
    """What ``datasets.Dataset.save_to_disk`` writes."""
    path = folder / "saved"
    path.mkdir()
    table, half = pa.Table.from_pylist(rows), len(rows) // 2
    # Named against the order in which state.json lists them: the list counts.
    parts = {"b.arrow": table.slice(0, half), "a.arrow": table.slice(half)}
    for name, part in parts.items():
        with pa.OSFile(str(path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(part)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in parts]}))
    (path / "dataset_info.json").write_text("{}")
    return path


def load(path: Path, tokenizer: ChatTokenizer, **options: Any) -> tuple[list[Experience], SkippedRows]:
    held_out, max_length = options.pop("held_out", set()), options.pop("max_length", 64)
    config = DemonstrationsConfig(path=path, **options)
    return from_source(RowEncoder("gold", config, tokenizer, max_length, held_out))


def described(rows: list[Experience]) -> list[tuple[Any, ...]]:
    """Everything that training sees of the rows; none of them is faulty."""
    assert find_faults(to_batch(rows)) == {}
    return [
        (
            *(row.experience_id, row.group_id, row.pair_id, row.chosen, row.source, row.turns),
            *(row.token_ids.tolist(), row.action_mask.tolist(), row.prompt_length),
        )
        for row in rows
    ]


def spoken(tokenizer: ChatTokenizer, row: Experience) -> str:
    return str(tokenizer.hf.decode(row.token_ids[row.action_mask == 1].tolist(), skip_special_tokens=False))


def fetched(dataset: Any) -> list[Experience]:
    import ray

    tables = [table for table in ray.get(dataset.to_arrow_refs()) if len(table)]
    assert all(table.schema.equals(SCHEMA) for table in tables)
    return [row for table in tables for batch in table.to_batches() for row in from_batch(batch)]
