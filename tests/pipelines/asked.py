"""Operators that ask, in their process, and models that answer here."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrft.config.reward import RewardModelsConfig
from rayrft.experience import Task
from rayrft.pipelines import Context
from rayrft.pipelines.report import OperatorReport
from rayrft.pipelines.run.models import AskedModel, open_models
from rayrft.pipelines.run.process import Pipeline
from rayrft.rewards import Reward, RewardResult, inline, register_reward
from tests.pipelines.small import operator


@register_reward("last_number")
@inline
def last_number() -> Reward:
    """1 if the last number of a response is that of the answer: scored in this process, for that costs nothing."""

    def score(task: Task, response: str) -> RewardResult:
        found = re.findall(r"\d+", response)
        if "unscorable" in response:
            raise ValueError("cannot be scored")
        return RewardResult(float(found[-1:] == [task.answer]), reason="another number", answer=(found or [None])[-1])

    return score


def ran(
    name: str,
    batch: pa.RecordBatch,
    models: Mapping[str, Any],
    *,
    reward: str = "last_number",
    tasks: Mapping[str, Task] | None = None,
    tokenizer: str | None = None,
    calls: int = 256,
    settings: dict[str, Any] | None = None,
    batch_rows: int = 1000,
    deadline_s: float = 60.0,
    plugins: Sequence[Path] = (),
    **options: Any,
) -> tuple[list[dict[str, Any]], OperatorReport, list[tuple[str, str]]]:
    """What comes out, the report, and which rows were left out why. ``settings`` are those of `open_models`."""

    @asynccontextmanager
    async def engines(names: Collection[str]) -> AsyncIterator[Mapping[str, AskedModel]]:
        yield {name: AskedModel(models[name], calls) for name in names}

    given: dict[str, Any] = {"engines": engines, "endpoints": {}, "tasks": (tasks or {}).get, **(settings or {})}
    opened = partial(open_models, reward=RewardModelsConfig(name=reward), **given)
    context = Context(tokenizer=tokenizer, models={*models, *given["endpoints"]}, scores=True)
    pipeline = Pipeline(
        [operator(name, **options)],
        batch.schema,
        context=context,
        plugins=plugins,
        batch_rows=batch_rows,
        deadline_s=deadline_s,
    )
    found, gone = list[dict[str, Any]](), list[tuple[str, str]]()
    parts = [batch.slice(start, batch_rows) for start in range(0, batch.num_rows, batch_rows)]
    report = pipeline.run(
        parts,
        lambda rows: found.extend(rows.to_pylist(maps_as_pydicts="lossy")),
        left_out=lambda operator, rows: gone.extend((each.row, each.reason) for each in rows),
        models=opened,
    )
    return found, report[0], gone
