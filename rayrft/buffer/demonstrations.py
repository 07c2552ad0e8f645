"""Expert rows: demonstrations as experiences, from files or from the answers of tasks set apart for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rayrft.buffer.experience import Experience, Task
from rayrft.buffer.tokens import ChatTokenizer
from rayrft.config.data import DemonstrationsConfig
from rayrft.errors import DataError


def from_tasks(
    name: str, tasks: list[Task], config: DemonstrationsConfig, tokenizer: ChatTokenizer, seed: int
) -> list[Experience]:
    """One demonstration per task. The first ``wrong_share`` of a seeded shuffle shows ``wrong_field`` as the answer."""
    wrong = set(
        np.random.default_rng([seed, 1]).permutation(len(tasks))[: round(config.wrong_share * len(tasks))].tolist()
    )
    rows = []
    for index, task in enumerate(tasks):
        answer = task.answer
        if index in wrong:
            answer = str(_metadata(task, config.wrong_field, name))
        rows.append(demonstrate(f"{name}/{task.id}", task.id, task.messages, answer, tokenizer))
    return rows


def from_file(
    name: str, config: DemonstrationsConfig, tokenizer: ChatTokenizer, max_length: int, held_out: set[str]
) -> tuple[list[Experience], Counter[str]]:
    """Demonstrations from a JSONL or Parquet file with a prompt and a response per row.

    Returns the rows and, by reason, how many were left out because they cannot or must not be trained: longer than the
    model takes, or a held-out question. Raises DataError when the file is missing or empty, and with the line numbers
    when rows are broken.
    """
    assert config.path is not None  # the config's own rule
    field = f"demonstrations.{name}.path"
    if not config.path.is_file():
        raise DataError("no such file", field=field, value=str(config.path), remedy="give a JSONL or Parquet file")
    rows, left_out, broken = [], Counter[str](), {}
    for number, row in _read(config.path):
        prompt, response = (row.get(config.prompt), row.get(config.response)) if isinstance(row, dict) else (None, None)
        if not isinstance(prompt, str) or not isinstance(response, str) or not prompt or not response:
            broken[number] = row if isinstance(row, str) else f"needs text in {config.prompt!r} and {config.response!r}"
            continue
        if prompt in held_out:
            left_out["held-out question"] += 1
            continue
        messages = [{"role": "user", "content": prompt}]
        experience = demonstrate(f"{name}/{number}", f"{name}/{number}", messages, response, tokenizer)
        if len(experience.token_ids) > max_length:
            left_out["too long"] += 1
            continue
        rows.append(experience)
    if broken:
        first = "; ".join(f"line {number}: {why}" for number, why in list(broken.items())[:5])
        raise DataError(
            f"{len(broken)} broken rows of {len(broken) + len(rows) + left_out.total()}: {first}",
            field=field,
            value=str(config.path),
            remedy="mend or delete these lines",
        )
    if not rows:
        raise DataError(f"no usable row (left out: {dict(left_out)})", field=field, value=str(config.path))
    return rows[: config.size], left_out


def demonstrate(
    experience_id: str, task_id: str, messages: list[dict[str, str]], response: str, tokenizer: ChatTokenizer
) -> Experience:
    """A prompt and the response to imitate, as a row whose mask is 1 on the response and its EOS."""
    prompt, answer = tokenizer.prompt(messages), tokenizer.response(response)
    length = len(prompt) + len(answer)
    mask = np.zeros(length, dtype=np.uint8)
    mask[len(prompt) :] = 1
    return Experience(
        experience_id=experience_id,
        group_id=experience_id,
        task_id=task_id,
        token_ids=np.array(prompt + answer, dtype=np.int32),
        prompt_length=len(prompt),
        action_mask=mask,
        logprobs=np.zeros(length, dtype=np.float32),
        source="expert",
        turns=(*messages, {"role": "assistant", "content": response}),
    )


def _metadata(task: Task, field: str | None, name: str) -> Any:
    if field not in task.metadata:
        raise DataError(
            f"tasks have no metadata field {field!r}",
            field=f"demonstrations.{name}.wrong_field",
            value=field,
            remedy=f"choose one of {sorted(task.metadata)}",
        )
    return task.metadata[field]


def _read(path: Path) -> list[tuple[int, Any]]:
    """Rows with their line (JSONL) or row number; a line that is not JSON comes back as a string that says so."""
    if path.suffix == ".parquet":
        return list(enumerate(pq.read_table(path).to_pylist(), start=1))
    rows: list[tuple[int, Any]] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            rows.append((number, f"not JSON ({error.msg})"))
    return rows
