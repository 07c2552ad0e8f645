"""Operators as users write them: good ones, and such as raise, hang or return what they may not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

import rayrft
from rayrft.pipelines import Applied, Operator
from rayrft.pipelines.run.models import RemoteChat
from rayrft.pipelines.subjects import AskingOperator


@rayrft.register_operator("shout", "clean", version="3")
def shout(question: str, mark: str = "!") -> str:
    return question.upper() + mark


@rayrft.register_operator("brief", "filter")
def brief(question: str, limit: int = 10) -> bool | str:
    return len(question) <= limit or f"too long: {len(question)}"


@rayrft.register_operator("vowels", "prioritise")
def vowels(question: str) -> float:
    return sum(letter in "aeiou" for letter in question)


@rayrft.register_operator("mirror", "synthesise")
def mirror(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"question": question[::-1]}] if question != answer else []


@rayrft.register_operator("copies")
class Copies(Operator[Any]):
    kind = "clean"

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(pa.RecordBatch.from_pylist(rows.to_pylist(), schema=rows.schema))


@rayrft.register_operator("size", "clean", writes={"size": pa.int32()})
def size(question: str) -> int:
    return len(question)


@rayrft.register_operator("praise", "clean", writes={"answer": pa.string()})
def praise(answer: Any) -> str:
    return f"{answer}!"


@rayrft.register_operator("writes_no_json")
class WritesNoJson(Operator[Any]):
    kind = "clean"

    def apply(self, rows: pa.RecordBatch) -> Applied:
        values = rows.column("answer").to_pylist()
        new = pa.array([*values[:3], "no JSON", *values[4:]], pa.string())
        return Applied(rows.set_column(rows.schema.get_field_index("answer"), rows.schema.field("answer"), new))


@rayrft.register_operator("raises", "clean")
def raises(question: str) -> str:
    if question == "bad":
        raise KeyError("no such thing")
    return question


@rayrft.register_operator("hangs", "filter")
def hangs(question: str) -> bool:
    while question == "bad":
        time.sleep(3600)
    return True


@rayrft.register_operator("dies", "filter")
def dies(question: str) -> bool:
    if question == "bad":
        os._exit(7)
    return True


@rayrft.register_operator("echo", "synthesise")
def echo(question: str) -> list[dict[str, Any]]:
    return [{"question": f"{question} {question}"}]


@rayrft.register_operator("other_ids", "clean")
def other_ids(id: str) -> str:
    return f"other {id}"


WRONG: dict[str, Callable[[pa.RecordBatch], Any]] = {
    "loses_rows": lambda rows: Applied(rows.slice(1)),
    "loses_columns": lambda rows: Applied(rows.drop_columns(["question"])),
    "adds_columns": lambda rows: Applied(rows.append_column("extra", pa.nulls(rows.num_rows))),
    "changes_types": lambda rows: Applied(rows.set_column(1, "question", pa.array(range(rows.num_rows)))),
    "few_reasons": lambda rows: Applied(rows, ["gone"]),
    "true_reasons": lambda rows: Applied(rows, [True] * rows.num_rows),  # type: ignore[list-item]
    "no_notes": lambda rows: Applied(rows, notes=[None]),  # type: ignore[list-item]
    "makes_rows": lambda rows: Applied(rows, made=rows.slice(0, 1), parents=[(0,)]),
    "no_parents": lambda rows: Applied(rows, made=rows.slice(0, 1)),
    "returns_rows": lambda rows: rows,
}
"""What operators return by mistake, by their names."""
for name, wrong in WRONG.items():
    kind = "synthesise" if name == "no_parents" else "clean"
    members = {"kind": kind, "apply": lambda self, rows, wrong=wrong: wrong(rows)}
    rayrft.register_operator(name)(type(name, (Operator,), members))


@rayrft.register_operator("cannot_prepare")
class CannotPrepare(Copies):
    def prepare(self) -> None:
        raise OSError("no such model")


@rayrft.register_operator("asks_and_hangs")
class AsksAndHangs(AskingOperator[Any]):
    kind = "clean"

    @property
    def asks(self) -> dict[str, str]:
        return {"model": "judge"}

    async def work(self, rows: pa.RecordBatch) -> Applied:
        await RemoteChat("judge").chat([{"role": "user", "content": "shall I hang?"}])
        while True:
            pass
