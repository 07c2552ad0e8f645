"""Steering of a running run: requests of its users, served at the border between two optimiser steps.

Changes of the config are kept in ``changes.jsonl`` of the run's folder. A run that resumes from an earlier step returns
to the config of that step, and makes later changes again at their own steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from rayrft.config import RunConfig, load_config
from rayrft.config.changes import change_config, changeable
from rayrft.core.checkpoints import Progress
from rayrft.core.run_folder import write_config
from rayrft.errors import ConfigError, GuardTripped, RunFinished, StorageError
from rayrft.json_lines import open_lines, read_lines
from rayrft.monitor.records import StepRecord, flat

if TYPE_CHECKING:
    from rayrft.core.train_loop import TrainLoop


@dataclass(frozen=True)
class ConfigChange:
    """A key of the config changed at the border after this many optimiser steps."""

    step: int
    key: str
    old: Any
    new: Any
    time: float


_change = TypeAdapter(ConfigChange)
_JOURNAL, _PAUSED = "changes.jsonl", ".paused"


def histories(folder: Path) -> dict[str, list[ConfigChange]]:
    """Return the changes of a run's config by key and step. A change voids earlier ones of its key at later steps: the
    run has returned to a checkpoint before them."""
    held: dict[str, list[ConfigChange]] = {}
    for _, change in read_lines(folder / _JOURNAL, _change.validate_json):
        held[change.key] = [each for each in held.get(change.key, []) if each.step <= change.step] + [change]
    return held


def config_at(config: RunConfig, step: int) -> tuple[RunConfig, list[ConfigChange]]:
    """Return a run's config after this many steps, and the later changes. ``config`` is the latest; a key with another
    value than its last change gave it is overridden, and stays."""
    present, values, later = changeable(config), dict[str, Any](), list[ConfigChange]()
    for key, history in histories(config.folder).items():
        if present.get(key) == history[-1].new and (ahead := [each for each in history if each.step > step]):
            values[key], later = ahead[0].old, later + ahead
    return load_config(config, values) if values else config, sorted(later, key=lambda change: change.step)


def latest_config(config: RunConfig) -> RunConfig:
    """Return a config from which a run was started before, with the changes of that run."""
    present, changes = changeable(config), histories(config.folder)
    same = {key: each[-1].new for key, each in changes.items() if present.get(key) == each[0].old}
    return load_config(config, same) if same else config


def _append(folder: Path, *changes: ConfigChange) -> None:
    """Append changes on disk: all, or none if it raises StorageError."""
    file, _ = open_lines(folder / _JOURNAL, _change.validate_json)
    with contextlib.closing(file):
        file.append(*(json.dumps(asdict(each)).encode() + b"\n" for each in changes), durable=True)


class Steering:
    """Holds requests until the train loop serves them, in their order: ``checkpoint`` and ``evaluate`` are methods of
    `TrainLoop`, the others methods that take it. A ConfigError refuses a request. ``adopt`` informs the Master;
    ``taken_over`` says whether it has taken the run over from another one, which may have paused it."""

    def __init__(
        self, config: RunConfig, progress: Progress, adopt: Callable[[RunConfig], None], taken_over: bool = False
    ) -> None:
        self.config, self._progress, self._adopt = config, progress, adopt
        mark = self._mark = config.folder / _PAUSED
        self.paused_since = mark.stat().st_mtime if taken_over and mark.exists() else None
        self._paused_at = time.monotonic() - max(time.time() - (self.paused_since or math.inf), 0.0)
        if self.paused_since is None:
            mark.unlink(missing_ok=True)
        self._later = deque[ConfigChange]()
        self._requests = deque[tuple[str, Sequence[Any], asyncio.Future[Any]]]()
        self._arrived, self._ended, self.reached = asyncio.Event(), False, 0
        self._beyond, self._seen = defaultdict[int, float](float), set[int]()
        """By place of the guard: steps in a row that are out of bounds; and whether the run has its number."""
        self.rewind()

    def rewind(self) -> None:
        """Return to the config of ``progress.step``, from which the run repeats its steps. Overridden keys void their
        later changes."""
        # A run may return to an earlier step again before it has made its later changes.
        self.config = load_config(self.config, {each.key: each.new for each in self._later})
        step, present = self._progress.step, changeable(self.config)
        for key, history in histories(self.config.folder).items():
            if key in present and present[key] != history[-1].new:
                _append(self.config.folder, ConfigChange(step, key, present[key], present[key], time.time()))
        self.config, later = config_at(self.config, step)
        self._later = deque(later)

    async def ask(self, request: str, *arguments: Any) -> Any:
        """Wait until a request is served, and return its result. Raises ConfigError if it is refused, and RunFinished
        if the run ends first."""
        if request == "unpause" and self.paused_since is None and not self._requests:
            raise ConfigError("the run is not paused", "pause it first", field="unpause")
        if request == "change" and not self._requests:  # refuse at once if possible: a step may be long
            self._changed(*arguments)
        if request == "evaluate":
            load_config(self.config, *arguments)
        answer = asyncio.get_running_loop().create_future()
        self._requests.append((request, arguments, answer))
        self._arrived.set()
        if self._ended:
            self.end()
        try:
            result = await asyncio.shield(answer)
            return await result if isinstance(result, asyncio.Future) else result
        except asyncio.CancelledError:
            raise RunFinished("the run has ended", "see its summary", field="run", value=self.config.name) from None

    def end(self) -> None:
        """Refuse all requests from now on: the run has ended."""
        self._ended = True
        for *_, answer in self._requests:
            answer.cancel()

    async def border(self, loop: TrainLoop) -> None:
        """Serve the requests so far, and hold the run while it is paused. Raises as `TrainLoop.unless_ended`."""
        while self._later and (step := self._later[0].step) <= self._progress.step:
            again = [self._later.popleft() for change in [*self._later] if change.step == step]
            await self._make(loop, load_config(self.config, {each.key: each.new for each in again}), again)
        self.reached = max(self.reached, self._progress.step)
        if self._progress.step < self.reached:
            return  # the run repeats steps: engines have the weights of later ones
        try:
            while self._requests or self.paused_since is not None:
                while self._requests:
                    request, arguments, answer = self._requests.popleft()
                    try:
                        serve = getattr(loop, request, None) or partial(getattr(self, request), loop)
                        answer.set_result(await serve(*arguments))
                    except ConfigError as refused:
                        answer.set_exception(refused)
                    finally:
                        answer.cancel()  # if another error ends the run
                self._arrived.clear()
                if self.paused_since is not None:
                    await loop.unless_ended(asyncio.ensure_future(self._arrived.wait()))
        except Exception:  # and not a rewind, which cancels: the run is paused again after the same step
            if self.paused_since is not None:
                await self.unpause(loop)
            raise

    async def guard(self, loop: TrainLoop, record: StepRecord) -> None:
        """Let the guards act on a step. Raises GuardTripped."""
        values, stage = flat(record), self.config.stages[-1]
        last = stage.name, min(10, stage.steps)  # a metric that the run has is known by then
        for place, guard in enumerate(self.config.guards):
            value = values[guard.field]
            if value or isinstance(value, int):  # numbers of a term that the loss does not have are 0.0
                self._seen.add(place)
            if place not in self._seen and (record.stage, self._progress.stage_step) == last:
                await loop.note(f"guards.{place}: {guard.field} was 0 or missing at all steps: the run may not have it")
            if value is None:
                continue
            bound = guard.crossed(value)
            self._beyond[place] = self._beyond[place] + 1 if bound else 0
            if self._beyond[place] < guard.steps:
                continue
            self._beyond[place] = -math.inf  # it acts once, until a step is within bounds
            text = f"{guard.field} is {value:.4g}, {bound} (steps in a row: {guard.steps})"
            if guard.action == "stop":
                await loop.checkpoint()
                remedy = f"find out why, and resume with other keys: rayrft resume {self.config.folder}"
                raise GuardTripped(text, remedy, field=f"guards.{place}", value=value)
            if guard.action == "hold":
                remedy = f"find out why, change keys (rayrft set), then: rayrft unpause {self.config.name}"
                await self.pause(loop, f"paused by guards.{place}: {text}; {remedy}")
            else:
                await loop.note(f"guards.{place}: {text}")

    async def pause(self, loop: TrainLoop, text: str = "paused") -> int:
        """Hold the run; return its step."""
        if self.paused_since is None:
            self.paused_since, self._paused_at = time.time(), time.monotonic()
            with contextlib.suppress(OSError):  # a full disk: the Master's successor does not know then
                self._mark.touch()
            await loop.note(text)
        return self._progress.step

    async def unpause(self, loop: TrainLoop) -> float:
        """Let the run continue; return the seconds it was paused."""
        seconds = time.monotonic() - self._paused_at if self.paused_since is not None else 0.0
        self.paused_since = None
        self._mark.unlink(missing_ok=True)
        await loop.note(f"unpaused after {seconds:.1f} s", paused_s=seconds)
        return seconds

    async def skip_stage(self, loop: TrainLoop) -> int:
        """End the stage by setting its number of steps to those taken, which are returned."""
        stage, taken = self.config.stages[self._progress.stage], self._progress.stage_step
        await self.change(loop, {f"stages.{stage.name}.steps": taken})
        return taken

    async def change(self, loop: TrainLoop, changes: Mapping[str, Any]) -> int:
        """Change keys of the config, all or none; return the step after which they apply."""
        new, step, now = self._changed(changes), self._progress.step, time.time()
        before, after = changeable(self.config), changeable(new)
        made = [ConfigChange(step, key, before[key], after[key], now) for key in before if before[key] != after[key]]
        later = [each for each in self._later if each.key not in {change.key for change in made}]
        try:  # a run that is killed between the two resumes without these changes
            _append(self.config.folder, *made)
            write_config(load_config(new, {each.key: each.new for each in later}))
        except StorageError as error:
            raise ConfigError(error.problem, error.remedy, field=error.field) from None
        self._later = deque(later)
        await self._make(loop, new, made)
        return step

    def _changed(self, changes: Mapping[str, Any]) -> RunConfig:
        """Return the config with these changes. Raises ConfigError, also if the later changes do not fit to them."""
        new, progress = change_config(self.config, changes), self._progress
        load_config(new, {each.key: each.new for each in self._later if each.key not in changes})
        for number, (old, stage) in enumerate(zip(self.config.stages, new.stages, strict=True)):
            if number < progress.stage and stage != old:
                raise ConfigError("the stage has ended", "change a later one", field=f"stages.{stage.name}")
            if number == progress.stage and stage.steps < progress.stage_step:
                problem, field = f"is less than the steps taken, {progress.stage_step}", f"stages.{stage.name}.steps"
                raise ConfigError(problem, "skip the stage instead", field=field, value=stage.steps)
        return new

    async def _make(self, loop: TrainLoop, config: RunConfig, changes: list[ConfigChange]) -> None:
        """Continue with a config that has these changes, which are in the journal."""
        self.config = config
        self._adopt(config)
        await loop.adjust(config)
        for each in changes:
            await loop.note(f"{each.key}: {each.old} -> {each.new}", key=each.key, old=each.old, new=each.new)
