"""How well the model does, and what bounds the run: said between steps."""

from __future__ import annotations

import time

from rayrft.config import RunConfig, StageConfig
from rayrft.core.bookkeeping import evaluation_record
from rayrft.core.cast import Cast
from rayrft.core.progress import Progress
from rayrft.core.recorder import Recorder
from rayrft.explorer.evaluation import Evaluation
from rayrft.monitor.records import StepRecord
from rayrft.monitor.verdict import verdict


class Review:
    """Evaluates and judges the run as ``progress`` stands."""

    def __init__(self, config: RunConfig, cast: Cast, recorder: Recorder, progress: Progress) -> None:
        self._config = config
        self._cast = cast
        self._recorder = recorder
        self._progress = progress

    async def evaluate(self, stage: StageConfig) -> None:
        """Let the engines answer the held-out tasks at every temperature of the config, if it asks for that."""
        if not self._config.evaluation.enabled or self._cast.explorer is None:
            return
        progress = self._progress
        for number, temperature in enumerate(self._config.evaluation.temperatures):
            started = time.perf_counter()
            result: Evaluation = await self._cast.explorer.evaluate.remote(temperature)
            seconds = time.perf_counter() - started
            if number == 0 and result.count:
                progress.accuracy = result.accuracy
            record = evaluation_record(stage.name, progress.step, progress.stage_step, result, seconds)
            await self._recorder.add(record)

    async def judge(self, stage: StageConfig, first: int) -> None:
        """Say what bounds the stage, from its records so far: those from the ``first`` on."""
        steps = [record for record in self._recorder.records[first:] if isinstance(record, StepRecord)]
        if said := verdict(steps, self._config.max_staleness):
            await self._recorder.note(said, stage.name, self._progress.step)
