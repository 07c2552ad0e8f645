"""How models write calls of tools: formats of this package, and those that vLLM's parsers read."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rayrft.data.chat_template import Tools
from rayrft.data.reasoning import split_reasoning
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError
from rayrft.registry import Registry


@dataclass(frozen=True)
class ToolCall:
    """A call as it is written. Its ``arguments`` may not fit the tool, nor may there be one of this ``name``."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be read, and why."""

    problem: str


class CallFormat(ABC):
    """A form in which models write calls of tools."""

    begins = ""
    """The text that a call begins with; empty if there is none, so that any text may be part of a call."""
    instructions = ""
    """Instructions for models whose chat template shows no tools; empty if the format needs one that does."""

    async def read(self, text: str, tools: Tools) -> list[ToolCall | MalformedCall]:
        """Return the calls in an answer, in order; none if it attempts none. Those in its reasoning are not meant."""
        try:
            return await self.read_answer(split_reasoning(text)[1], tools)
        except Exception as error:  # a format of a user's own may raise anything on what a model writes
            return [MalformedCall(f"the call cannot be read: {type(error).__name__}: {error}")]

    @abstractmethod
    async def read_answer(self, answer: str, tools: Tools) -> list[ToolCall | MalformedCall]:
        """Return the calls in an answer without reasoning."""

    def written(self, call: str) -> str:
        """Return a call, which is JSON, as the instructions tell the model to write it."""
        return call

    def content(self, text: str) -> str:
        """Return the text of an answer that has calls, without them: its reasoning, and the text before."""
        reasoning, answer = split_reasoning(text)
        return reasoning + (answer.partition(self.begins)[0] if self.begins else "")

    async def close(self) -> None:  # noqa: B027  # most formats have nothing to close
        """End the processes of the format, if it has any."""


call_formats: Registry[type[CallFormat]] = Registry("call format")
register_call_format = call_formats.register


@register_call_format("hermes")
class HermesCalls(CallFormat):
    """JSON between ``<tool_call>`` and ``</tool_call>``, as Qwen and Hermes models write it."""

    begins = "<tool_call>"
    instructions = 'To call tools, write for each call <tool_call>{"name": its name, "arguments": {…}}</tool_call>.'

    async def read_answer(self, answer: str, tools: Tools) -> list[ToolCall | MalformedCall]:
        # The last one may lack its end, as serving engines allow.
        return [_call(text.strip()) for text in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", answer, re.S)]

    def written(self, call: str) -> str:
        return f"<tool_call>{call}</tool_call>"


@register_call_format("json")
class JsonCalls(CallFormat):
    """JSON objects with a name and arguments (or parameters), bare, in a list, between other text, or in a fenced
    block, as Llama 3 writes it."""

    instructions = 'To call tools, write for each call {"name": its name, "arguments": {…}} and nothing else.'

    async def read_answer(self, answer: str, tools: Tools) -> list[ToolCall | MalformedCall]:
        calls, end = list[ToolCall | MalformedCall](), 0
        for start in re.finditer(r"\{", answer):
            if start.start() < end:
                continue
            try:
                found, end = _DECODER.raw_decode(answer, start.start())
            except (ValueError, RecursionError) as error:
                if re.match(r'\{\s*"(name|arguments|parameters)"', answer[start.start() :]):
                    return [*calls, MalformedCall(f"the call is not JSON: {error}")]
                continue
            inner = found.get("function")
            found = inner if isinstance(inner, dict) else found
            if "name" in found and {"arguments", "parameters"} & found.keys():
                calls.append(_call(found))
        return calls


@register_call_format("openai")  # vLLM's name of it
@register_call_format("harmony")
class HarmonyCalls(CallFormat):
    """Messages of the ``commentary`` channel to a function, as gpt-oss writes them."""

    begins = " to=functions."

    async def read_answer(self, answer: str, tools: Tools) -> list[ToolCall | MalformedCall]:
        found = re.findall(r"to=functions\.([\w.-]*)((?:(?!to=functions\.).)*)", answer, re.S)
        return [_harmony_call(name, rest) for name, rest in found]


def instructed(messages: list[dict[str, Any]], schemas: Tools, instructions: str) -> list[dict[str, Any]]:
    """Return the messages with the tools in the system message, for a chat template that shows none. Raises DataError
    if a format without ``instructions`` needs one that does."""
    if not instructions:
        raise DataError("the chat template shows no tools", "set the format of calls to hermes or json")
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in schemas]
    text = "\n".join(["You may call these tools:", *lines, instructions])
    if messages[0]["role"] == "system":
        text, messages = f"{messages[0]['content']}\n\n{text}", messages[1:]
    return [{"role": "system", "content": text}, *messages]


