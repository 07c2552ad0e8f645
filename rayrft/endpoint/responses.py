"""OpenAI's Responses API: its requests as those of chat completions, and the form of its responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field, model_validator

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.protocol import ChatRequest, Limit, ShortName, runs_at_server
from rayrft.endpoint.replies import CheckedRequest, DecodedAnswer, ReplyForm, TextPiece, as_event
from rayrft.runtime.serving.http import UnsupportedParameter

_Item = dict[str, Any]
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}
_OPERATION = {"enum": ["create_file", "update_file", "delete_file"]}
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "local_shell": ("action", {"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _NUMBER}),
    "shell": ("action", {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}),
    "apply_patch": ("operation", {"type": _OPERATION, "path": _TEXT, "diff": _TEXT}),
}
"""Tools without a schema of their own: the field of a call that has its arguments, and the parameters with which the
policy sees them as functions; the first is required."""


class ResponsesRequest(ChatRequest):
    """The body of ``/v1/responses``: its input becomes messages. Nothing is stored, so the input is the whole
    conversation."""

    max_output_tokens: Limit | None = None
    include: list[ShortName] = Field(default_factory=list, max_length=16)
    kinds: dict[str, tuple[str, str]] = Field(default_factory=dict)
    """Types and namespaces of tools by the name with which the policy sees them: all are functions to it."""
    text: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_input(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if "input" not in body:
            raise UnsupportedParameter("input", "is required")
        given, tools = body["input"], body.get("tools") or []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise UnsupportedParameter("input", "is neither a text nor a list of items")
        if not isinstance(tools, list):
            raise UnsupportedParameter("tools", "is not a list")
        messages = _messages(items)
        if instructions := body.get("instructions"):
            messages.insert(0, {"role": "system", "content": instructions})
        rest = {key: value for key, value in body.items() if key not in ("input", "instructions", "tools", "reasoning")}
        reasoning = body.get("reasoning")
        rest["reasoning_effort"] = reasoning.get("effort") if isinstance(reasoning, dict) else None
        shown, kinds = list[Any](), dict[str, tuple[str, str]]()
        for tool in tools:
            kind, inner = (tool.get("type"), tool.get("tools")) if isinstance(tool, dict) else (None, None)
            named = kind == "namespace" and isinstance(inner, list) and isinstance(tool.get("name"), str)
            namespace = tool["name"] if named else ""
            for each in inner or () if namespace else () if runs_at_server(tool) else (tool,):
                shown.append({"type": "function", "function": (function := _function(each))})
                function["name"] = _in_namespace(function["name"], namespace)
                kinds[function["name"]] = each["type"], namespace
        text = body.get("text")
        form = text.get("format") if isinstance(text, dict) else None
        if not isinstance(form, dict | None):
            raise UnsupportedParameter("text.format", "is not an object")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
        rest |= {"response_format": form} if form is not None else {}
        return {**rest, "messages": messages, "tools": shown, "kinds": kinds}

    @model_validator(mode="after")
    def _plain_text(self) -> ResponsesRequest:
        for name in ("n", "max_tokens", "max_completion_tokens", "logprobs"):  # of chat completions alone
            if getattr(self, name) != type(self).model_fields[name].default:
                raise UnsupportedParameter(name, "is not supported")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if "message.output_text.logprobs" in self.include else None


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Return the items of a conversation as messages: a call belongs to the preceding answer."""
    messages = list[dict[str, Any]]()
    for number, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        try:
            if kind == "message":
                messages.append({"role": item["role"], "content": item["content"]})
            elif kind.removesuffix("_call") in ("function", "custom_tool", *_CLIENT_TOOLS) and kind.endswith("_call"):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = {"id": item["call_id"], "type": "function", "function": _called(item, kind)}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif kind.endswith("_call_output"):
                result = item["status"] if item.get("output") is None else item["output"]
                if kind == "shell_call_output":
                    result = json.dumps(result)
                name = item.get("call_id") or item["id"]
                messages.append({"role": "tool", "tool_call_id": name, "content": result})
            elif kind not in ("reasoning", "web_search_call"):  # the tokens of a session have it already
                raise UnsupportedParameter(f"input.{number}", f"is a {kind}, which is not supported")
        except (KeyError, TypeError, AttributeError) as error:
            raise UnsupportedParameter(f"input.{number}", f"is not a whole {kind}: {error!r}") from None
    return messages


