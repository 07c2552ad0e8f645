"""The loop of model and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayrft.data.chat_template import Tools
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import TRUNCATED, Task
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.tools.call_formats import (
    CallFormat,
    HermesCalls,
    MalformedCall,
    ToolCall,
    as_response,
    call_formats,
    instructed,
)
from rayrft.explorer.tools.mcp_servers import McpServer
from rayrft.explorer.tools.toolbox import Toolbox, ToolLimits, ToolResult
from rayrft.explorer.tools.vllm_parsers import check_call_format, open_call_format
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows.base import register_workflow
from rayrft.runtime.handle import once

_Message = dict[str, str]


@register_workflow("tool_calling")
class ToolCalling:
    """Answers, calling ``tools`` and those of ``mcp`` servers until an answer calls none, at most ``max_turns`` answers
    in all. The last answer is scored. The model is shown what is wrong with a call; the row's metrics count it:
    ``tool_calls``, ``tool_errors``, and ``tool_<kind>`` for the kinds of errors (`ToolResult`).

    ``tools`` are registered names or ``package.module:attribute``; ``tool_options`` has the options of classes. ``mcp``
    has the parameters of `McpServer` by the server's name. ``form`` is how the model writes calls (`open_call_format`).
    The other parameters are the `ToolLimits`.
    """

    def __init__(
        self,
        tools: Sequence[str] = (),
        tool_options: Mapping[str, dict[str, Any]] | None = None,
        mcp: Mapping[str, dict[str, Any]] | None = None,
        form: str = "auto",
        max_turns: int = 8,
        **limits: Any,
    ) -> None:
        check_call_format(form, "explorer.workflow_options.tool_calling.form")
        servers = [McpServer(name, **options) for name, options in (mcp or {}).items()]
        self._toolbox = Toolbox(tools, tool_options or {}, servers, ToolLimits(**limits))
        if not self._toolbox.tools:
            raise TypeError("there are no tools: name some in 'tools' or 'mcp'")
        self.call_format, self._max_turns = form, max_turns

    def opening(
        self, task: Task, tokenizer: ChatTokenizer, form: CallFormat | None = None
    ) -> tuple[list[_Message], Tools]:
        """Return the messages and tools of a task's first prompt, with the instructions of a form of calls, if the chat
        template needs some: by default those of a form of this package."""
        if tokenizer.template.takes_tools:
            return task.messages, self._toolbox.schemas
        if form is None:
            form = call_formats.get(self.call_format)() if self.call_format in call_formats else HermesCalls()
        return instructed(task.messages, self._toolbox.schemas, form.instructions), ()

    @once
    async def _form(self, tokenizer: ChatTokenizer) -> CallFormat:
        return await open_call_format(self.call_format, tokenizer, "explorer.workflow_options.tool_calling.form")

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        form = await self._form(model.tokenizer)
        messages, schemas = self.opening(task, model.tokenizer, form)
        trajectory = model.start(messages, task.images, schemas)
        async with self._toolbox.session() as session:
            for _ in range(self._max_turns - 1):
                calls = await form.read(await trajectory.act(), self._toolbox.schemas)
                if not calls or trajectory.stop_reason in TRUNCATED:
                    return trajectory
                outcomes = await session.run(calls)
                _count(trajectory, outcomes)
                trajectory.observe(_told(calls, outcomes, model.tokenizer))
        await trajectory.act()
        return trajectory


def _told(
    calls: list[ToolCall | MalformedCall], outcomes: list[ToolResult], tokenizer: ChatTokenizer
) -> list[_Message]:
    """Return the results as messages: of role ``tool``, or as one of the user where the chat template has no such."""
    texts = [tokenizer.defuse(outcome.text) for outcome in outcomes]
    if tokenizer.template.takes_tools:
        names = [call.name if isinstance(call, ToolCall) else "" for call in calls]
        return [{"role": "tool", "name": name, "content": text} for name, text in zip(names, texts, strict=True)]
    return [{"role": "user", "content": "\n".join(map(as_response, texts))}]


def _count(trajectory: Trajectory, outcomes: list[ToolResult]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    trajectory.count("tool_calls", len(outcomes))
    trajectory.count("tool_errors", len(errors))
    for kind in errors:
        trajectory.count(f"tool_{kind}")