def as_response(result: str) -> str:
    """Return the result of a tool as a user's text, for a chat template that has no messages of tools."""
    return f"<tool_response>\n{result}\n</tool_response>"


_PROPERTIES = {"city": {"type": "string", "description": "Its name."}, "days": {"type": "integer"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["city", "days"]}
PROBE_TOOLS: Tools = (
    {"type": "function", "function": {"name": "get_weather", "description": "Look.", "parameters": _PARAMETERS}},
)
_PROBE = [ToolCall("get_weather", {"city": "Paris", "days": 3}), ToolCall("get_weather", {"city": "Rome", "days": 1})]


@dataclass(frozen=True)
class Probe:
    """Calls, and the text in which a chat template shows them."""

    text: str
    calls: tuple[ToolCall, ...]

    @property
    def begins(self) -> str:
        """The mark with which the calls begin; empty if they begin with none."""
        before = self.text.partition(self.calls[0].name)[0]
        found = re.match(r"\s*(<[^<>\s]+>|\[[A-Z_]+\])", before)
        return found[1] if found else ""


def shown_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call as chat templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def probe_template(tokenizer: ChatTokenizer) -> Probe | None:
    """Return calls as a tokenizer's chat template shows them, or None if it shows none."""
    template = tokenizer.template
    if not (template.takes_tools or template.shows_tool_calls):
        return None
    # Some templates want an id of nine letters, others one that is a part of the call; some show one call alone, and
    # some want arguments as a text.
    kinds = product((lambda arguments: arguments, json.dumps), ("callabc{}1", "functions.get_weather:{}"), (2, 1))
    for given, ids, count in kinds:
        calls = _PROBE[:count]
        shown = [shown_call(ids.format(n), each.name, given(each.arguments)) for n, each in enumerate(calls)]
        text = template.shown_calls(shown, PROBE_TOOLS if template.takes_tools else (), tokenizer.ends)
        if text is not None and all(each.arguments["city"] in text and each.name in text for each in calls):
            return Probe(text, tuple(calls))
    return None


def _harmony_call(name: str, rest: str) -> ToolCall | MalformedCall:
    start = re.search(r'[{\["]', rest)
    try:
        arguments = _DECODER.raw_decode(rest, start.start())[0] if start else {}
        return _call({"name": name or None, "arguments": arguments})
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the call is not JSON: {error}")


def _call(found: Any) -> ToolCall | MalformedCall:
    """Return a call from an object, or from its JSON; the arguments may be JSON, too, as in the API of OpenAI."""
    try:
        found = _DECODER.decode(found) if isinstance(found, str) else found
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return MalformedCall('a call is a JSON object with "name", a text, and "arguments", an object')
        arguments = found.get("arguments", found.get("parameters", {}))
        arguments = _DECODER.decode(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the call is not JSON: {error}")
    if not isinstance(arguments, dict):
        return MalformedCall('"arguments" is not a JSON object')
    return ToolCall(found["name"], arguments)


def calls_of(functions: Sequence[tuple[str, str]]) -> list[ToolCall | MalformedCall]:
    """Return calls from names and arguments as JSON."""
    return [_call({"name": name, "arguments": arguments or "{}"}) for name, arguments in functions]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
