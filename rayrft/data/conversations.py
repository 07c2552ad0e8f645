"""Conversations of rows: messages in the forms of OpenAI and ShareGPT, and what a row of demonstrations holds."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayrft.config.demonstrations import RowFormat
from rayrft.data.chat_template import common_length
from rayrft.data.formats import as_text, value_at
from rayrft.data.images import IMAGE_MARK
from rayrft.data.layouts import DEMONSTRATIONS, named_layouts, recognise
from rayrft.errors import DataError

_Message = dict[str, Any]
"""A chat message: ``role`` and ``content``, texts; other fields as chat templates take them, such as ``tool_calls``. An
assistant's message with ``weight`` 0 is context, which is not trained."""
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "function", "ipython"), "tool"),
}
"""Roles of chat templates, and other names of them, such as those of ShareGPT."""
_PICTURES = "pictures"
"""The field of a message that has its images, until they are taken out of it."""


@dataclass(frozen=True)
class Side:
    """One sequence of a row: a conversation that ends with the assistant, or two ``texts``, a prompt and what follows
    it, which are tokenised as they are; its label, if it has one; and the images inside its messages, in order."""

    messages: list[_Message]
    texts: tuple[str, str] | None = None
    chosen: bool | None = None
    pictures: Sequence[Any] = ()


@dataclass(frozen=True)
class Conversations:
    """What a row of demonstrations holds."""

    layout: str
    sides: list[Side]
    """One, the chosen and the rejected one of a pair, or one for each labelled step."""
    paired: bool
    tools: tuple[dict[str, Any], ...]


def read_conversations(row: Mapping[str, Any], form: RowFormat) -> Conversations:
    """Read a row of demonstrations.

    A side that is a list of messages which does not begin with the assistant contains its own prompt. The assistant's
    messages in a prompt, and in what two sides have in common, are context. Raises DataError with the problem.
    """
    named = named_layouts(form)
    layout = recognise(row, named or DEMONSTRATIONS)
    values = layout.read(row)
    texts = [values.get(name) for name in ("prompt", "response", "chosen", "rejected", "text")]
    as_chat = form.chat if form.chat is not None else bool(named)
    plain = layout.plain and not as_chat and all(each is None or isinstance(each, str) for each in texts)
    as_texts = plain or "text" in values or "steps" in values
    if not named:
        layout.check_content(row, () if as_texts else (form.images, form.tools))
    if plain and values.get("system"):
        raise DataError("texts without chat template have no system message", "set chat: true")
    names = {name: layout.column(row, name) for name in values}
    sides = _plain_sides(values, names, as_chat) if as_texts else _chat_sides(values, names)
    paired = len(sides) == 2 and "chosen" in values
    if paired and (sides[0].messages, sides[0].texts) == (sides[1].messages, sides[1].texts):
        raise DataError(f"{names['chosen']!r} and {names['rejected']!r} are the same")
    tools = values.get("tools") if values.get("tools") is not None else value_at(row, form.tools)
    return Conversations(layout.shown(row, plain), sides, paired, tool_schemas(tools, form.tools))


def _plain_sides(values: dict[str, Any], names: dict[str, str], as_chat: bool) -> list[Side]:
    """Return the sides of texts, as TRL reads them."""
    if "steps" in values:
        return _steps(values, names, as_chat)
    if "text" in values:
        return [_texts("", _filled(values, "text", names))]
    if "response" in values:
        return [_texts(_filled(values, "prompt", names), _filled(values, "response", names))]
    chosen, rejected = (_filled(values, side, names) for side in ("chosen", "rejected"))
    if values["prompt"] is not None:
        prompt = _filled(values, "prompt", names)
    else:  # what both begin with, but for the blank before they differ
        prompt = chosen[: common_length(chosen, rejected)].removesuffix(" ")
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return [_texts(prompt, chosen, chosen=True), _texts(prompt, rejected, chosen=False)]


def _steps(values: dict[str, Any], names: dict[str, str], as_chat: bool) -> list[Side]:
    """Return a labelled answer for each step of a solution, after the steps before it, a line each."""
    prompt, steps, labels = as_text(values["prompt"], names["prompt"]), values["steps"], values["step_labels"]
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels) or not steps:
        raise DataError(f"{names['steps']!r} and {names['step_labels']!r} are not lists of one length")
    if not all(isinstance(label, bool) for label in labels):
        raise DataError(f"{names['step_labels']!r} holds other values than true and false")
    lines = [as_text(step, names["steps"]) + "\n" for step in steps]
    sides = []
    for number, label in enumerate(labels):
        before = "".join(lines[:number])
        if as_chat:
            user = {"role": "user", "content": prompt}
            sides.append(Side([user, {"role": "assistant", "content": before + lines[number]}], chosen=label))
        else:
            sides.append(_texts(f"{prompt}\n{before}", lines[number], chosen=label))
    return sides


