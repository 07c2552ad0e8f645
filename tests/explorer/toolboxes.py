"""Calls of tools in one session of a toolbox."""

from __future__ import annotations

from typing import Any

from rayrft.explorer.tools.call_formats import ToolCall
from rayrft.explorer.tools.toolbox import Toolbox, ToolResult

HERE = "tests.explorer.sample_tools"


async def run(toolbox: Toolbox, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    async with toolbox.session() as session:
        return await session.run([ToolCall(*call) for call in calls])
