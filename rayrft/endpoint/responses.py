"""The form of ``/v1/responses``: one answer as a list of items, its text and its calls of tools."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.replies import CheckedRequest, DecodedAnswer, ReplyForm, TextPiece, as_event

Item = dict[str, Any]


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
        self._message = f"msg_{ask.response}"
        self._speaks = False
        """Whether the stream has begun the text's item."""
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
        if not piece.text:  # reasoning is not shown
            return []
        begin = [] if self._speaks else self._begin_text()
        logprobs = self._entries(piece.chunk) or []
        return [*begin, self._event("response.output_text.delta", delta=piece.text, logprobs=logprobs, **self._place)]

    def end(self, answer: DecodedAnswer) -> list[str]:
        events, items = self.piece(answer.tail), self._items(answer)
        if items[0]["type"] == "message" and not self._speaks:
            events += self._begin_text()
        for index, item in enumerate(items):
            if item["type"] == "message":
                [part] = item["content"]
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._event("response.output_text.done", **done, **self._place))
                events.append(self._event("response.content_part.done", part=part, **self._place))
            else:
                events += self._call(index, item)
            events.append(self._event("response.output_item.done", output_index=index, item=item))
        return events

    def done(self, answers: list[DecodedAnswer]) -> list[str]:
        response = self.whole(answers)
        return [self._event(f"response.{response['status']}", response=response)]

    @property
    def _place(self) -> dict[str, Any]:
        """Where the text is: it is the first item, if there is any."""
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _begin_text(self) -> list[str]:
        self._speaks = True
        item, part = self._text("", [], "in_progress"), _part("", [])
        return [
            self._event("response.output_item.added", output_index=0, item={**item, "content": []}),
            self._event("response.content_part.added", part=part, **self._place),
        ]

    def _call(self, index: int, item: Item) -> Iterator[str]:
        begun = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        arguments = item["arguments"]
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", delta=arguments, **place)
        yield self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"], **place)

    def _items(self, answer: DecodedAnswer) -> list[Item]:
        calls = [
            {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
            | call["function"]
            for call in answer.message.tool_calls
        ]
        content = answer.message.content
        if calls and not content and not self._speaks:
            return calls
        logprobs = self._entries(answer.completion) or []
        status = "incomplete" if answer.is_truncated else "completed"
        return [self._text(content, logprobs, status), *calls]

    def _text(self, text: str, logprobs: list[dict[str, Any]], status: str) -> Item:
        content = [_part(text, logprobs)]
        return {"type": "message", "id": self._message, "role": "assistant", "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> str:
        self._events += 1
        return f"event: {kind}\n" + as_event({"type": kind, "sequence_number": self._events - 1, **fields})


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
