"""Answers that the Buffer does not store, in files of the run folder: of dropped groups, and of evaluations."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rayrft.experience import TRUNCATED, Experience, Task
from rayrft.explorer.evaluation import Attempt

log = logging.getLogger(__name__)

ANSWERS = "answers"
"""The folder of these files in a run folder: some by Explorer, numbered. A line is an answer, with names as in the
viewer's table of rows."""
_LONGEST = 2000
"""Characters of a question and of an answer that are written."""


class UnstoredAnswers:
    """Writer of the files of an Explorer; without a run folder nothing is written. A file that has ``most_bytes`` is
    followed by another one, and the one before it is deleted."""

    def __init__(self, folder: Path | None, actor: str, most_bytes: int = 128 << 20) -> None:
        self._answers = folder / ANSWERS if folder is not None and folder.is_dir() else None
        self._explorer, self._most_bytes = actor, most_bytes

    async def add_dropped(self, task: Task, rows: list[Experience], dropped: Counter[str]) -> None:
        """Write the rows of a group of which no row is stored, with the reason that dropped most of them."""
        [(reason, _)] = dropped.most_common(1)
        fields = {"group_status": "dropped", "drop_reason": reason}
        await self._write({**fields, **_of_row(task, row)} for row in rows)

    async def add_evaluated(self, tasks: Iterable[Task], attempts: Iterable[Attempt], temperature: float) -> None:
        """Write the attempts of an evaluation at the held-out ``tasks``."""
        by_id = {task.id: task for task in tasks}
        fields = {"group_status": "evaluation", "metrics": {"temperature": temperature}}
        await self._write({**fields, **_of_attempt(by_id[each.task_id], each, temperature)} for each in attempts)

    async def _write(self, rows: Iterable[dict[str, Any]]) -> None:
        if self._answers is not None:
            lines = "".join(json.dumps({"finished_at": time.time(), **row}) + "\n" for row in rows)
            await asyncio.to_thread(self._append, self._answers, lines.encode())

    def _append(self, folder: Path, lines: bytes) -> None:
        try:
            folder.mkdir(exist_ok=True)
            files = sorted(folder.glob(f"{self._explorer}.*.jsonl"))
            number = int(files[-1].name.split(".")[-2]) if files else 0
            if files and files[-1].stat().st_size >= self._most_bytes:
                number += 1
                for before in files[:-1]:
                    before.unlink(missing_ok=True)
            path = folder / f"{self._explorer}.{number:06}.jsonl"
            with path.open("ab", buffering=0) as file:  # one write, which no other thread's interrupts
                file.write(lines)
        except OSError as error:  # a full disk must not end a run that has room for its rows
            log.warning("no answers of dropped groups and evaluations are written from now on: %s", error)
            self._answers = None


def _of_row(task: Task, row: Experience) -> dict[str, Any]:
    answers = [turn.get("content") or "" for turn in row.turns if turn.get("role") == "assistant"]
    return {
        "experience_id": row.experience_id,
        "group_id": row.group_id,
        "task_id": task.id,
        "source": row.source,
        "stop_reason": row.stop_reason,
        "error": row.error,
        "reward": row.reward,
        "components": row.reward_components,
        "metrics": row.metrics,
        "tokens": int(np.count_nonzero(row.action_mask)),
        "version": min((span.version for span in row.weight_versions), default=None),
        "question": task.question[:_LONGEST],
        "answer": answers[-1][:_LONGEST] if answers else None,
    }


def _of_attempt(task: Task, attempt: Attempt, temperature: float) -> dict[str, Any]:
    version = min(attempt.versions, default=None)
    group_id = f"evaluation/{version}/{temperature:g}/{task.id}"
    return {
        "experience_id": f"{group_id}/{attempt.repeat}",
        "group_id": group_id,
        "task_id": task.id,
        "source": "evaluation",
        "stop_reason": TRUNCATED[0] if attempt.cut else "stop",
        "error": attempt.problem,
        "reward": attempt.reward,
        "tokens": attempt.tokens,
        "version": version,
        "question": task.question[:_LONGEST],
        "answer": attempt.response[:_LONGEST],
    }
