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
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.pool import EnginePool
from rayrft.explorer.evaluation import Attempt
from rayrft.explorer.evaluator import Evaluator
from rayrft.explorer.rollout import Runner
from rayrft.json_lines import JsonLines, open_lines, read_lines
from rayrft.registry import load_plugins
from rayrft.rewards.pool import Rewards, ScoringBackend
from rayrft.runtime.handle import Handle, Watched
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


class BenchWorker(Watched):
    """The actor, for one model."""

    def __init__(
        self,
        config: RunConfig,
        model: str,
        engine_pool: Handle[EnginePool],
        scoring: Callable[[], ScoringBackend] | None,
        auxiliary: Mapping[str, Handle[EnginePool]],
    ) -> None:
        """``scoring`` and ``auxiliary``: see `rayrft.explorer.explorer.Explorer`."""
        load_plugins(config.plugins)
        self._config = config
        models = auxiliary_models(config.auxiliary, auxiliary)
        self._rewards = Rewards(config.scoring, config.plugins, scoring, models)
        engines = EngineClient(engine_pool, Waits("bench"))
        runner = Runner(
            config, ChatTokenizer(model, template=config.model.template), engines, self._rewards.score, models
        )
        self._evaluator = Evaluator(config, runner.beside(engines, config.bench.max_tokens))
        self._answered = 0
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Start what scores."""
        await self._rewards.open()

    async def run(self, tasks: list[Task], path: Path) -> None:
        """Attempt the tasks, less what is in the file, and append to it. Raises ActorDied if an engine has died, and
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
