"""An MCP server on its standard streams or at the port of its argument. $LIVES is a file with a dot for each start."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("sample")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@server.tool()
def lives() -> int:
    """How often the server was started."""
    return len(Path(os.environ["LIVES"]).read_text())


@server.tool()
def fail(text: str) -> None:
    """Raise."""
    raise LookupError(text)


@server.tool()
def leave(before: int = 0) -> str:
    """End the server, if it has had at most so many lives, or always."""
    if before and lives() > before:
        return "stayed"
    os._exit(9)


@server.tool()
async def wait_forever() -> None:
    """Never return, and let others be served."""
    await asyncio.Event().wait()


@server.tool()
async def block() -> None:
    """Never return, and let nobody be served."""
    time.sleep(1000)  # noqa: ASYNC251


@server.tool()
def flood(megabytes: int) -> str:
    """Say much."""
    return "x" * (megabytes << 20)


if __name__ == "__main__":
    with Path(os.environ["LIVES"]).open("a") as file:
        file.write(".")
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
