"""An agent that knows nothing of rayrft: the usual loop of a model with a tool, by the official client."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import openai

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}
MULTIPLY = {"name": "multiply", "description": "Multiply two whole numbers.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": MULTIPLY}]


def solve(question: str) -> str:
    """Return the model's last answer to a question."""
    return converse(_client(), question, "any")


def converse(client: openai.OpenAI, question: str, model: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": _call(call)})
    return answer.content or ""


def _call(call: Any) -> str:
    try:
        arguments = json.loads(call.function.arguments)
        return str(int(arguments["a"]) * int(arguments["b"]))[:40]
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error}"[:40]


@cache
def _client() -> openai.OpenAI:
    return openai.OpenAI()
