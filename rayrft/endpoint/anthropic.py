"""Anthropic's Messages API: its requests as those of chat completions, and the form of its responses and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import model_validator

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.protocol import ChatRequest, runs_at_server
from rayrft.endpoint.replies import CheckedRequest, DecodedAnswer, ReplyForm, TextPiece, as_event
from rayrft.runtime.serving.http import ApiError, UnsupportedParameter

_DROPPED = ("thinking", "redacted_thinking")
"""Blocks of earlier answers that the tokens of a session have already."""
_NO_MATTER = {"context_management", "container", "inference_geo", "cache_control"}
"""Parameters of which any value changes nothing here; nor do bounds of thinking and ``output_config.effort``."""
_OF_CHATS = {"n", "logprobs", "top_logprobs", "response_format", "max_completion_tokens", "reasoning_effort"}
"""Parameters of chat completions alone."""
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_NUMBERS, _DIRECTIONS = {"type": "array", "items": _NUMBER}, {"enum": ["up", "down", "left", "right"]}
_FILE = {name: _TEXT for name in ("path", "file_text", "old_str", "new_str", "insert_text")}
_EDIT = {"command": _TEXT, **_FILE, "insert_line": _NUMBER, "view_range": _NUMBERS}
_POINT = {"action": _TEXT, "coordinate": _NUMBERS, "start_coordinate": _NUMBERS, "text": _TEXT, "duration": _NUMBER}
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": ("", {"command": _TEXT, "restart": {"type": "boolean"}}),
    "text_editor": ("Commands: view, create, str_replace, insert.", _EDIT),
    "memory": (
        "Commands: view, create, str_replace, insert, delete, rename.",
        {**_EDIT, "old_path": _TEXT, "new_path": _TEXT},
    ),
    "computer": (
        "Actions: screenshot, mouse_move, left_click, right_click, double_click, left_click_drag, scroll, type, key.",
        {**_POINT, "scroll_direction": _DIRECTIONS, "scroll_amount": _NUMBER},
    ),
}
"""Tools of the client without a schema, by type without its date: their description and parameters as functions."""
_BOUNDS = "display_width_px", "display_height_px", "max_characters"
"""Fields of such tools that the policy sees, too."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


