"""Workflows of tests that block, hang, leak and die, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from rayrft.errors import EnvironmentFailed
from rayrft.experience import Task
from rayrft.explorer.trajectory import ContextFull, PromptTooLong


class Thorough:
    """Uses all that a workflow has. ``blocking`` is that of the class, as tests set it."""

    def __init__(self, hint: str = "Again?") -> None:
        self._hint = hint
        self._used = 0

    async def run(self, task: Task, model: Any, env: Any = None) -> Any:
        self._used += 1
        first = model.start([*task.messages, {"role": "user", "content": await env.reset(task)}])
        second = model.start(task.messages)
        texts = await asyncio.gather(first.act(), second.act(max_tokens=2))
        step = await env.step(texts[0])
        judge, schema = model.auxiliary("judge"), {"type": "object", "properties": {"grade": {"type": "integer"}}}
        verdict = await judge.chat([{"role": "user", "content": texts[1]}], max_tokens=3, json_schema=schema)
        again = await judge.with_seed(3).chat([{"role": "user", "content": first.transcript.response}], max_tokens=3)
        for trajectory in (first, second):
            trajectory.observe(
                [{"role": "user", "content": f"{self._hint} {verdict} {again} {step.reward} {env.seed}"}]
            )
            await trajectory.act()
        thread = threading.Thread(target=first.observe, args=("from a thread",))
        thread.start()
        thread.join()
        await first.act()
        assert model.keep(()) == ()
        first.step_reward(0.25, state=3.0)
        first.count("looks", 2)
        first.reward(step.reward, {"style": 1.0})
        second.reward(await model.score(task, texts[1]))
        second.count("messages", len(second.messages) + 100 * second.answers + 1000 * (second.stop_reason == "stop"))
        second.count("seen", 1000 * model.repeat + model.max_tokens + model.max_length)
        assert first.result.value == step.reward and first.images == ()
        if model.repeat == 1:
            second.end_for_length()
        return [first, second]


class InProcess(Thorough):
    blocking = True


class Troubled:
    """Repeat 0 answers; the others have the task's troubles, in turn. Its ``place`` is a file for what they tell."""

    blocking = True

    async def run(self, task: Task, model: Any, env: Any = None) -> Any:
        trajectory = model.start(task.messages)
        troubles, self._place = task.metadata["troubles"] or [""], Path(task.metadata["place"])
        trouble = troubles[(model.repeat - 1) % len(troubles)]
        if trouble == "catches all":
            with contextlib.suppress(Exception):
                await trajectory.act()
            return trajectory
        await trajectory.act()
        if model.repeat == 0:
            return trajectory
        match trouble:
            case "blocks":
                self._place.read_text()  # of a pipe: until somebody has written
            case "hangs":
                with self._place.open("a") as pids:
                    child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")  # noqa: ASYNC220 - it blocks, as it may
                    print(os.getpid(), child, file=pids, flush=True)
                threading.Event().wait()
            case "exits":
                os._exit(3)
            case "raises":
                raise KeyError("nothing here")
            case "returns nothing":
                return None
            case "is full" | "catches what is full":
                try:
                    while True:
                        trajectory.observe("again")
                        await trajectory.act()
                except ContextFull as error:
                    if trouble == "is full":
                        raise
                    trajectory.count("caught", "tokens" in str(error))
            case "catches what is too long":
                try:
                    model.start([{"role": "user", "content": "horse " * 1000}])
                except PromptTooLong:
                    trajectory.count("caught")
            case "gives up":
                try:
                    async with asyncio.timeout(0.05):
                        await trajectory.act()
                except TimeoutError:
                    trajectory.count("caught")
                await trajectory.act()
            case "leaves a thread that asks":
                threading.Thread(target=self._ask_for_ever, args=(trajectory,), daemon=True).start()
            case "leaves a thread that waits":
                asked = threading.Event()
                threading.Thread(target=asyncio.run, args=(self._act(trajectory, asked),), daemon=True).start()
                asked.wait()
            case "is in no room":
                try:
                    await env.reset(task)
                except EnvironmentFailed:
                    trajectory.count("caught")
        return trajectory

    def _ask_for_ever(self, trajectory: Any) -> None:
        while True:
            trajectory.count("asked", 0)

    async def _act(self, trajectory: Any, asked: threading.Event) -> None:
        acting = asyncio.ensure_future(trajectory.act())
        await asyncio.sleep(0)  # by then it has asked
        asked.set()
        await acting
