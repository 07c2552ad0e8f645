"""What the host of verifiers uses of the library, in little: for tests of the host and its processes alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import types
import urllib.request
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

__version__ = "0.4.0"


class Data(SimpleNamespace):
    def model_dump(self, mode: str) -> dict[str, Any]:
        return vars(self)

    @property
    def prompt_text(self) -> str:
        return str(self.prompt)

    @classmethod
    def model_validate(cls, given: dict[str, Any]) -> Data:
        return cls(**given)


class LetterTask(SimpleNamespace):
    def __init__(self, data: Data, config: Any = None) -> None:
        super().__init__(data=data, key=data.prompt)

    data_type = staticmethod(lambda: Data)


class Letters:
    task_type = staticmethod(lambda: LetterTask)

    def __init__(self, count: int = 3, what: str = "") -> None:
        self.bounded, self._count, self._what = True, count, what

    def __iter__(self) -> Iterator[LetterTask]:
        print("loading")
        for letter in "abcdefgh"[: self._count]:
            yield LetterTask(Data(prompt=f"Say {letter}", letter=letter, what=self._what))


class Environment:
    def __init__(self, settings: dict[str, Any]) -> None:
        options = dict(settings["taskset"])
        if options.pop("id") != "letters":
            raise ModuleNotFoundError("taskset not found")
        self.taskset = Letters(**options)
        self.config = SimpleNamespace(taskset=SimpleNamespace(task=None))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run_episode(self, task: LetterTask, context: SimpleNamespace) -> SimpleNamespace:
        messages: list[Any] = []
        client = context.client
        for question in (task.data.prompt, "Sure?"):
            messages.append({"role": "user", "content": question})
            headers = {"Authorization": f"Bearer {os.environ[client.api_key_var]}", "Content-Type": "application/json"}
            body = json.dumps({"model": context.model, "messages": messages}).encode()
            asked = urllib.request.Request(f"{client.base_url}/chat/completions", body, headers)
            answer = await asyncio.to_thread(urllib.request.urlopen, asked)
            messages.append(json.load(answer)["choices"][0]["message"])
            if task.data.what == "dies":
                os._exit(3)
            if task.data.what == "hangs":
                await asyncio.sleep(1000)
        if task.data.what == "raises":
            error = SimpleNamespace(type="TaskError", message="LookupError: no such letter")
            return SimpleNamespace(ok=False, errors=[error], traces=[])
        said = messages[-1]["content"]
        share = 2 * said.count(task.data.letter) / max(1, len(said))
        trace = SimpleNamespace(
            rewards={"share": SimpleNamespace(value=share)},
            metrics={"letters": float(len(said))},
            reward=share,
            errors=[],
        )
        return SimpleNamespace(ok=True, errors=[], traces=[trace])


def _module(name: str, **members: Any) -> None:
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(members)


_module("verifiers.v1", **dict.fromkeys(("EvalClientConfig", "ModelContext", "SamplingConfig"), SimpleNamespace))
_module("verifiers.v1.utils")
_module("verifiers.v1.utils.loaders", load_environment=Environment, resolve_env_config=lambda settings: settings)