def _called(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return an item of a call as a call of a function."""
    if kind == "function_call":
        given = item["arguments"]
    elif kind == "custom_tool_call":
        given = json.dumps({"input": item["input"]})
    else:
        field, parameters = _CLIENT_TOOLS[name := kind.removesuffix("_call")]
        asked = {key: item[field][key] for key in parameters if item[field].get(key) is not None}
        return {"name": name, "arguments": json.dumps(asked)}
    return {"name": _in_namespace(item["name"], item.get("namespace")), "arguments": given}


def _in_namespace(name: str, namespace: str | None) -> str:
    return f"{namespace}.{name}" if namespace else name


def _function(tool: Any) -> dict[str, Any]:
    """Return a tool of Responses as a function."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind in _CLIENT_TOOLS:
        parameters = _CLIENT_TOOLS[kind][1]
        schema = {"type": "object", "properties": parameters, "required": [next(iter(parameters))]}
        return {"name": kind, "description": "", "parameters": schema}
    if kind not in ("function", "custom") or not isinstance(tool.get("name"), str):
        raise UnsupportedParameter("tools", f"has a tool of type {kind!r} that is not supported, or has no name")
    if kind == "function":
        return {key: value for key, value in tool.items() if key not in ("type", "strict") and value is not None}
    form, about = tool.get("format"), tool.get("description") or ""
    if isinstance(form, dict) and "definition" in form:
        about = f"{about}\nThe input follows this grammar ({form.get('syntax')}):\n{form['definition']}"
    text = {"type": "object", "properties": {"input": _TEXT}, "required": ["input"]}
    return {"name": tool["name"], "description": about, "parameters": text}


class ResponseReply(ReplyForm):
    """The form of ``/v1/responses``."""

    def __init__(self, asks: Sequence[CheckedRequest], model: str, tokenizer: ChatTokenizer) -> None:
        super().__init__(asks, model, tokenizer)
        [ask] = asks
        assert isinstance(ask.body, ResponsesRequest)
        self._common |= {
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": ask.body.parallel_tool_calls,
            "previous_response_id": None,
            "temperature": ask.sampling.temperature,
            "tool_choice": "auto",
            "tools": [],
            "top_p": ask.sampling.top_p,
        }
        self._message, self._thoughts = f"msg_{ask.response}", f"rs_{ask.response}"
        self._kinds = ask.body.kinds
        self._thinks = self._speaks = False
        """Whether the stream has begun the item of the reasoning, and of the text."""
        self._events = 0

    def whole(self, answers: list[DecodedAnswer]) -> dict[str, Any]:
        [answer] = answers
        cut = answer.is_truncated
        prompt, sampled = self._usage(answers)
        return {
            **self._common,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items(answer),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def begin(self) -> list[str]:
        response = {**self._common, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def piece(self, piece: TextPiece) -> list[str]:
        events = list[str]()
        if piece.reasoning:
            if not self._thinks:
                self._thinks = True
                events.append(self._event("response.output_item.added", output_index=0, item=self._reasoning("")))
            events.append(self._event("response.reasoning_text.delta", delta=piece.reasoning, **self._thought))
        if piece.text:
            events += [] if self._speaks else self._begin_text()
            logprobs = self._entries(piece.chunk) or []
            events.append(self._event("response.output_text.delta", delta=piece.text, logprobs=logprobs, **self._place))
        return events

    def end(self, answer: DecodedAnswer) -> list[str]:
        events, items = self.piece(answer.tail), self._items(answer)
        if any(item["type"] == "message" for item in items) and not self._speaks:
            events += self._begin_text()
        for index, item in enumerate(items):
            if item["type"] == "message":
                [part] = item["content"]
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._event("response.output_text.done", **done, **self._place))
                events.append(self._event("response.content_part.done", part=part, **self._place))
            elif item["type"] == "reasoning":
                text = item["content"][0]["text"]
                events.append(self._event("response.reasoning_text.done", text=text, **self._thought))
            else:
                events += self._call(index, item)
            events.append(self._event("response.output_item.done", output_index=index, item=item))
        return events

    def done(self, answers: list[DecodedAnswer]) -> list[str]:
        response = self.whole(answers)
        return [self._event(f"response.{response['status']}", response=response)]

    @property
    def _place(self) -> dict[str, Any]:
        """Where the text is: it is the first item but for the reasoning."""
        return {"item_id": self._message, "output_index": int(self._thinks), "content_index": 0}

    @property
    def _thought(self) -> dict[str, Any]:
        return {"item_id": self._thoughts, "output_index": 0, "content_index": 0}

    def _begin_text(self) -> list[str]:
        self._speaks = True
        item, part = self._text("", [], "in_progress"), _part("", [])
        return [
            self._event("response.output_item.added", output_index=int(self._thinks), item={**item, "content": []}),
            self._event("response.content_part.added", part=part, **self._place),
        ]

    def _call(self, index: int, item: _Item) -> Iterator[str]:
        place = {"item_id": item["id"], "output_index": index}
        given = next((name for name in ("input", "arguments") if name in item), None)
        begun = {key: "" if key == given else value for key, value in item.items()} | {"status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        if given is not None:
            kind = "response.custom_tool_call_input" if given == "input" else "response.function_call_arguments"
            name = {"name": item["name"]} if given == "arguments" else {}
            yield self._event(f"{kind}.delta", delta=item[given], **place)
            yield self._event(f"{kind}.done", **{given: item[given]}, **name, **place)

    def _items(self, answer: DecodedAnswer) -> list[_Item]:
        thoughts = [self._reasoning(answer.message.reasoning)] if answer.message.reasoning else []
        calls = [self._called(call) for call in answer.message.tool_calls]
        content = answer.message.content
        if calls and not content and not self._speaks:
            return [*thoughts, *calls]
        logprobs = self._entries(answer.completion) or []
        status = "incomplete" if answer.is_truncated else "completed"
        return [*thoughts, self._text(content, logprobs, status), *calls]

    def _called(self, call: dict[str, Any]) -> _Item:
        """Return the item of a call, of the type of its tool."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        kind, namespace = self._kinds.get(name, ("function", ""))
        given, about = json.loads(arguments), {"call_id": call["id"], "status": "completed"}
        if kind in _CLIENT_TOOLS:
            given |= {"type": "exec", "env": {}} if kind == "local_shell" else {}
            return {"type": f"{kind}_call", "id": f"{kind}_{call['id']}", **about, _CLIENT_TOOLS[kind][0]: given}
        if namespace:
            about |= {"namespace": namespace}
        about |= {"name": name.removeprefix(f"{namespace}.")}
        if kind == "custom" and isinstance(text := given.get("input"), str):
            return {"type": "custom_tool_call", "id": f"ctc_{call['id']}", **about, "input": text}
        return {"type": "function_call", "id": f"fc_{call['id']}", **about, "arguments": arguments}

    def _reasoning(self, text: str) -> _Item:
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {"type": "reasoning", "id": self._thoughts, "summary": [], "content": content}

    def _text(self, text: str, logprobs: list[dict[str, Any]], status: str) -> _Item:
        content = [_part(text, logprobs)]
        return {"type": "message", "id": self._message, "role": "assistant", "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> str:
        self._events += 1
        return f"event: {kind}\n" + as_event({"type": kind, "sequence_number": self._events - 1, **fields})


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
