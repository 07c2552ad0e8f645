"""Execution of calls: each under a deadline, blocking ones in processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayrft.errors import CallFailed, CallTimeout, ConfigError
from rayrft.explorer.tools.base import TOOLS, Tool, ToolHost, find_tool, function_tool, methods, shortened
from rayrft.explorer.tools.call_formats import MalformedCall, ToolCall
from rayrft.explorer.tools.mcp_servers import McpServer
from rayrft.registry import loaded_plugins
from rayrft.runtime.processes.pool import ProcessPool
from rayrft.runtime.processes.worker import Worker, call_here

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolResult:
    """The message that the model is shown about a call. ``error`` is the kind of its failure: ``malformed``,
    ``unknown``, ``arguments``, ``timeout`` or ``failed``."""

    text: str
    error: str | None = None


@dataclass(frozen=True)
class ToolLimits:
    """Seconds that a call may take, characters of a result, calls of one answer, and processes that run functions."""

    timeout_s: float = 30.0
    characters: int = 4000
    calls: int = 16
    processes: int = 4


class Toolbox:
    """All tools of a run. Functions run in a pool of processes, those of an attempt's objects in one of its own, and
    ``async`` functions in the event loop. Raises ConfigError for a tool that cannot be found, described or built."""

    def __init__(
        self,
        names: Sequence[str],
        options: Mapping[str, dict[str, Any]],
        servers: Sequence[McpServer],
        limits: ToolLimits,
    ) -> None:
        self.tools: dict[str, Tool] = {}
        self.limits = limits
        self._async: dict[str, Callable[..., Any]] = {}
        self._functions: dict[str, dict[str, Any]] = {}
        self._classes: dict[str, dict[str, Any]] = {}
        self._methods: set[str] = set()
        self._failed: set[str] = set()
        self._servers: dict[str, McpServer] = {}
        for path in names:
            self._add(path, options.get(path, {}))
        if unused := options.keys() - set(names):
            raise ConfigError("has options for a tool that is not among the tools", field=TOOLS, value=sorted(unused))
        for server in servers:
            for tool in server.tools.values():
                self._describe(tool)
                self._servers[tool.name] = server
        self.schemas = tuple(tool.schema for tool in self.tools.values())
        pool = partial(ProcessPool, plugins=loaded_plugins(), answer_limit=8 * limits.characters + (64 << 10))
        self._pool = pool(partial(ToolHost, self._functions), processes=limits.processes, spares=limits.processes)
        self.objects = pool(partial(ToolHost, self._classes), processes=4096)  # attempts whose objects live at once

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[ToolSession]:
        """Open what one attempt calls tools by; its objects are closed in the end."""
        async with contextlib.AsyncExitStack() as lease:
            yield ToolSession(self, lease)

    async def close(self) -> None:
        """End all processes and servers."""
        servers = (server.close() for server in {*self._servers.values()})
        await asyncio.gather(self._pool.close(), self.objects.close(), *servers)

    async def call(self, name: str, arguments: dict[str, Any], session: ToolSession) -> str:
        """Call a tool with arguments that fit; return its result as text. Raises CallFailed."""
        limits = self.limits
        if name in self._servers:
            return shortened(await self._servers[name].call(name, arguments, limits.timeout_s), limits.characters)
        if name in self._methods:
            return await session.call_object(name, arguments)
        if name in self._async:
            tool, function = self.tools[name], self._async[name]
            result = await call_here(name, lambda: function(**tool.check(arguments)), limits.timeout_s)
            return shortened(result, limits.characters)
        async with self._pool.lease() as worker:
            return await self.call_in(worker, name, arguments)

    async def call_in(self, worker: Worker, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool in a process."""
        limits = self.limits
        return await worker.call("call", name, arguments, limits.characters, deadline_s=limits.timeout_s)

    def warn(self, name: str, failure: str) -> None:
        """Log the first failure of every tool: it may be the tool's own fault, of which the model alone would know."""
        if name not in self._failed:
            log.warning("tool %r: %s (later failures are in the rows' metrics)", name, failure)
            self._failed.add(name)

    def _add(self, path: str, options: dict[str, Any]) -> None:
        name, piece = find_tool(path)
        if not inspect.isclass(piece):
            if options:
                raise ConfigError("is a function, which has no options", field=TOOLS, value=name)
            self._describe(function_tool(name, piece))
            if inspect.iscoroutinefunction(piece):
                self._async[name] = piece
            else:
                self._functions[path] = {}
            return
        try:
            inspect.signature(piece).bind(**options)
        except TypeError as error:
            raise ConfigError(f"{name!r} rejects its options: {error}", field=TOOLS, value=options) from None
        self._classes[path] = options
        for method, function in methods(piece).items():
            if inspect.iscoroutinefunction(function):
                raise ConfigError(f"{name}.{method} is async: make it a plain method", field=TOOLS, value=name)
            self._describe(function_tool(method, function, bound=False))
            self._methods.add(method)

    def _describe(self, tool: Tool) -> None:
        if tool.name in self.tools:
            raise ConfigError("two tools of one name", "rename one of them", field=TOOLS, value=tool.name)
        self.tools[tool.name] = tool


class ToolSession:
    """The calls of one attempt. Its objects are in one process, which is leased when the first of them is called."""

    def __init__(self, toolbox: Toolbox, lease: contextlib.AsyncExitStack) -> None:
        self._toolbox = toolbox
        self._lease = lease
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None

    async def run(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolResult]:
        """Run the calls of one answer concurrently; return their outcomes in order. Those of objects run one after
        another, and those beyond the limit not at all."""
        return await asyncio.gather(*(self._run(call, number) for number, call in enumerate(calls)))

    async def call_object(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a method of an object. Raises CallFailed."""
        async with self._lock:
            if self._worker is None:
                self._worker = await self._lease.enter_async_context(self._toolbox.objects.lease())
            try:
                return await self._toolbox.call_in(self._worker, name, arguments)
            finally:
                if not self._worker.idle:  # the process has ended: the next call begins with fresh objects
                    self._worker = None
                    await self._lease.aclose()

    async def _run(self, call: ToolCall | MalformedCall, number: int) -> ToolResult:
        tools, limits = self._toolbox.tools, self._toolbox.limits
        if isinstance(call, MalformedCall):
            return ToolResult(f"Error: {call.problem}", "malformed")
        if call.name not in tools:
            return ToolResult(f"Error: there is no tool {call.name[:80]!r}, but {', '.join(tools)}", "unknown")
        try:
            tools[call.name].check(call.arguments)
        except ValueError as error:
            return ToolResult(shortened(f"Error: the arguments of {call.name} do not fit: {error}", 1000), "arguments")
        if number >= limits.calls:
            return ToolResult(f"Error: not called, as an answer may call at most {limits.calls} tools", "failed")
        try:
            return ToolResult(await self._toolbox.call(call.name, call.arguments, self))
        except CallFailed as error:
            failure = error.problem + (f" ({error.value})" if error.value else "")
            self._toolbox.warn(call.name, failure)
            kind = "timeout" if isinstance(error, CallTimeout) else "failed"
            return ToolResult(shortened(f"Error: {failure}", limits.characters), kind)
