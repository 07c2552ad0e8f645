"""Environments of tests; it imports little, as processes that they live in begin with it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

from rayrft.experience import Task
from rayrft.explorer.environments import Step


class Blocking:
    """Every step says who it is and what was done, and is worth more than the last one; its actions are troubles."""

    def __init__(self, flag: str = "") -> None:
        self._flag = Path(flag) if flag else None
        self._steps = 0

    def reset(self, task: Task, seed: int) -> str:
        self._rng = random.Random(seed)
        if self._flag is not None:  # dies as often as the file has letters
            text = self._flag.read_text()
            self._flag.write_text(text[1:])
            if text:
                os._exit(1)
        return f"{self._rng.random()}"

    def step(self, action: str) -> Any:
        self._steps += 1
        match action:
            case "die":
                os._exit(1)
            case "hang":
                time.sleep(1000)
            case "shout":
                return Step("x" * (10 << 20))
            case "talk":
                return Step("x" * 2000)
            case "raise":
                raise ValueError("no way")
            case "nothing":
                return None
            case "nan":
                return Step("fine", reward=float("nan"))
        said, done = f"{self._rng.random()} {os.getpid()} {action}", self._steps == 3
        return Step(said, 0.1 * self._steps, done=done, info={"slips": 2, "note": "no"})

    def close(self) -> None:
        pass


class Async(Blocking):
    async def reset(self, task: Task, seed: int) -> str:  # type: ignore[override]
        return super().reset(task, seed)

    async def step(self, action: str) -> Any:
        if action == "hang":
            await asyncio.Event().wait()
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        pass


class Recorded(Blocking):
    """Writes to the file ``to`` that it is created and closed, unless ``problem``: ``raise`` or ``die``."""

    def __init__(self, to: str, problem: str = "") -> None:
        super().__init__()
        self._to = Path(to)
        self._write("created")
        if problem == "die":
            os._exit(3)
        if problem:
            raise RuntimeError("no display")

    def close(self) -> None:
        self._write("closed")

    def _write(self, what: str) -> None:
        with self._to.open("a") as file:
            file.write(f"{what}\n")


class RecordedAsync(Recorded):
    async def step(self, action: str) -> Any:
        raise NotImplementedError

    async def close(self) -> None:  # type: ignore[override]
        super().close()


def make_async() -> Async:
    """Of what it returns nothing is known in advance."""
    return Async()
