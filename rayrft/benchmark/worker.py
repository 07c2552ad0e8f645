"""BenchWorker: attempts task sets with one model, and writes every attempt as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from rayrft.config import RunConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Task
from rayrft.explorer.engines.pool import EnginePool
from rayrft.explorer.evaluation import Attempt
from rayrft.explorer.evaluator import TaskActor
from rayrft.json_lines import JsonLines, open_lines, read_lines
from rayrft.rewards.scorer import ScoringBackend
from rayrft.runtime.handle import Handle
from rayrft.runtime.waits import Waits


def read_attempts(path: Path) -> list[Attempt]:
    """Return the attempts in a file, which may be missing or in use."""
    return [attempt for _, attempt in read_lines(path, _attempt)]


def open_attempts(path: Path) -> tuple[JsonLines, list[Attempt]]:
    """Open a file of attempts for appending; return it with its attempts. Raises StorageError."""
    return open_lines(path, _attempt, "free disk space or fix the storage, then start the bench again: it is resumed")


def to_line(attempt: Attempt) -> bytes:
    """Return an attempt as a line of its file."""
    return json.dumps(asdict(attempt)).encode() + b"\n"


def _attempt(line: bytes) -> Attempt:
    fields = json.loads(line)
    return Attempt(**{**fields, "versions": tuple(fields["versions"])})


class BenchWorker(TaskActor):
    """The actor, for one model."""

    def __init__(
        self,
        config: RunConfig,
        model: str,
        engine_pool: Handle[EnginePool],
        scoring: Callable[[], ScoringBackend] | None,
        auxiliary: Mapping[str, Handle[EnginePool]],
    ) -> None:
        tokenizer = ChatTokenizer(model, template=config.model.template)
        super().__init__(config, tokenizer, engine_pool, scoring, auxiliary, Waits("bench"))
        self._evaluator = self._evaluator_on(self._engines, config.bench.max_tokens)
        self._answered = 0
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        await self._rewards.open()

    async def run(self, tasks: list[Task], path: Path) -> None:
        """Make the attempts that the file lacks, and append them to it. Raises ActorDied if an engine has died, and
        StorageError."""
        self._answered, (file, found) = 0, open_attempts(path)
        bench, done = self._config.bench, Counter(attempt.task_id for attempt in found)
        with contextlib.closing(file):
            async for attempts in self._evaluator.each(tasks, bench.samples, bench.temperature, done):
                file.append(*map(to_line, attempts))
                async with self._changed:
                    self._answered += 1
                    self._changed.notify_all()

    async def answered(self, after: int) -> int:
        """Return the number of tasks that were attempted in this `run`, as soon as it is beyond ``after``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._answered > after)
            return self._answered