class MessagesRequest(ChatRequest):
    """The body of ``/v1/messages``, and of ``/v1/messages/count_tokens``."""

    @model_validator(mode="before")
    @classmethod
    def _from_messages(cls, body: Any) -> Any:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return body
        given = {key: value for key, value in body.items() if value is not None and key not in _NO_MATTER}
        for other in _OF_CHATS & given.keys():
            raise UnsupportedParameter(other, "is not supported")
        messages = list[dict[str, Any]]()
        if system := given.pop("system", None):
            messages.append({"role": "system", "content": _text(system, "system")})
        for number, message in enumerate(given["messages"]):
            messages += _converted(message, f"messages.{number}")
        made: dict[str, Any] = {**given, "messages": messages}
        if "stop_sequences" in made:
            made["stop"] = made.pop("stop_sequences")
        if not isinstance(tools := made.get("tools", []), list):
            raise UnsupportedParameter("tools", "is not a list")
        made["tools"] = [_tool(tool) for tool in tools if not runs_at_server(tool)]
        if _entry(made.pop("thinking", {}), "type") == "disabled":
            made["reasoning_effort"] = "none"
        if form := _entry(made.pop("output_config", {}), "format"):
            made["response_format"] = {"type": _entry(form, "type"), "json_schema": form}
        if choice := made.pop("tool_choice", None):
            kind = _entry(choice, "type")
            made["parallel_tool_calls"] = not _entry(choice, "disable_parallel_tool_use")
            if kind == "tool":
                made["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
            elif isinstance(kind, str) and kind in _CHOICES:
                made["tool_choice"] = _CHOICES[kind]
            else:
                raise UnsupportedParameter("tool_choice", f"is of type {kind!r}")
        user = made.pop("metadata", {})
        if isinstance(user, dict) and isinstance(name := user.get("user_id"), str):
            made["user"] = name[-256:]  # what tells sessions apart stands at its end
        return made


def _entry(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _converted(message: Any, place: str) -> list[dict[str, Any]]:
    """Return the messages of chat completions for one of Anthropic: the results of tools are messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise UnsupportedParameter(f"{place}.role", "is not user or assistant")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise UnsupportedParameter(f"{place}.content", "is neither a text nor a list of blocks")
    results, parts, calls = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for number, block in enumerate(map(_document, content)):
        kind, where = _entry(block, "type"), f"{place}.content.{number}"
        if kind == "text":
            parts.append({"type": "text", "text": "\n" * bool(parts) + _text([block], where)})
        elif kind == "image":
            parts.append(_image(block))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            answer = block.get("content") or ""
            if isinstance(answer, list):  # its images follow it in a message of the user
                images = [_image(each) for each in answer if _entry(each, "type") == "image"]
                shown = [_document(each) for each in answer if _entry(each, "type") != "image"]
                answer, parts = shown, [*parts, *images]
            answer = _text(answer, f"{where}.content")
            failed = "Error: " if block.get("is_error") and not answer.lower().startswith("error") else ""
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": failed + answer})
        elif kind not in _DROPPED:
            raise UnsupportedParameter(where, f"is of type {kind!r}, which is not supported")
    said = [{"role": role, "content": parts, **({"tool_calls": calls} if calls else {})}]
    return [*results, *(said if parts or calls else [])]


def _image(block: dict[str, Any]) -> dict[str, Any]:
    given = source if isinstance(source := block.get("source"), dict) else {}
    url = f"data:{given.get('media_type')};base64,{given.get('data')}" if "data" in given else given.get("url")
    return {"type": "image_url", "image_url": url}


def _document(block: Any) -> Any:
    """Return a document of plain text as a block of text, with its title; any other block as it is."""
    if _entry(block, "type") != "document" or _entry(source := block.get("source"), "type") != "text":
        return block
    texts = [each for each in (block.get("title"), block.get("context"), source.get("data")) if each is not None]
    return {"type": "text", "text": "\n".join(texts) if all(isinstance(each, str) for each in texts) else None}


def _text(blocks: Any, place: str) -> str:
    if isinstance(blocks, str):
        return blocks
    if not isinstance(blocks, list) or not all(isinstance(_entry(block, "text"), str) for block in blocks):
        raise UnsupportedParameter(place, "has a block that is not a text")
    return "\n".join(block["text"] for block in blocks)


def _tool(tool: Any) -> Any:
    if known := _CLIENT_TOOLS.get(str(_entry(tool, "type")).rpartition("_")[0]):
        shown = " ".join([known[0], *(f"{name}: {tool[name]}." for name in _BOUNDS if name in tool)])
        schema = {"type": "object", "properties": known[1], "required": [next(iter(known[1]))]}
        tool = {"name": tool.get("name"), "description": shown, "input_schema": schema}
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        problem = f"has a tool of the server ({_entry(tool, 'type')!r}): give functions with input_schema"
        raise UnsupportedParameter("tools", problem)
    about = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**about, "parameters": tool["input_schema"]}}


class MessagesReply(ReplyForm):
    """The form of ``/v1/messages``: one answer as blocks of thinking, text and calls of tools."""

    def __init__(self, asks: Sequence[CheckedRequest], model: str, tokenizer: ChatTokenizer) -> None:
        super().__init__(asks, model, tokenizer)
        self._common |= {"type": "message", "role": "assistant", "stop_sequence": None}
        self._blocks = 0
        """Number of blocks that the stream has begun."""
        self._open: str | None = None
        """The type of the block that is being streamed."""

    def whole(self, answers: list[DecodedAnswer]) -> dict[str, Any]:
        [answer] = answers
        prompt, sampled = self._usage(answers)
        message = answer.message
        blocks: list[dict[str, Any]] = (
            [{"type": "thinking", "thinking": message.reasoning, "signature": ""}] if message.reasoning else []
        )
        if message.content or not message.tool_calls:
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls:
            blocks.append({**_use(call), "input": json.loads(call["function"]["arguments"])})
        usage = {"input_tokens": prompt, "output_tokens": sampled}
        return {**self._common, "content": blocks, **_end(answer), "usage": usage}

    def begin(self) -> list[str]:
        usage = {"input_tokens": len(self._ask.prompt), "output_tokens": 0}
        message = {**self._common, "content": [], "stop_reason": None, "usage": usage}
        return [_event("message_start", message=message)]

    def piece(self, piece: TextPiece) -> list[str]:
        events = []
        if piece.reasoning:
            events += self._begin("thinking", {"thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": piece.reasoning}))
        if piece.text:
            events += self._begin("text", {"text": ""})
            events.append(self._delta({"type": "text_delta", "text": piece.text}))
        return events

    def end(self, answer: DecodedAnswer) -> list[str]:
        events = self.piece(answer.tail)
        if not self._blocks and not answer.message.tool_calls:
            events += self._begin("text", {"text": ""})
        for call in answer.message.tool_calls:
            events += [*self._stop(), *self._begin("tool_use", {**_use(call), "input": {}})]
            events.append(self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]}))
        _, sampled = self._usage([answer])
        return [*events, *self._stop(), _event("message_delta", delta=_end(answer), usage={"output_tokens": sampled})]

    def done(self, answers: list[DecodedAnswer]) -> list[str]:
        return [_event("message_stop")]

    def failed(self, error: ApiError) -> str:
        return _event(**as_anthropic(error).body)

    def _begin(self, kind: str, block: dict[str, Any]) -> list[str]:
        if self._open == kind:
            return []
        stopped = self._stop()
        self._open, self._blocks = kind, self._blocks + 1
        return [*stopped, _event("content_block_start", index=self._blocks - 1, content_block={"type": kind, **block})]

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> list[str]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._blocks - 1)]


def as_anthropic(error: ApiError) -> ApiError:
    """Return an error whose body has Anthropic's form."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    error.body = {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}
    return error


def _use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _end(answer: DecodedAnswer) -> dict[str, str | None]:
    ended = "stop_sequence" if answer.stopped_by is not None else "end_turn"
    reason = "max_tokens" if answer.is_truncated else "tool_use" if answer.message.tool_calls else ended
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}


def _event(type: str, **fields: Any) -> str:
    return f"event: {type}\n" + as_event({"type": type, **fields})
