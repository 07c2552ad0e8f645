"""The supported part of OpenAI's API: requests, and their conversation as messages."""

from __future__ import annotations

import hashlib
import json
from itertools import compress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rayrft.data.images import IMAGE_MARK
from rayrft.data.reasoning import ReasoningSplit
from rayrft.explorer.tools.call_formats import CallFormat, as_response
from rayrft.markup import DATA_URL
from rayrft.runtime.serving.http import UnsupportedParameter

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (0,),
    **dict.fromkeys(("length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("use_beam_search", "background", "continue_final_message"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "truncation": ("disabled", "auto"),
}
"""Parameters that are not supported, with the values that change nothing. Unknown ones are refused, too."""
_SERVER_TOOLS = ("web_search", "web_fetch", "file_search", "image_generation", "code_interpreter", "code_execution",
                 "mcp")  # fmt: skip
_NO_MATTER = {"store", "service_tier", "safety_identifier", "cache_salt", "verbosity", "client_metadata",
              "prompt_cache_key", "prompt_cache_retention", "max_tool_calls"}  # fmt: skip
"""Parameters of which any value changes nothing here."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Drop nulls: clients send them for values that are not given."""
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body


class StreamOptions(_Body):
    include_usage: bool = False


class RequestMetadata(_Body):
    session_id: str | None = Field(None, min_length=1, max_length=256)
    task_id: str | None = Field(None, min_length=1, max_length=256)


_PICTURES = ("image_url", "input_image")
Limit = Annotated[int, Field(ge=1)]
ShortName = Annotated[str, Field(max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Prompt = Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)]
_OBJECT: dict[str, Any] = {"type": "object"}
_MOST_ANSWERS = 1024
"""To the prompts of one request."""
_MOST_ALTERNATIVES = 20
"""As many as vLLM returns by default."""


class Sampled(_Body):
    """The base of requests for answers. Without a value the run's own sampling applies."""

    model: ShortName
    n: int = Field(1, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64)
    bad_words: list[Annotated[ShortName, Field(min_length=1)]] = Field(default_factory=list, max_length=64)
    allowed_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    max_tokens: Limit | None = None
    stop: ShortName | Annotated[list[ShortName], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = Field(None, min_length=1, max_length=256)
    store: bool = True
    """If false, nothing of the request is kept or trained on."""
    metadata: RequestMetadata = RequestMetadata()

    @model_validator(mode="after")
    def _supported(self) -> Sampled:
        for key, value in (self.model_extra or {}).items():
            if key not in _NO_MATTER and value not in _NEUTRAL.get(key, ()):
                raise UnsupportedParameter(key, "is not supported")
        if any(not stop for stop in self.stops):
            raise UnsupportedParameter("stop", "has an empty text")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """The largest number of tokens of an answer, if the request has one."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of most probable tokens to show per token, or None if the response has no log-probs."""
        raise NotImplementedError

    @property
    def scored(self) -> bool:
        """Whether the response has the log-probs of the prompt, which come with the whole answer."""
        return False

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema that the answer must follow, if there is one."""
        return None


class ContentPart(_Body):
    """A part of a message: a text, or an image in a data URL."""

    type: Literal["text", "input_text", "output_text", "image_url", "input_image"]
    text: str | None = None
    image_url: Any = None

    @model_validator(mode="after")
    def _whole(self) -> ContentPart:
        if self.image is None and self.text is None:
            raise UnsupportedParameter("text", "is required")
        if self.image is not None and not DATA_URL.match(self.image):
            raise UnsupportedParameter("image_url", "is not a PNG, JPEG, WebP or GIF as a data URL with base64")
        return self

    @property
    def image(self) -> str | None:
        """The URL of the image, if it is one; empty if it has none."""
        if self.type not in _PICTURES:
            return None
        url = self.image_url.get("url") if isinstance(self.image_url, dict) else self.image_url
        return url if isinstance(url, str) else ""


class ChatMessage(_Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=1024)] | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list, max_length=128)
    tool_call_id: ShortName | None = None
    name: ShortName | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _calls(self) -> ChatMessage:
        if not all(_has_name(call) for call in self.tool_calls):
            raise UnsupportedParameter("tool_calls", "has an entry that is not a call of a function with a name")
        if not all(isinstance(_arguments(call), dict) for call in self.tool_calls):
            raise UnsupportedParameter("tool_calls.arguments", "is not a JSON object")
        if self.reasoning_content and self.role != "assistant":
            raise UnsupportedParameter("reasoning_content", "belongs to a message of the assistant")
        if self.images and self.role != "user":
            raise UnsupportedParameter("image_url", "belongs to a message of the user")
        for key, value in (self.model_extra or {}).items():
            if value and key not in ("annotations", "cache_control"):
                raise UnsupportedParameter(key, "is not supported")
        return self

    @property
    def text(self) -> str:
        """The text, with marks where its images stand, from which a mark in a text differs by a blank."""
        if not self.images:
            return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self._parts)
        return "".join(IMAGE_MARK if part.image else without_marks(part.text or "") for part in self._parts)

    @property
    def images(self) -> tuple[str, ...]:
        """The data URLs of the images."""
        return tuple(part.image for part in self._parts if part.image)

    @property
    def _parts(self) -> list[ContentPart]:
        return self.content if isinstance(self.content, list) else []

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that is compared, without what clients may add or leave out."""
        # Arguments are objects here, so that equal ones are equal.
        calls = [
            {"id": call.get("id"), "function": {"name": call["function"]["name"], "arguments": _arguments(call)}}
            for call in self.tool_calls
        ]
        images = [hashlib.blake2b(image.encode(), digest_size=16).hexdigest() for image in self.images]
        fields = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name, "images": images}
        # A client may send the reasoning of an answer in its content, in its own field, or not at all.
        content = ReasoningSplit.of(self.text).content if self.role == "assistant" else self.text
        return {"role": self.role, "content": content, **{key: value for key, value in fields.items() if value}}

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template, with the arguments of calls as objects."""
        message = {**self.plain(), "content": self.text}
        message.pop("images", None)
        if self.role == "developer":
            message["role"] = "system"
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"type": "function", "function": call["function"]} for call in calls]
        return message

    def for_bare_template(self, form: CallFormat) -> dict[str, str]:
        """Return the message for a chat template without tools: calls and their results are text."""
        if self.role == "tool":
            return {"role": "user", "content": as_response(self.text)}
        calls = [json.dumps(call["function"]) for call in self.plain().get("tool_calls", [])]
        marked = map(form.written, calls)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join([*([self.text] if self.text else []), *marked])}

    def for_display(self) -> dict[str, str]:
        """Return the message as text."""
        calls = [json.dumps(call["function"]) for call in self.plain().get("tool_calls", [])]
        return {"role": self.role, "content": "\n".join([self.text, *calls])}


class ResponseFormat(_Body):
    """The form of an answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _schema(self) -> ResponseFormat:
        if self.type == "json_schema" and not isinstance(self.json_schema.get("schema"), dict):
            raise UnsupportedParameter("json_schema.schema", "is required")
        return self


class ChatRequest(Sampled):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=128)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)
    max_completion_tokens: Limit | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MOST_ALTERNATIVES)
    response_format: ResponseFormat = ResponseFormat()
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    """If false, the first call of an answer is its only one."""
    reasoning_effort: ShortName | None = None

    @model_validator(mode="before")
    @classmethod
    def _pictures_of_tools(cls, body: Any) -> Any:
        """Let pictures in results of tools follow these in a message of the user."""
        if not isinstance(body, dict) or not isinstance(given := body.get("messages"), list):
            return body
        messages, pictures = list[Any](), list[Any]()
        for message in [*given, None]:
            is_result = isinstance(message, dict) and message.get("role") == "tool"
            if pictures and not is_result:
                messages.append({"role": "user", "content": pictures})
                pictures = []
            if is_result and isinstance(parts := message.get("content"), list):
                found = [isinstance(part, dict) and part.get("type") in _PICTURES for part in parts]
                pictures += compress(parts, found)
                message = {**message, "content": [part for part, other in zip(parts, found, strict=True) if not other]}
            messages.append(message)
        return {**body, "messages": messages[:-1]}

    @model_validator(mode="after")
    def _tools(self) -> ChatRequest:
        if self.top_logprobs and self.alternatives is None:
            raise UnsupportedParameter("top_logprobs", "needs the log-probs of the answer")
        if not all(_has_name(tool) for tool in self.tools):
            raise UnsupportedParameter("tools", "has an entry that is not a function with a name")
        if isinstance(choice := self.tool_choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools", choice)  # Responses have no inner object
            given, mode = (allowed.get("tools"), allowed.get("mode")) if isinstance(allowed, dict) else (None, None)
            if not isinstance(given, list) or mode not in ("auto", "required"):
                raise UnsupportedParameter("tool_choice", "needs 'tools', a list, and 'mode', auto or required")
            names = [_name(each) for each in given]
            self.tools, self.tool_choice = [each for each in self.tools if _name(each) in names], mode
        if choice not in ("auto", "none") and not self.called_tools:
            raise UnsupportedParameter("tool_choice", "names no function of 'tools'")
        return self

    @property
    def images(self) -> tuple[str, ...]:
        """The data URLs of all images."""
        return tuple(image for message in self.messages for image in message.images)

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call of tools."""
        return self.tool_choice not in ("auto", "none")

    @property
    def called_tools(self) -> list[dict[str, Any]]:
        """The functions of which one must be called, if one must."""
        functions: list[dict[str, Any]] = [tool["function"] for tool in self.tools]
        if not isinstance(self.tool_choice, dict):
            return functions
        return [each for each in functions if each["name"] == _name(self.tool_choice)]

    @property
    def json_schema(self) -> dict[str, Any] | None:
        if self.must_call:
            rules = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
            parts = [({"const": each["name"]}, each.get("parameters") or _OBJECT) for each in self.called_tools]
            calls = [{**rules, "properties": {"name": name, "arguments": given}} for name, given in parts]
            return calls[0] if len(calls) == 1 else {"anyOf": calls}
        schemas = {"json_schema": self.response_format.json_schema.get("schema"), "json_object": _OBJECT}
        return schemas.get(self.response_format.type)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the prompt names."""
        return () if self.tool_choice == "none" else tuple(self.tools)


class CompletionRequest(Sampled):
    """The body of ``/v1/completions``: a prompt is a text, or the ids of its tokens."""

    prompts: list[Prompt] = Field(alias="prompt", min_length=1, max_length=_MOST_ANSWERS)
    logprobs: int | None = Field(None, ge=0, le=_MOST_ALTERNATIVES)
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False

    @field_validator("prompts", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        return prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]

    @model_validator(mode="after")
    def _scored(self) -> CompletionRequest:
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise UnsupportedParameter("max_tokens", "must be at least 1 without 'echo', and in a stream")
        if self.n * len(self.prompts) > _MOST_ANSWERS:
            raise UnsupportedParameter("n", f"asks for more than {_MOST_ANSWERS} answers to these prompts")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def scored(self) -> bool:
        return self.echo and self.logprobs is not None


class FeedbackRequest(_Body):
    """The body of ``/v1/feedback``: the id of a session or of a response, and its reward."""

    model_config = ConfigDict(extra="forbid")

    id: ShortName = Field(min_length=1)
    reward: float
    components: dict[ShortName, float] = Field(default_factory=dict, max_length=64)


def runs_at_server(tool: Any) -> bool:
    """Whether a tool is one that the server of the API runs: the policy is not shown it, and cannot call it."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "shell" and isinstance(place := tool.get("environment"), dict):
        return place.get("type") != "local"
    return isinstance(kind, str) and kind.startswith(_SERVER_TOOLS)


def without_marks(text: str) -> str:
    """Return a text of a conversation with images, in which nothing looks like the mark of one."""
    return text.replace(IMAGE_MARK, f"{IMAGE_MARK[0]} {IMAGE_MARK[1:]}")


def _arguments(call: dict[str, Any]) -> Any:
    """Return the arguments of a call; None if they are a text that is not JSON."""
    given = call["function"].get("arguments") or "{}"
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None


def _name(entry: Any) -> Any:
    """Return the name of the tool in an entry of tools or choices of tools."""
    named = entry.get("function", entry) if isinstance(entry, dict) else None
    return named.get("name", named.get("type")) if isinstance(named, dict) else None


def _has_name(entry: dict[str, Any]) -> bool:
    function = entry.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)
