"""The form of ``/v1/responses``: one answer as a list of items, its text and its calls of tools."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.protocol import ResponsesRequest
from rayrft.endpoint.replies import CheckedRequest, DecodedAnswer, ReplyForm, TextPiece, as_event

_Item = dict[str, Any]


class ResponseReply(ReplyForm):
    """The form of ``/v1/responses``."""

    def __init__(self, asks: Sequence[CheckedRequest], model: str, tokenizer: ChatTokenizer) -> None:
        super().__init__(asks, model, tokenizer)
        [ask] = asks
        self._common |= {
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": ask.sampling.temperature,
            "tool_choice": "auto",
            "tools": [],
            "top_p": ask.sampling.top_p,
        }
        self._message, self._thoughts = f"msg_{ask.response}", f"rs_{ask.response}"
        assert isinstance(ask.body, ResponsesRequest)
        self._custom = ask.body.custom_tools
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
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

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
                events.append(
                    self._event("response.reasoning_text.done", text=item["content"][0]["text"], **self._thought)
                )
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
        if "input" in item:
            begun = {**item, "input": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=begun)
            yield self._event("response.custom_tool_call_input.delta", delta=item["input"], **place)
            yield self._event("response.custom_tool_call_input.done", input=item["input"], **place)
            return
        begun = {**item, "arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", delta=arguments, **place)
        yield self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"], **place)

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
        """Return the item of a call: of a function, or of a tool that takes a text."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        about = {"call_id": call["id"], "status": "completed", "name": name}
        text = json.loads(arguments).get("input") if name in self._custom else None
        if isinstance(text, str):
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