def _texts(prompt: str, completion: str, chosen: bool | None = None) -> Side:
    shown = [{"role": "user", "content": prompt}] if prompt else []
    return Side([*shown, {"role": "assistant", "content": completion}], (prompt, completion), chosen)


def _filled(values: dict[str, Any], name: str, names: dict[str, str]) -> str:
    if values[name] in (None, ""):
        raise DataError(f"needs text in {names[name]!r}")
    return as_text(values[name], names[name])


def _chat_sides(values: dict[str, Any], names: dict[str, str]) -> list[Side]:
    """Return the sides of messages."""
    system = values.get("system") or None
    if "messages" in values:
        if isinstance(values["messages"], str):
            raise DataError(f"{names['messages']!r} is a text, not a list of messages")
        messages = _messages(values["messages"], "assistant", names["messages"])
        return [_side(_checked(_with_system(system, messages), names["messages"]))]
    prompt = values["prompt"]
    if "response" in values:
        joined, first = _joined(prompt, values["response"], names["prompt"], names["response"])
        full = _with_system(system, joined)
        return [_side(_as_context(full, first + len(full) - len(joined)))]
    answers = [_joined(prompt, values[side], names["prompt"], names[side])[0] for side in ("chosen", "rejected")]
    sides = [_with_system(system, answer) for answer in answers]
    shared = common_length(*sides)
    return [_side(_as_context(side, shared), chosen=not number) for number, side in enumerate(sides)]


def _side(messages: list[_Message], chosen: bool | None = None) -> Side:
    """Return the side of messages, out of which their images are taken."""
    pictures = [picture for message in messages for picture in message.pop(_PICTURES, ())]
    return Side(messages, chosen=chosen, pictures=pictures)


def _joined(prompt: Any, answer: Any, prompt_name: str, answer_name: str) -> tuple[list[_Message], int]:
    """Join prompt and answer; also return how many messages are the prompt. An answer that does not begin with the
    assistant contains its own prompt, of which all but the last turn of the assistant is context."""
    messages = _messages(answer, "assistant", answer_name)
    first = len(messages) - 1
    if messages[0]["role"] == "assistant":
        before = _messages(prompt, "user", prompt_name)
        messages, first = [*before, *messages], len(before)
    return _checked(messages, answer_name), first


def _messages(value: Any, role: str, name: str) -> list[_Message]:
    """Parse a text of ``role``, a list of messages, or one message."""
    if value is None or value in ("", []):
        raise DataError(f"needs text or messages in {name!r}")
    if isinstance(value, dict) and {"role", "from"} & value.keys():
        value = [value]
    if not isinstance(value, list):
        return [{"role": role, "content": as_text(value, name)}]
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, path: str) -> _Message:
    """Parse a message of OpenAI (``role`` and ``content``, which may be parts) or ShareGPT (``from`` and ``value``)."""
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a message with 'role' and 'content'")
    # Arrow gives every message the fields of all messages, null where it has none.
    message = _without_nulls(value)
    if "from" in message and "value" in message:
        message = {"role": message.pop("from"), "content": message.pop("value"), **message}
    if (given := message.get("role")) in ("function_call", "tool_call"):
        found = _json(message.pop("content", None), path, (list, dict))
        message["tool_calls"] = found if isinstance(found, list) else [found]
    calls, weight = message.pop("tool_calls", None), message.pop("weight", None)
    if calls:
        message["tool_calls"] = tool_calls(calls, f"{path}.tool_calls")
        message.setdefault("content", "")
    if not {"role", "content"} <= message.keys():
        raise DataError(f"{path} needs 'role' and 'content'")
    if (role := _ROLES.get(str(given))) is None:
        raise DataError(f"{path} has the role {given!r}", "write system, user, assistant or tool")
    message["role"] = role
    message["content"], pictures = _content(message["content"], f"{path}.content")
    for key, text in message.items():
        if key != "tool_calls":
            if not isinstance(text, str):
                raise DataError(f"{path}.{key} is not text")
            as_text(text, f"{path}.{key}")
    if weight is not None:
        if weight not in (0, 1, "0", "1") or message["role"] != "assistant":
            raise DataError(f"{path}.weight is {weight!r}, not 0 or 1 of an assistant's message")
        message |= {} if int(weight) else {"weight": 0}
    if message["role"] == "assistant" and not (message["content"] or calls):
        raise DataError(f"{path}: the assistant says nothing")
    return message | ({_PICTURES: pictures} if pictures else {})


