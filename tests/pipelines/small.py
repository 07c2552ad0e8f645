"""Small batches, and operators applied to them in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrft.config.pipelines import OperatorConfig
from rayrft.pipelines import Context
from rayrft.pipelines.chain import Outcome, apply_link, build_chain
from rayrft.pipelines.rows import Ids

OWN = Path(__file__).with_name("own.py")


def rows(**columns: list[Any]) -> pa.RecordBatch:
    """A batch with ids."""
    return Ids().add(pa.RecordBatch.from_pydict(columns))


def operator(name: str, **options: Any) -> OperatorConfig:
    return OperatorConfig(name=name, **options)


def applied(
    name: str, batch: pa.RecordBatch, *, context: Context | None = None, **options: Any
) -> tuple[list[dict[str, Any]], Outcome]:
    """What one operator makes of a batch, which holds all rows there are."""
    [link] = build_chain(
        [operator(name, **options)], batch.schema, field="operators", origin="test", context=context or Context()
    )
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
