"""Applications that know nothing of rayrft: they call a model by the API of OpenAI, as their environment says."""

from __future__ import annotations

import base64
import contextlib
import io
import os
from typing import Any

import httpx
import openai
from PIL import Image

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def say(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    answer = client.chat.completions.create(model="gpt-5", messages=messages, **options).choices[0].message
    messages.append(answer.model_dump(exclude_none=True))
    return answer


def chosen(question: str) -> Any:
    """Call the application that the question begins with."""
    name, question = question.split(" ")
    return globals()[name](question)


def calls_tools(question: str) -> float:
    """The usual loop: call what the model asks for, tell it, and ask again."""
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": question}]
    called = 0
    while called < 4:
        answer = say(client, messages, tools=TOOLS)
        if not answer.tool_calls:
            break
        called += 1
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "blue"} for call in answer.tool_calls]
    return called / 4


def must_call(question: str) -> int:
    """Force a call, and ask again."""
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": question}]
    [call] = say(client, messages, tools=TOOLS, tool_choice="required").tool_calls
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "blue"})
    say(client, messages, tools=TOOLS)
    return 1


async def streams(question: str) -> str:
    async with openai.AsyncOpenAI() as client:
        parts = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": question}], stream=True, temperature=0.1
        )
        return "streamed: " + "".join([part.choices[0].delta.content or "" async for part in parts])


def shows_pictures(question: str) -> None:
    """A conversation of texts, and one with two pictures."""
    client = openai.OpenAI()
    say(client, [{"role": "user", "content": question}])
    messages: list[Any] = [{"role": "user", "content": [_picture(16), {"type": "text", "text": "Colour?"}]}]
    say(client, messages)
    messages.append({"role": "user", "content": [{"type": "text", "text": "and"}, _picture(32)]})
    say(client, messages)


def _picture(side: int) -> dict[str, Any]:
    drawn = io.BytesIO()
    Image.new("RGB", (side, side), (side, 0, 99)).save(drawn, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def returns_nothing(question: str) -> None:
    client, messages = openai.OpenAI(), list[Any]()
    for text in (question, "Sure?"):
        messages.append({"role": "user", "content": text})
        say(client, messages)


def sees_alternatives(question: str) -> int:
    """Two turns; return the number of their tokens, each of which must come with the two most probable ones."""
    client, messages, seen = openai.OpenAI(), list[Any](), 0
    for text in (question, "Sure?"):
        messages.append({"role": "user", "content": text})
        [answer] = client.chat.completions.create(model="m", messages=messages, logprobs=True, top_logprobs=2).choices
        messages.append(answer.message.model_dump(exclude_none=True))
        assert answer.logprobs and answer.logprobs.content
        assert [len(each.top_logprobs) for each in answer.logprobs.content] == [2] * len(answer.logprobs.content)
        seen += len(answer.logprobs.content)
    return seen


def rates_itself(question: str) -> str:
    client = openai.OpenAI()
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
    rate = {"id": answer.id, "reward": 0.75, "components": {"style": 1.0}}
    http = httpx.Client(base_url=os.environ["OPENAI_BASE_URL"], verify=False)
    refused = http.post("/feedback", json=rate).status_code
    http.headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
    unknown = http.post("/feedback", json={**rate, "id": "nobody"}).status_code
    taken = http.post("/feedback", json=rate).status_code
    twice = http.post("/feedback", json=rate).status_code
    assert [refused, unknown, taken, twice] == [401, 404, 200, 409]
    return "what it returns does not count"


def floods(question: str) -> None:
    client = openai.OpenAI(max_retries=0)
    while True:
        with contextlib.suppress(openai.APIError):
            say(client, [{"role": "user", "content": question}])


def asks_twice(question: str) -> int:
    client = openai.OpenAI()
    for asked in (question, f"Another way: {question}"):
        say(client, [{"role": "user", "content": asked}])
    return 1


def asks_for_three(question: str) -> int:
    answer = openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": question}], n=3)
    return len(answer.choices)


def talks_on(question: str) -> None:
    """Until the context is full."""
    client, messages = openai.OpenAI(), list[Any]()
    while True:
        messages.append({"role": "user", "content": question})
        say(client, messages)


def catches_everything(question: str) -> float:
    try:
        return calls_tools(question)
    except Exception:  # as applications do that must not fail
        return 0.0


def raises(question: str) -> None:
    say(openai.OpenAI(), [{"role": "user", "content": question}])
    raise KeyError("no such customer")


def never_asks(question: str) -> float:
    return 1.0


def returns_a_list(question: str) -> list[str]:
    say(openai.OpenAI(), [{"role": "user", "content": question}])
    return ["right"]


def exits(question: str) -> None:
    os._exit(3)