def _content(content: Any, path: str) -> tuple[Any, list[Any]]:
    """Return the text of a message's content, with `IMAGE_MARK` for an image, and the images."""
    if not isinstance(content, list):
        return content, []
    texts, pictures = list[str](), list[Any]()
    for index, part in enumerate(content):
        kind, place = part.get("type") if isinstance(part, dict) else None, f"{path}[{index}]"
        if kind in ("text", "input_text", "output_text"):
            texts.append(as_text(part.get("text"), f"{place}.text"))
        elif kind in ("image", "image_url", "input_image"):
            texts.append(IMAGE_MARK)
            if (picture := _picture(part, place)) is not None:
                pictures.append(picture)
        else:
            raise DataError(f"{place} is of type {kind!r}, not a text or an image")
    return "".join(texts), pictures


def _picture(part: dict[str, Any], place: str) -> Any:
    """Return the image of a part: a path, or the bytes of a data URL; None if the row has it in a column."""
    found = part.get("image_url", part.get("image", part.get("url", part.get("path"))))
    found = found.get("url") if isinstance(found, dict) and "url" in found else found
    if not isinstance(found, str) or not (data := re.match(r"data:[^,]*;base64,", found)):
        if isinstance(found, str) and found.startswith(("http:", "https:")):
            raise DataError(f"{place} is an image on the web", "give its path, or its bytes as a data URL")
        return found
    try:
        return base64.b64decode(found[data.end() :], validate=True)
    except binascii.Error:
        raise DataError(f"{place} is not base64") from None


def tool_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a message's calls, a list or its JSON, in the form of chat templates: arguments are objects."""
    calls = []
    for index, call in enumerate(_json(value, name)):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{name}[{index}] is not a call of a function with 'name' and 'arguments'")
        arguments = _json(function.get("arguments", {}), f"{name}[{index}].arguments", dict)
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**kept, "type": "function", "function": {**function, "arguments": arguments}})
    return calls


def tool_schemas(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Return a row's tools: a list of JSON schemas of functions, or its JSON. Raises DataError if it is neither."""
    found = _json(value or [], name)
    if not all(isinstance(each, dict) for each in found):
        raise DataError(f"{name!r} is not a list of JSON schemas")
    return tuple(map(_without_nulls, found))


def _json(value: Any, name: str, kind: type | tuple[type, ...] = list) -> Any:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = value
    if not isinstance(found, kind):
        raise DataError(f"{name!r} is not {'a list' if kind is list else 'an object'} of JSON")
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def message_text(value: Any, name: str) -> Any:
    """Return the text of the last message, if a value is a list of messages, else the value."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _messages(value, "assistant", name)[-1]["content"]
    return value


def task_prompt(
    value: Any, name: str, key: str, system: Any = None
) -> tuple[list[dict[str, str]], str | None, Sequence[Any]]:
    """Return the messages of a task's prompt, of which the last one is the user's, the answer of the assistant after
    it, if there is one, and the images in the messages. A row's ``system`` message comes first.

    Raises DataError, with the config ``key``, for another value than a text or messages.
    """
    try:
        side = _side(_with_system(system, _messages(value, "user", name)))
    except DataError as error:
        raise DataError(error.problem, error.remedy, field=key) from None
    messages = side.messages
    answer = messages.pop()["content"] if len(messages) > 1 and messages[-1]["role"] == "assistant" else None
    roles = [message["role"] for message in messages]
    problem = f"the messages of {name!r} ({', '.join(roles)}) are not a prompt that ends with the user"
    if more := sorted(set().union(*messages) - {"role", "content", "weight"}):
        problem = f"the messages of {name!r} have fields besides role and content: {', '.join(more)}"
    elif roles[-1] == "user" and "system" not in roles[1:] and "tool" not in roles and messages[-1]["content"]:
        problem = ""
    if problem:
        remedy = "give texts of system, user and assistant alone; conversations with tools can be demonstrations"
        raise DataError(problem, remedy, field=key)
    return [{"role": each["role"], "content": each["content"]} for each in messages], answer, side.pictures


def _with_system(system: Any, messages: list[_Message]) -> list[_Message]:
    if system is None or messages[0] == {"role": "system", "content": system}:
        return messages
    if messages[0]["role"] == "system":
        raise DataError("the row has a system message, and so have its messages", "leave one of them out")
    return [{"role": "system", "content": as_text(system, "system")}, *messages]


def _as_context(messages: list[_Message], until: int) -> list[_Message]:
    """Return messages of which the assistant's first ones, up to index ``until``, are not trained."""
    before = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in messages[:until]]
    return [*before, *messages[until:]]


def _checked(messages: list[_Message], name: str) -> list[_Message]:
    if messages[0]["role"] == "assistant":
        raise DataError(f"{name!r} begins with the assistant, without a prompt")
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{name!r} does not end with the assistant")
    return messages


def displayed(messages: Sequence[_Message]) -> list[dict[str, str]]:
    """Return messages as the ``turns`` of a row: texts, with calls of tools as JSON."""
    return [
        {key: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for key, each in turn.items()}
        for turn in messages
    ]
