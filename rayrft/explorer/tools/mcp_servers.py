"""Tools of servers that speak the Model Context Protocol; the extra `mcp` has the client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayrft.errors import CallFailed, CallTimeout, ConfigError, nearest
from rayrft.explorer.tools.base import Tool
from rayrft.runtime.waits import in_thread, settle

if TYPE_CHECKING:
    import mcp_types
    from mcp import Client

_START_S = 60.0
"""Seconds in which a server must be up."""

_PROBE_S = 5.0
"""Seconds, but at most those of a call, in which a server must answer after a call that overran."""


class McpServer:
    """A server that is started by a ``command`` and spoken to by its standard streams, or that is at a ``url``
    (streamable HTTP). ``tools`` names those to use, by default all of them.

    The tools are listed at once, by a connection of its own. Raises ConfigError if that is not possible.
    """

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str] = (),
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        tools: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        if bool(command) == bool(url) or isinstance(command, str):
            raise self._unusable("needs either a command, a list of words, or a url", command or url)
        if importlib.util.find_spec("mcp") is None:
            raise self._unusable("needs the package mcp", None, remedy="pip install 'rayrft[mcp]'")
        self._command, self._url, self._env, self._cwd = list(command), url, env, cwd
        self._connection: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.tools = self._listed(tools)

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call a tool; return the text of its result. A call whose server dies is tried once more, on a new one.

        Raises CallFailed, and CallTimeout.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        for _ in range(2):
            client = await self._connected()
            try:
                async with asyncio.timeout(timeout_s):
                    result = await client.call_tool(name, arguments)
            except TimeoutError:
                await self._drop_unless_it_answers(client, min(timeout_s, _PROBE_S))
                raise CallTimeout(f"not done within {timeout_s:g} s") from None
            except MCPError as error:
                if error.code != CONNECTION_CLOSED:
                    raise CallFailed(error.message) from None
                self._drop(client)
            except Exception as error:  # what a server says may be anything
                raise CallFailed(f"{type(error).__name__}: {error}") from None
            else:
                text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
                if result.is_error:
                    raise CallFailed(text)
                return text
        raise CallFailed(f"the server {self.name!r} died twice")

    async def close(self) -> None:
        """End the connection, and a server that was started for it."""
        if self._connection is not None:
            self._end(self._connection)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _connected(self) -> Client:
        """Connect, unless it is done. Raises CallFailed."""
        if self._connection is None or self._connection.done():
            self._client = asyncio.get_running_loop().create_future()
            self._connection = asyncio.create_task(self._connect(self._client))
        assert self._client is not None
        try:
            return await asyncio.shield(self._client)
        except ConfigError as error:
            raise CallFailed(f"the server {self.name!r} {error.problem}") from None

    async def _connect(self, ready: asyncio.Future[Client]) -> None:
        """Be the one task that opens and closes a connection, as its library wants it, until it is cancelled."""
        try:
            async with self._open() as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # a transport may fail in any way; calls in flight fail by themselves
            settle(ready, error)
        finally:
            ready.cancel()  # so that no call waits for it

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[Client]:
        """Connect. Raises ConfigError if that is not possible."""
        from mcp import Client, StdioServerParameters

        target: Any = self._url
        if self._command:
            program, *arguments = self._command
            env = dict(self._env) if self._env else None
            target = StdioServerParameters(command=program, args=arguments, env=env, cwd=self._cwd)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(_START_S):
                    client = await stack.enter_async_context(Client(target))
            except Exception as error:  # a program or an address may fail in any way
                problem, remedy = f"does not come up: {_cause(error)}", "start it, or correct its command or url"
                raise self._unusable(problem, self._command or self._url, remedy) from None
            yield client

    def _drop(self, client: Client) -> None:
        """Let the next call connect again, if this connection is still the current one."""
        if self._client is not None and self._client.done() and self._client.result() is client:
            assert self._connection is not None
            self._end(self._connection)
            self._connection = self._client = None

    async def _drop_unless_it_answers(self, client: Client, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await client.list_tools(cache_mode="bypass")
        except Exception:  # the server hangs or has ended: either way it cannot be used
            self._drop(client)

    def _end(self, connection: asyncio.Task[None]) -> None:
        connection.cancel()
        self._ending.add(connection)
        connection.add_done_callback(self._ending.discard)

    async def _list(self) -> list[mcp_types.Tool]:
        async with self._open() as client:
            found, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                if (cursor := page.next_cursor) is None:
                    return found

    def _listed(self, wanted: Sequence[str] | None) -> dict[str, Tool]:
        """List the tools by a loop of its own, since workflows are built where none can be awaited."""
        known = {tool.name: tool for tool in in_thread(self._list)}
        for name in wanted or ():
            if name not in known:
                raise self._unusable("has no such tool", name, remedy=nearest(name, known))
        chosen = known if wanted is None else {name: known[name] for name in wanted}
        return {name: self._described(tool) for name, tool in chosen.items()}

    def _described(self, tool: mcp_types.Tool) -> Tool:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for

        try:
            kind = validator_for(tool.input_schema, default=Draft202012Validator)
            kind.check_schema(tool.input_schema)
        except SchemaError as error:
            raise self._unusable(f"has a tool with a broken schema: {error.message}", tool.name) from None
        validator = kind(tool.input_schema)

        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            problems = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(arguments)]
            if problems:
                raise ValueError("; ".join(problems))
            return arguments

        return Tool(tool.name, tool.description or "", tool.input_schema, check)

    def _unusable(self, problem: str, value: Any, remedy: str = "") -> ConfigError:
        field = f"explorer.workflow_options.tool_calling.mcp.{self.name}"
        return ConfigError(problem, remedy, field=field, value=value)


def _cause(error: BaseException) -> str:
    """The innermost error of groups, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
