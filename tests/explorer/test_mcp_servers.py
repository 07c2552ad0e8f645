"""MCP servers: their tools are listed, checked and called, and a server in trouble is replaced."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayrft.errors import ConfigError
from rayrft.explorer.tools.mcp_servers import McpServer
from rayrft.explorer.tools.toolbox import Toolbox, ToolLimits, ToolResult
from tests.e2e.conftest import free_port
from tests.explorer.toolboxes import run

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


async def test_a_server_s_tools_are_listed_checked_and_called_and_it_is_replaced_if_it_hangs_or_dies(
    tmp_path: Path,
) -> None:
    server = McpServer("sample", command=SERVER, env={"LIVES": str(tmp_path / "lives")})
    of_server = Toolbox([], {}, [server], ToolLimits(timeout_s=60.0, characters=100))
    tool = of_server.tools["multiply"]
    assert tool.description == "Multiply two whole numbers." and tool.parameters["required"] == ["a", "b"]
    found = await run(
        of_server,
        ("multiply", {"a": 6, "b": 7}),
        ("multiply", {"a": "6", "b": 7}),
        ("fail", {"text": "no such key"}),
        ("flood", {"megabytes": 1}),
        ("multiply", {"a": 2, "b": 3}),
    )
    assert [each.error for each in found] == [None, "arguments", "failed", None, None]
    assert (found[0].text, found[4].text) == ("42", "6")
    assert "$.a: '6' is not of type 'integer'" in found[1].text and "Error executing tool fail" in found[2].text
    assert found[3].text.endswith("[the first 100 of 1,048,576 characters]")
    patient, of_server.limits = of_server.limits, ToolLimits(timeout_s=1.0)
    [hung] = await run(of_server, ("wait_forever", {}))
    assert hung.error == "timeout"
    of_server.limits = patient
    assert await run(of_server, ("lives", {})) == [ToolResult("2")], "one lists the tools, one has served all calls"

    of_server.limits = ToolLimits(timeout_s=1.0)
    [hung] = await run(of_server, ("block", {}))
    assert hung.error == "timeout"
    of_server.limits = patient
    assert await run(of_server, ("lives", {})) == [ToolResult("3")]
    assert await run(of_server, ("leave", {"before": 3})) == [ToolResult("stayed")], "the call is tried once more"
    [left] = await run(of_server, ("leave", {}))
    assert left.error == "failed" and "died twice" in left.text
    assert await run(of_server, ("multiply", {"a": 6, "b": 7})) == [ToolResult("42")]
    await of_server.close()


async def test_a_server_at_an_address_is_called(tmp_path: Path) -> None:
    port = free_port()
    env = {**os.environ, "LIVES": str(tmp_path / "lives")}
    process = await asyncio.create_subprocess_exec(*SERVER, str(port), env=env, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        await process.stderr.readuntil(b"running on")
        server = McpServer("sample", url=f"http://127.0.0.1:{port}/mcp", tools=["multiply"])
        toolbox = Toolbox([], {}, [server], ToolLimits())
        assert list(toolbox.tools) == ["multiply"]
        assert await run(toolbox, ("multiply", {"a": 6, "b": 7})) == [ToolResult("42")]
        await toolbox.close()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "either a command"),
        ({"command": "python server.py"}, "a list of words"),
        ({"command": ["/no/such/program"]}, "does not come up.*No such file"),
        ({"command": [sys.executable, "-c", ""]}, "does not come up"),
        ({"url": "http://127.0.0.1:9/mcp"}, "does not come up"),
        ({"command": SERVER, "env": {"LIVES": "/dev/null"}, "tools": ["multipy"]}, "Did you mean 'multiply'"),
    ],
)
def test_what_is_no_server_is_refused_at_once(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        McpServer("sample", **options)
