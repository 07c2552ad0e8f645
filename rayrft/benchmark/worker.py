"""BenchWorker: attempts task sets with one model, and writes every attempt as it comes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rayrft.config import RunConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import StorageError
from rayrft.experience import Task
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.pool import EnginePool
from rayrft.explorer.evaluation import Attempt
from rayrft.explorer.evaluator import Evaluator
from rayrft.explorer.rollout import Runner
from rayrft.registry import load_plugins
from rayrft.rewards.pool import RewardPool, Scoring
from rayrft.runtime.handle import Handle, Watched
from rayrft.runtime.waits import Waits


class AttemptFile:
    """Attempts in JSON lines. What was acknowledged is read again after the writer was killed at any moment."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[Attempt]:
        """Return the attempts; the last line, if it is torn, is left out."""
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().splitlines(keepends=True)
        return [_attempt(json.loads(line)) for line in lines if line.endswith(b"\n")]

    def append(self, attempts: Sequence[Attempt]) -> None:
        """Write attempts. Raises StorageError; what was there before is still read then."""
        text = "".join(json.dumps(asdict(attempt)) + "\n" for attempt in attempts)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(text.encode())
        except OSError as error:
            raise StorageError(
                f"answers cannot be written: {error.strerror}",
                "free disk space or fix the storage, then start the bench again: it goes on where it stopped",
                field=str(self._path),
            ) from None

    def mend(self) -> None:
        """Cut off a last line that is torn, so that more can be appended."""
        if self._path.exists():
            whole = self._path.read_bytes().rfind(b"\n") + 1
            with self._path.open("ab") as file:
                file.truncate(whole)


def _attempt(fields: dict[str, object]) -> Attempt:
    fields["versions"] = tuple(fields["versions"])  # type: ignore[arg-type]
    return Attempt(**fields)  # type: ignore[arg-type]


class BenchWorker(Watched):
    """The actor, for one model."""

    def __init__(
        self,
        config: RunConfig,
        model: str,
        engine_pool: Handle[EnginePool],
        scoring: Callable[[], Scoring] | None,
        auxiliary: Mapping[str, Handle[EnginePool]],
    ) -> None:
        """``scoring`` and ``auxiliary``: see `rayrft.explorer.explorer.Explorer`."""
        load_plugins(config.plugins)
        self._config = config
        models = auxiliary_models(config.auxiliary, auxiliary)
        self._rewards = RewardPool(config.scoring, config.plugins, scoring, models)
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
        file = AttemptFile(path)
        file.mend()
        bench = self._config.bench
        done = Counter(attempt.task_id for attempt in file.read())
        async for attempts in self._evaluator.each(tasks, bench.samples, bench.temperature, done):
            file.append(attempts)
            async with self._changed:
                self._answered += 1
                self._changed.notify_all()

    async def answered(self, after: int) -> int:
        """Return the number of tasks that were attempted by this actor, as soon as it is beyond ``after``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._answered > after)
            return self._answered
