"""Pictures in requests: where they stand among the tokens, what is kept of them, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from rayrft.data.images import insert_images
from tests.endpoint.scripted import KEY, MODEL, Served, serve


def png(width: int, height: int, cut: int | None = None) -> str:
    drawn = io.BytesIO()
    Image.new("RGB", (width, height), 77).save(drawn, "PNG")
    return "data:image/png;base64," + base64.b64encode(drawn.getvalue()[:cut]).decode()


WIDE, SMALL = png(90, 30), png(9, 9)
TEXT = "Which is the "


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def asks(*parts: str) -> list[Any]:
    """A message of texts and pictures, which begin with ``data:``."""
    content = [shown(part) if part.startswith("data:") else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}]


@pytest.fixture
async def served(tiny_vision_model: Path) -> AsyncIterator[Served]:
    async with serve(tiny_vision_model, max_length=400) as served:
        yield served


def by_the_processor(served: Served, content: str, *images: str) -> list[int]:
    """What transformers makes of one message, with ``<image>`` where they stand."""
    processor = served.policy.tokenizer.images.processor
    messages = insert_images([{"role": "user", "content": content}], len(images))
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    read = [served.policy.tokenizer.images.load(url) for url in images]
    return list(processor(text=[text], images=read, add_special_tokens=False)["input_ids"][0])


async def test_every_api_gives_the_tokens_of_the_models_own_processor_and_the_engine_gets_the_pictures(
    served: Served,
) -> None:
    await served.client.chat.completions.create(model=MODEL, messages=asks("Is ", WIDE, " wider than ", SMALL, "?"))
    items: list[Any] = [
        {"type": "input_text", "text": "Is "},
        {"type": "input_image", "image_url": WIDE, "detail": "auto"},
        {"type": "input_text", "text": " wider than "},
        {"type": "input_image", "image_url": SMALL, "detail": "auto"},
        {"type": "input_text", "text": "?"},
    ]
    await served.client.responses.create(model=MODEL, input=[{"role": "user", "content": items}])
    chat, responses = served.policy.requests
    assert chat.prompt == responses.prompt == by_the_processor(served, "Is <image> wider than <image>?", WIDE, SMALL)
    assert chat.images == responses.images == (WIDE, SMALL)

    source = {"type": "base64", "media_type": "image/png", "data": SMALL.partition(",")[2]}
    picture = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "call-1", "name": "look", "input": {}}
    seen = {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "it is"}, picture]}
    messages: list[Any] = [
        {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [seen, {"type": "text", "text": "And now?"}]},
    ]
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=KEY, max_retries=0) as client:
        await client.messages.create(model=MODEL, max_tokens=9, messages=messages[:1])
        await client.messages.create(model=MODEL, max_tokens=9, messages=messages)
        counted = await client.messages.count_tokens(model=MODEL, messages=messages)
    *_, one, two = served.policy.requests
    assert one.prompt == by_the_processor(served, "<image>\nWhat is it?", SMALL) and one.images == (SMALL,)
    assert two.images == (SMALL, SMALL) and counted.input_tokens == len(two.prompt)
    text = served.prompts[-1]
    assert text.rindex("it is") < text.rindex("<|image_pad|>") < text.rindex("And now?")


async def test_pictures_in_results_of_tools_follow_these(served: Served) -> None:
    """Of two calls at once, each of which shows one."""
    said = {"type": "text", "text": "it is"}
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for n in range(2)]
    results = [
        {"role": "tool", "tool_call_id": "c0", "content": [shown(WIDE), said]},
        {"role": "tool", "tool_call_id": "c1", "content": [said, shown(SMALL)]},
    ]
    messages: list[Any] = [{"role": "user", "content": "See."}, {"role": "assistant", "tool_calls": calls}, *results]
    await served.client.chat.completions.create(model=MODEL, messages=messages)
    items: list[Any] = [messages[0]]
    items += [{"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": "{}"} for n in range(2)]
    text, wide, small = (
        {"type": "input_text", "text": "it is"},
        *({"type": "input_image", "image_url": url, "detail": "low"} for url in (WIDE, SMALL)),
    )
    items.append({"type": "function_call_output", "call_id": "c0", "output": [wide, text]})
    items.append({"type": "function_call_output", "call_id": "c1", "output": [text, small]})
    await served.client.responses.create(model=MODEL, input=items)
    chat, responses = served.policy.requests
    assert chat.prompt == responses.prompt and chat.images == responses.images == (WIDE, SMALL)
    shown_text = served.prompts[0]
    assert shown_text.rindex("it is") < shown_text.index("<|image_pad|>"), "they follow both"


async def test_a_conversation_with_pictures_is_one_row_that_holds_them_and_is_forgotten_with_it(served: Served) -> None:
    ask = {"model": MODEL, "extra_headers": {"X-Session-Id": "one"}}
    messages = asks(TEXT, WIDE)
    for further in (asks("Say <image> and ", SMALL, "?"), asks("Sure?"), None):
        answer = await served.client.chat.completions.create(messages=messages, **ask)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *(further or [])]
    first, second, third = served.policy.requests
    assert second.prompt[: len(first.prompt)] == first.prompt and third.prompt[: len(second.prompt)] == second.prompt
    reader = served.policy.tokenizer.images
    assert third.images == (WIDE, SMALL)
    assert third.prompt.count(reader.token_id) == reader.tokens(WIDE) + reader.tokens(SMALL)
    assert "Say < image> and " in served.prompts[2], "it is a text, not a picture"
    # The same words about another picture are another conversation.
    other = await served.client.chat.completions.create(messages=[*asks(TEXT, SMALL), *messages[1:]], **ask)
    await served.client.post("/feedback", body={"id": other.id, "reward": 1.0}, cast_to=object)
    [group], _ = served.book.sessions.take()
    row, another = sorted(group.rows, key=lambda row: -row.action_mask.sum())
    assert list(row.token_ids[: len(third.prompt)]) == third.prompt and row.images == (WIDE, SMALL)
    assert another.images == (SMALL, SMALL) and another.action_mask.sum() < row.action_mask.sum()

    await served.client.chat.completions.create(messages=asks(TEXT, WIDE), **ask)
    assert (await served.http.delete("/v1/chat/completions/one")).json()["rows"] == 1
    assert WIDE not in repr(vars(served.book.sessions)), "nothing of it is left"


@pytest.mark.parametrize(
    ("messages", "param", "found"),
    [
        (asks("https://example.com/cat.png"), None, None),
        ([{"role": "user", "content": [shown("https://example.com/cat.png")]}], "image_url", "data URL"),
        ([{"role": "user", "content": [shown("/etc/passwd")]}], "image_url", "data URL"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url", "data URL"),
        (asks("data:image/svg+xml;base64,PHN2Zz4="), "image_url", "data URL"),
        (asks("data:image/png;base64,####"), "images", "no image can be read"),
        (asks("data:image/png;base64,aGVsbG8="), "images", "no image can be read"),
        ([{"role": "system", "content": [shown(SMALL)]}], "image_url", "message of the user"),
        ([*asks("?"), {"role": "assistant", "content": [shown(SMALL)]}], "image_url", "message of the user"),
        (asks("<|image_pad|>", SMALL), "images", "2 places for 1 images"),
    ],
)  # fmt: skip
async def test_what_is_no_picture_is_refused_by_name_and_the_next_request_is_answered(
    messages: list[Any], param: str | None, found: str | None, served: Served
) -> None:
    if param is None or found is None:  # a text that looks like the address of a picture is a text
        assert (await served.client.chat.completions.create(model=MODEL, messages=messages)).choices
        return
    with pytest.raises(openai.BadRequestError, match=found) as raised:
        await served.client.chat.completions.create(model=MODEL, messages=messages)
    assert str(raised.value.param).endswith(param) and len(str(raised.value)) < 500
    assert served.policy.requests == [] and served.book.sessions.stats().calls.get("answered", 0) == 0
    assert (await served.client.chat.completions.create(model=MODEL, messages=asks(TEXT, SMALL))).choices


async def test_an_answer_with_the_token_of_a_picture_is_the_last_one_beside_pictures(tiny_vision_model: Path) -> None:
    async with serve(tiny_vision_model, lambda prompt: "see <|image_pad|>", max_length=400) as served:
        messages = asks(TEXT, SMALL)
        answer = await served.client.chat.completions.create(model=MODEL, messages=messages, user="one")
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *asks("Sure?")]
        with pytest.raises(openai.BadRequestError, match="tokens that stand for images"):
            await served.client.chat.completions.create(model=MODEL, messages=messages, user="one")


async def test_a_model_without_eyes_refuses_pictures_and_answers_texts(tiny_model: Path) -> None:
    async with serve(tiny_model) as served:
        with pytest.raises(openai.BadRequestError, match="takes none"):
            await served.client.chat.completions.create(model=MODEL, messages=asks(TEXT, SMALL))
        assert served.book.sessions.stats().open == 1 and served.policy.requests == []
        await served.client.chat.completions.create(model=MODEL, messages=asks(TEXT, "<image>"))
        [asked] = served.prompts
        assert "<image>" in asked, "a text without pictures stays as it is"
