"""Tools that a model may call: plain functions, classes with an object for each attempt, and MCP servers."""

from rayrft.explorer.tools.base import Tool, register_tool, tools

__all__ = ["Tool", "register_tool", "tools"]
