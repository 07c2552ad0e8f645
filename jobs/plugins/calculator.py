"""A tool of one's own: `explorer.workflow_options: {tool_calling: {tools: [multiply]}}`."""

import rayrft


@rayrft.register_tool("multiply")
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b
