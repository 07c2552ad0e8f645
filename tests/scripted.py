"""Stand-ins for actors, to test logic without waiting for engines."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from rayrft.runtime.handle import Handle
from rayrft.runtime.processes.worker import failed_call

if TYPE_CHECKING:
    from rayrft.rewards.judge import Messages


class Remote:
    """Makes an object's coroutine methods callable as on an actor handle."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        remote = SimpleNamespace(remote=lambda *a, **k: asyncio.ensure_future(method(*a, **k)))
        remote.options = lambda **_: remote
        return remote


def handle(actor: Any, name: str = "actor") -> Handle[Any]:
    """A handle of a Ray actor whose class is a stand-in, or is not told."""
    return Handle(name, actor)


def remote(target: Any, name: str = "actor") -> Handle[Any]:
    """A handle of an object in this process."""
    return Handle(name, Remote(target))


class PoolHere:
    """A pool of processes whose one object is in this process."""

    idle, low_priority = True, False

    def __init__(self, create: Callable[[], Any], **_: Any) -> None:
        self._create = create

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Any]:
        with self._failing("create"):
            self._object = self._create()
        yield self

    async def call(self, method: str, *arguments: Any, deadline_s: float, serve: Any = None) -> Any:
        with self._failing(method):
            return getattr(self._object, method)(*arguments)

    def lower_priority(self) -> None: ...

    async def close(self) -> None: ...

    @contextlib.contextmanager
    def _failing(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # as in a process
            raise failed_call(method, error) from error


@dataclass
class ScriptedChat:
    """A chat model whose answers a function gives, from the messages and the seed; coroutines may wait."""

    reply: Callable[[Messages, int], Any]
    seed: int = 0
    asked: list[tuple[Messages, int, Mapping[str, Any]]] = field(default_factory=list)

    def with_seed(self, seed: int | None) -> Self:
        return type(self)(self.reply, seed or 0, self.asked)

    async def chat(self, messages: Messages, **sampling: Any) -> str:
        import jsonschema  # here, for few who import this module need it

        jsonschema.Draft202012Validator.check_schema(sampling.get("json_schema") or {})
        self.asked.append((messages, self.seed, sampling))
        found = self.reply(messages, self.seed)
        return await found if inspect.iscoroutine(found) else found


def shown(messages: Messages, name: str) -> str:
    """The text between the tags of this name, in the last of the messages."""
    [found] = re.findall(rf"<{name}-(\w+)>\n(.*?)\n</{name}-\1>", messages[-1]["content"], re.DOTALL)
    return found[1]


@contextlib.asynccontextmanager
async def chat_endpoint(reply: Callable[[Mapping[str, str], dict[str, Any]], Any]) -> AsyncIterator[str]:
    """Gives the URL of an endpoint such as OpenAI's; ``reply`` gives the answer, or a whole response, from the headers
    and the body of a request."""
    from aiohttp import test_utils, web  # here, as above

    async def complete(request: web.Request) -> web.Response:
        found = reply(request.headers, await request.json())
        if isinstance(found, web.Response):
            return found
        choice = {"index": 0, "message": {"role": "assistant", "content": found}, "finish_reason": "stop"}
        about = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return web.json_response({**about, "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with test_utils.TestServer(app) as server:
        yield str(server.make_url("/v1"))


def says(text: str) -> ScriptedChat:
    """A chat model that always gives this answer."""
    return ScriptedChat(lambda messages, seed: text)
