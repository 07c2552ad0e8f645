"""Operators on experiences as users write them: good ones, and such as raise, hang, die or return what they may not."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

import rayrft
from rayrft.pipelines import Applied, Operator
from rayrft.pipelines.operator import with_column
from rayrft.pipelines.run.models import RemoteModels
from rayrft.pipelines.subjects import AskingOperator, scored


@rayrft.register_operator("worth", "filter")
def worth(reward: float, least: float = 0.5) -> bool | str:
    return reward >= least or f"too low: {reward}"


@rayrft.register_operator("heavy", "filter")
def heavy(reward: float, device: str = "auto") -> bool:
    return device != "cuda"


@rayrft.register_operator("asked", "filter")
def asked(question: str, answer: str, domain: str, difficulty: float | None) -> bool | str:
    return f"{question}, {answer}, {domain}, {difficulty}".replace(": ", " ")


@rayrft.register_operator("bonus", "clean", writes={"reward": pa.float32()})
def bonus(reward: float, more: float = 0.25) -> float:
    return reward + more


@rayrft.register_operator("by_reward", "prioritise")
def by_reward(reward: float) -> float:
    return 1.0 + reward


@rayrft.register_operator("raises_on_wrong", "filter")
def raises_on_wrong(reward: float) -> bool:
    if not reward:
        raise LookupError("no such thing")
    return True


@rayrft.register_operator("hangs_here", "filter")
def hangs_here(reward: float) -> bool:
    while True:
        time.sleep(3600)


@rayrft.register_operator("dies_of", "filter")
def dies_of(reward: float, worth: float = 7.25) -> bool:
    if reward == worth:
        os._exit(7)
    return True


class _Any(Operator[Any]):
    kind = "clean"


@rayrft.register_operator("says_other_tokens")
class SaysOtherTokens(_Any):
    @property
    def writes(self) -> Mapping[str, pa.DataType]:
        return {"token_ids": pa.list_(pa.int32())}


@rayrft.register_operator("gives_other_tokens")
class GivesOtherTokens(_Any):
    def apply(self, rows: pa.RecordBatch) -> Applied:
        other = pa.array([[1, 2, 3]] * rows.num_rows, pa.list_(pa.int32()))
        return Applied(with_column(rows, "token_ids", other))


@rayrft.register_operator("turns_around")
class TurnsAround(_Any):
    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows.take(pa.array(range(rows.num_rows - 1, -1, -1))))


@rayrft.register_operator("makes_sampled_rows", "synthesise")
def makes_sampled_rows(reward: float) -> list[dict[str, Any]]:
    return [{"reward": 1.0}]


class _Scores(AskingOperator[Any]):
    kind = "clean"


@rayrft.register_operator("scored_again")
class ScoredAgain(_Scores):
    """Has the answers scored once more, as other ones, and takes that."""

    scores = True  # type: ignore[assignment]

    @property
    def writes(self) -> Mapping[str, pa.DataType]:
        return {"reward": pa.float32()}

    async def work(self, rows: pa.RecordBatch) -> Applied:
        [task] = RemoteModels(None).tasks(rows.column("task_id").to_pylist()[:1]).values()
        results = await scored(task, rows.column("response").to_pylist())
        values = pa.array([each.value for each in results], pa.float32())
        return Applied(with_column(rows, "reward", values))
