"""A taskset of verifiers 0.4 with a harness of its own: the reward is the share of the wanted letter in the answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as v1
from verifiers.v1.runtimes import ProgramResult

__all__ = ["AsksTwice", "Letters"]


class LetterData(v1.TaskData):
    letter: str
    what: str = ""


class LetterTask(v1.Task[LetterData]):
    @v1.reward(weight=2.0)
    async def share(self, trace: v1.Trace) -> float:
        if self.data.what == "raises":
            raise LookupError("no such letter")
        said = trace.last_reply or ""
        return said.count(self.data.letter) / max(1, len(said))

    @v1.metric
    async def letters(self, trace: v1.Trace) -> float:
        return float(len(trace.last_reply or ""))


class LettersConfig(v1.TasksetConfig):
    count: int = 3
    what: str = ""


class Letters(v1.Taskset[LetterTask, LettersConfig]):
    def load(self) -> Iterator[LetterTask]:
        print("loading")  # is no answer
        for letter in "abcdefgh"[: self.config.count]:
            data = LetterData(prompt=f"Say {letter}", letter=letter, what=self.config.what)
            yield LetterTask(data, self.config.task)


class AsksTwiceConfig(v1.HarnessConfig):
    pass


class AsksTwice(v1.Harness[AsksTwiceConfig]):
    """Asks, and asks again, in its own process."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        *_: Any,
        **__: Any,
    ) -> ProgramResult:
        messages: list[Any] = []
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as http:
            for question in (data.prompt, "Sure?"):
                messages.append({"role": "user", "content": question})
                body = {"model": ctx.model, "messages": messages}
                answer = (await http.post(f"{endpoint}/chat/completions", json=body)).raise_for_status().json()
                messages.append(answer["choices"][0]["message"])
                if data.what == "dies":
                    os._exit(3)
                if data.what == "hangs":
                    await asyncio.sleep(1000)
        return ProgramResult(exit_code=0, stdout="", stderr="")
