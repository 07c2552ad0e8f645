"""Rewards that do what the response says, for the tests of who runs them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayrft.experience import Task
from rayrft.rewards import RewardResult, StepReward, Transcript
from rayrft.rewards.judge import ChatModel

HERE = f"{__name__}:"
"""What the names of these rewards begin with."""


def task(answer: str, **metadata: Any) -> Task:
    return Task.create("test", "question", answer, metadata=metadata)


def transcripts(*responses: str) -> list[Transcript]:
    return [Transcript.of(task("a"), response) for response in responses]


class Bomb(RewardResult):
    def __reduce__(self) -> Any:
        return os.kill, (0, "not a signal")  # raises where it is unpickled


def _do(response: str) -> RewardResult:
    if response == "raise":
        raise ZeroDivisionError("division by zero")
    if response == "hang":
        time.sleep(1000)
    if response == "nap":
        time.sleep(0.7)
    if response == "niceness":
        return RewardResult(float(os.getpriority(os.PRIO_PROCESS, 0)), answer=str(os.getpid()))
    if response == "die":
        os._exit(1)
    return (Bomb if response == "say" else RewardResult)(1.0)


def moody() -> Any:
    return lambda task, response: _do(response)


def sized() -> Any:
    return lambda task, response: len(response) / 10


class SizedTranscript:
    """Its step ends with the answer."""

    def score(self, task: Task, transcript: Transcript) -> RewardResult:
        size = len(transcript.answers[-1])
        return RewardResult(size / 10, steps=(StepReward(0, size, 1.0),))


def only_once(mark: str) -> Any:
    if Path(mark).exists():
        raise OSError("no more")
    Path(mark).touch()
    return moody()


def one_at_a_time(mark: str) -> Any:
    file = os.open(mark, os.O_CREAT | os.O_RDWR)  # open for as long as the process lives
    for _ in range(45):  # one that was killed is gone a little later
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lambda task, response: _do(response)
        time.sleep(0.01)
    raise OSError("no room for another")


def cannot_be_built() -> Any:
    raise OSError("no such file")


def names_its_actor(mark: str) -> Any:
    def score(task: Task, response: str) -> RewardResult:
        # The process was forked from a template, whose parent is the actor.
        template = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        actor = int(template[1])
        if response == "always kill the actor" or (response == "kill the actor" and not Path(mark).exists()):
            Path(mark).touch()
            os.kill(actor, signal.SIGKILL)
            time.sleep(1000)
        return RewardResult(1.0, answer=str(actor))

    return score


class Meeting:
    """Each call waits for the others."""

    def __init__(self, together: int) -> None:
        self.barrier = asyncio.Barrier(together)

    async def score(self, task: Task, transcript: Transcript) -> float:
        await (asyncio.Event() if transcript.response == "never" else self.barrier).wait()
        return 1.0


class Gone:
    async def score(self, task: Task, transcript: Transcript) -> float:
        if transcript.response == "cancelled":
            waiting = asyncio.ensure_future(asyncio.Event().wait())
            asyncio.get_running_loop().call_soon(waiting.cancel)
            await waiting
        if transcript.response == "exits":
            raise SystemExit(3)
        if transcript.response == "times out":
            raise TimeoutError("the judge is away")
        return 1.0


class Together:
    """Takes calls together, and says how many there were. One that spoils spoils all of them."""

    max_batch = 4

    def score(self, task: Task, transcript: Transcript) -> RewardResult:
        return self.score_batch([(task, transcript)])[0]

    def score_batch(self, calls: Sequence[tuple[Task, Transcript]]) -> list[RewardResult]:
        for _, transcript in calls:
            _do(transcript.response)
        results = [RewardResult(float(call[1].response[-1] == "e"), {"of": len(calls)}) for call in calls]
        return results[1:] if results[1:] and any(call[1].response == "lose" for call in calls) else results


class AsksAnother:
    """Asks an auxiliary model, and says how long its answer is."""

    needs_auxiliary = ("grader",)

    def use(self, models: Mapping[str, ChatModel]) -> None:
        self._grader = models["grader"]

    async def score(self, task: Task, transcript: Transcript) -> RewardResult:
        said = await self._grader.chat([{"role": "user", "content": f"Is {transcript.response} right?"}], max_tokens=4)
        return RewardResult(1.0, {"said": float(len(said))})


class WaitsForAnother:
    """A call in one actor, which it names, ends when one in another actor has begun."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def score(self, task: Task, transcript: Transcript) -> RewardResult:
        actor = str(os.getpid())
        (self._folder / actor).touch()
        while len(list(self._folder.iterdir())) < 2:  # noqa: ASYNC110 - of files there is no event
            await asyncio.sleep(0.05)
        return RewardResult(1.0, {"said": float(transcript.response)}, answer=actor)
