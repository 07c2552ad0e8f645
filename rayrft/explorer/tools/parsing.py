"""Calls of tools in a model's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rayrft.data.reasoning import split_reasoning
from rayrft.data.tokenizer import Tools

CallForm = Literal["hermes", "json"]
"""``hermes``: JSON between ``<tool_call>`` and ``</tool_call>``, as Qwen and Hermes models write it. ``json``: JSON
objects with a name and arguments (or parameters), bare, in a list, between other text, or in a fenced block."""

INSTRUCTIONS: dict[CallForm, str] = {
    "hermes": 'To call tools, write for each call <tool_call>{"name": its name, "arguments": {…}}</tool_call>.',
    "json": 'To call tools, write for each call {"name": its name, "arguments": {…}} and nothing else.',
}
"""What models are told whose chat template shows no tools."""


@dataclass(frozen=True)
class ToolCall:
    """A call as it is written. Its ``arguments`` may not fit the tool, nor may there be one of this ``name``."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be read, and why."""

    problem: str


def instructed(messages: list[dict[str, str]], schemas: Tools, form: CallForm) -> list[dict[str, str]]:
    """Return the messages with the tools in the system message, for a chat template that shows none."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in schemas]
    text = "\n".join(["You may call these tools:", *lines, INSTRUCTIONS[form]])
    if messages[0]["role"] == "system":
        text, messages = f"{messages[0]['content']}\n\n{text}", messages[1:]
    return [{"role": "system", "content": text}, *messages]


def as_response(result: str) -> str:
    """Return the result of a tool as a user's text, for a chat template that has no messages of tools."""
    return f"<tool_response>\n{result}\n</tool_response>"


def parse_calls(answer: str, form: CallForm) -> list[ToolCall | Malformed]:
    """Return the calls in an answer, in order; none if it attempts none. Those in its reasoning are not meant."""
    answer = split_reasoning(answer)[1]
    if form == "json":
        return list(_json_calls(answer))
    # The last one may lack its end, as serving engines allow.
    return [_call(_decoded(text.strip())) for text in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", answer, re.S)]


def _json_calls(answer: str) -> Iterator[ToolCall | Malformed]:
    end = 0
    for start in re.finditer(r"\{", answer):
        if start.start() < end:
            continue
        try:
            found, end = _DECODER.raw_decode(answer, start.start())
        except (ValueError, RecursionError) as error:
            if re.match(r'\{\s*"(name|arguments|parameters)"', answer[start.start() :]):
                yield Malformed(f"the call is not JSON: {error}")
                return
            continue
        inner = found.get("function")
        found = inner if isinstance(inner, dict) else found
        if "name" in found and {"arguments", "parameters"} & found.keys():
            yield _call(found)


def _decoded(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"the call is not JSON: {error}")


def _call(found: Any) -> ToolCall | Malformed:
    if isinstance(found, Malformed):
        return found
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Malformed('a call is a JSON object with "name", a text, and "arguments", an object')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # as in the API of OpenAI
        arguments = _decoded(arguments)
    if isinstance(arguments, Malformed):
        return arguments
    if not isinstance(arguments, dict):
        return Malformed('"arguments" is not a JSON object')
    return ToolCall(found["name"], arguments)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
