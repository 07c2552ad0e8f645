"""Small batches and files, and operators applied to them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

import rayrft
from rayrft.config import PipelineConfig
from rayrft.config.pipelines import OperatorConfig
from rayrft.data.tables import open_table
from rayrft.experience import SCHEMA, Experience, from_batch, to_batch
from rayrft.pipelines import Context
from rayrft.pipelines.chain import ChainLink, Outcome, apply_link, build_chain
from rayrft.pipelines.files import ProcessingResult, process
from rayrft.pipelines.rows import Ids
from tests.buffer.rows import group

OWN = Path(__file__).with_name("own.py")


def rows(**columns: list[Any]) -> pa.RecordBatch:
    """A batch with ids."""
    return Ids().add(pa.RecordBatch.from_pydict(columns))


def operator(name: str, **options: Any) -> OperatorConfig:
    return OperatorConfig(name=name, **options)


@rayrft.register_operator("whisper", "clean")
def whisper(question: str) -> str:
    return question.lower()


def linked(batch: pa.RecordBatch, *configs: OperatorConfig, context: Context | None = None) -> list[ChainLink]:
    """Operators for rows such as these."""
    return build_chain(configs, batch.schema, field="operators", origin="test", context=context or Context())


def applied(
    name: str, batch: pa.RecordBatch, *, context: Context | None = None, **options: Any
) -> tuple[list[dict[str, Any]], Outcome]:
    """What one operator makes of a batch, which holds all rows there are."""
    [link] = linked(batch, operator(name, **options), context=context)
    link.operator.prepare()
    link.operator.observe(batch) if link.operator.scope == "all" else None
    link.operator.settle()
    after, outcome = apply_link(link, batch, 3)
    return after.to_pylist(maps_as_pydicts="lossy"), outcome


def texts(name: str, given: list[str | None], *, column: str = "question", **options: Any) -> list[str | None]:
    """What an operator on texts makes of them."""
    found, _ = applied(name, rows(**{column: given}), **options)
    return [row[column] for row in found]


def reasons(outcome: Outcome) -> list[str]:
    return [gone.reason for gone in outcome.left_out]


def left_out(done: ProcessingResult) -> Counter[str]:
    """Rows that operators left out, as ``operator: reason``."""
    named = [(each.name, each.reasons) for each in done.reports]
    return Counter({f"{name}: {reason}": count for name, reasons in named for reason, count in reasons.items()})


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def processed(files: list[Path], out: Path, *operators: dict[str, Any], **settings: Any) -> ProcessingResult:
    """What a pipeline writes of files to ``out``; a file beside it has the rows that are left out."""
    config = PipelineConfig.model_validate({"operators": operators, "plugins": [str(OWN)], **settings})
    return process([open_table(file) for file in files], config, out, left_out=out.with_name("left_out.jsonl"))


def run(
    given: list[Any], folder: Path, operators: list[dict[str, Any]], **settings: Any
) -> tuple[list[dict[str, Any]], ProcessingResult]:
    """The rows that come out, and the report."""
    done = processed([write(folder / "in.jsonl", given)], out := folder / "out.jsonl", *operators, **settings)
    return read(out), done


def experiences(*rewards: list[float | None]) -> pa.RecordBatch:
    """Groups with these rewards; row r of a group has r + 2 tokens."""
    made = []
    for number, values in enumerate(rewards):
        for index, reward in enumerate(values):
            [row] = group(number, 1, length=index + 2)
            made.append(row.with_fields(experience_id=f"{number}/{index}", reward=reward, labels={"quality": "good"}))
    return to_batch(made)


def experience_of(row: dict[str, Any]) -> Experience:
    maps = {field.name: list((row[field.name] or {}).items()) for field in SCHEMA if pa.types.is_map(field.type)}
    turns = [list(turn.items()) for turn in row["turns"] or ()]
    table = pa.Table.from_pylist([{**row, **maps, "turns": turns}], schema=SCHEMA)
    return from_batch(table.to_batches()[0])[0]
