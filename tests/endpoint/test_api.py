"""The API, as the official client and broken ones use it, over a scripted policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rayrft.data.chat_template import Tools
from rayrft.errors import ActorDied, EngineFailed
from rayrft.explorer.tools.call_formats import HermesCalls, MalformedCall, ToolCall, register_call_format
from rayrft.runtime.serving import key_digest
from tests.endpoint.scripted import KEY, MAX_LENGTH, MODEL, Served, serve

USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


async def streamed(served: Served, **options: Any) -> list[Any]:
    stream = await served.client.chat.completions.create(model=MODEL, messages=USER, stream=True, **options)
    return [chunk async for chunk in stream]


async def test_the_official_client_gets_answers_models_and_usage(served: Served) -> None:
    assert [model.id async for model in served.client.models.list()] == [MODEL]
    assert (await served.client.models.retrieve(MODEL)).id == MODEL
    answer = await served.client.chat.completions.create(model=MODEL, messages=USER, n=2, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == ["hello"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    logprobs = answer.choices[1].logprobs
    assert logprobs and logprobs.content and [entry.logprob for entry in logprobs.content] == [-0.5] * 6
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)
    short = await served.client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=3)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("hel", "length")
    text = await served.client.completions.create(model=MODEL, prompt="hi", logprobs=1)
    assert (text.choices[0].text, text.object) == ("hello", "text_completion")
    ids = await served.client.completions.create(model=MODEL, prompt=[7, 8, 9])
    assert ids.usage and ids.usage.prompt_tokens == 3 and served.policy.requests[-1].prompt == [7, 8, 9]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_most_probable_tokens_are_shown_of_every_token(served: Served, stream: bool) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    if stream:
        choices = [choice for chunk in await streamed(served, **options) for choice in chunk.choices]
    else:
        choices = (await served.client.chat.completions.create(model=MODEL, messages=USER, **options)).choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert len(entries) == 6
    decode = served.policy.tokenizer.decode
    for entry in entries:
        assert [(each.token, each.logprob) for each in entry.top_logprobs] == [(decode([7]), -0.1), (decode([8]), -0.2)]
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        await served.client.chat.completions.create(model=MODEL, messages=USER, top_logprobs=2)


async def test_prompts_in_a_list_are_echoed_with_their_logprobs_each_a_row_of_the_session(served: Served) -> None:
    hf = served.policy.tokenizer.hf
    first, second = hf.encode("hi you", add_special_tokens=False), hf.encode("hey", add_special_tokens=False)
    answer = await served.client.completions.create(
        model=MODEL, prompt=[first, second], n=2, echo=True, logprobs=2, max_tokens=1, user="s"
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["hi youh", "hi youh", "heyh", "heyh"]
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 4)
    for choice, ids in zip(answer.choices, [first, first, second, second], strict=True):
        shown = choice.logprobs
        assert shown and shown.token_logprobs == [None, *[-0.5] * len(ids)] and shown.tokens
        assert "".join(shown.tokens) == choice.text and shown.text_offset == [*range(len(ids) + 1)]
        assert shown.top_logprobs and shown.top_logprobs[0] is None  # type: ignore[comparison-overlap]
        assert shown.top_logprobs[1] == {hf.decode([7]): -0.1, hf.decode([8]): -0.2, hf.decode([ids[1]]): -0.5}
    for stop in (None, ["z"]):
        nothing = await served.client.completions.create(
            model=MODEL, prompt="hi", echo=True, logprobs=0, max_tokens=0, stop=stop
        )
        assert nothing.choices[0].text == "hi" and nothing.choices[0].finish_reason == "length"
        assert nothing.choices[0].logprobs and nothing.choices[0].logprobs.token_logprobs == [None, -0.5]
    stream = await served.client.completions.create(model=MODEL, prompt=["a", "b"], echo=True, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["ahello", "bhello"]
    await served.client.post("/feedback", cast_to=object, body={"id": "s", "reward": 1.0})
    assert len(served.book.sessions.take()[0][0].rows) == 4


async def test_a_list_with_a_bad_prompt_is_refused_and_none_of_its_calls_stays_open(served: Served) -> None:
    bad = {"too long": "x" * MAX_LENGTH, "empty": "", "huge id": [1 << 31], "unknown id": [1 << 30]}
    for name, prompt in bad.items():
        good: Any = [1, 2] if isinstance(prompt, list) else "hi"
        with pytest.raises(openai.BadRequestError):
            await served.client.completions.create(model=MODEL, prompt=[good, prompt, good], user=name)
    stats = served.book.sessions.stats()
    assert stats.open == 2 and stats.calls == {"context_length_exceeded": 3, "invalid_value": 3}
    assert not served.book.sessions._running


async def test_nothing_is_kept_of_who_does_not_want_it(served: Served) -> None:
    await served.client.chat.completions.create(model=MODEL, messages=USER, n=2, store=False)
    assert [chunk async for chunk in await served.client.responses.create(
        model=MODEL, input="hi", store=False, stream=True)]  # fmt: skip
    headers = {"Authorization": "Bearer private-x"}
    served.endpoint._key_digests = (*served.endpoint._key_digests, key_digest("private-x"))
    body = {"model": MODEL, "messages": USER}
    assert (await served.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    sessions = served.book.sessions
    assert (sessions.stats().open, sessions.take()) == (0, ([], {"opted_out": 4}))
    kept = await served.client.chat.completions.create(model=MODEL, messages=USER, user="Ann")
    other = await served.client.chat.completions.create(model=MODEL, messages=USER)
    gone = await served.http.delete(f"/v1/chat/completions/{kept.id}")
    assert gone.json() == {"id": kept.id, "deleted": True, "rows": 1, "rows_in_training": 0}
    assert (await served.http.delete("/v1/responses/resp_1")).status_code == 404
    assert (sessions.stats().open, sessions.take()[1]) == (1, {"forgotten": 1})
    await served.client.post("/feedback", cast_to=object, body={"id": other.id, "reward": 1.0})


async def test_a_session_may_be_named_by_the_base_url(served: Served) -> None:
    client = served.client.with_options(base_url=f"{served.url}/sessions/s-7/v1")
    assert [model.id async for model in client.models.list()] == [MODEL]
    answer = await client.chat.completions.create(model=MODEL, messages=USER, extra_headers={"X-Session-Id": "no"})
    rated: Any = await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": 1.0})
    assert rated["session_id"] == "s-7" and len(served.book.sessions.take()[0]) == 1


async def test_streamed_text_is_the_whole_answer_and_usage_comes_last(served: Served) -> None:
    chunks = await streamed(served, n=2, logprobs=True, stream_options={"include_usage": True})
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == "hello"
        assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == "stop"
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
        assert len(entries) == 6
        assert len(choices) > 4  # as they are sampled, not at the end
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thought", ["", "<think>two, so two</think>"])
async def test_a_stop_string_ends_the_answer_at_the_engine_unseen(tiny_model: Path, stream: bool, thought: str) -> None:
    async with serve(tiny_model, lambda prompt: f"{thought}one two three four five six") as served:
        options: dict[str, Any] = {"stop": ["o t", "never"]}
        if stream:
            chunks = await streamed(served, **options)
            deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
            text = "".join(delta.content or "" for delta in deltas)
            reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        else:
            answer = await served.client.chat.completions.create(model=MODEL, messages=USER, **options)
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            text, reasoning = message.content or "", getattr(message, "reasoning_content", "")
            assert reason == "stop" and answer.usage and answer.usage.completion_tokens == len(f"{thought}one two t")
        assert (text, reasoning) == ("one tw", thought.removeprefix("<think>").removesuffix("</think>"))
        assert len(served.policy.sampled[0].token_ids) < len(thought) + 15  # of 28: it was interrupted


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_text_continues_what_was_sampled_only_with_its_stop_string(tiny_model: Path, keeps: bool) -> None:
    async with serve(tiny_model, lambda prompt: "look it up\nSeen: no") as served:
        options: dict[str, Any] = {"model": MODEL, "user": "s", "stop": ["\nSeen:"]}
        first = await served.client.completions.create(prompt="ask. ", **options)
        assert first.choices[0].text == "look it up"
        following = f"ask. look it up{chr(10) + 'Seen:' if keeps else ''} 42. "
        await served.client.completions.create(prompt=following, **options)
        assert served.policy.tokenizer.hf.decode(served.policy.requests[-1].prompt) == following
        await served.client.post("/feedback", cast_to=object, body={"id": "s", "reward": 1.0})
        [group] = served.book.sessions.take()[0]
        assert len(group.rows) == (1 if keeps else 2)


async def test_a_second_reward_is_refused_once(served: Served) -> None:
    answer = await served.client.chat.completions.create(**CHAT)
    client = served.client.with_options(max_retries=2)
    for refused in (False, True):
        with pytest.raises(openai.ConflictError) if refused else contextlib.nullcontext():
            await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": 1.0})
    assert served.endpoint.outcomes == {"200": 2, "409 already_rewarded": 1}


async def test_answers_in_json_and_penalties_are_sampled_as_asked_and_masked_in_training(tiny_model: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"response_format": form}, {"json_schema": json.dumps(schema)}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        ({"presence_penalty": 0.5, "extra_body": {"min_p": 0.1}}, {"presence_penalty": 0.5, "min_p": 0.1}),
        ({"frequency_penalty": -1}, {"frequency_penalty": -1.0}),
        ({"logit_bias": {"7": -100}}, {"logit_bias": ((7, -100.0),)}),
        ({"extra_body": {"min_tokens": 3}, "verbosity": "low"}, {"min_tokens": 3}),
        ({"extra_body": {"ignore_eos": True, "stop_token_ids": [7]}}, {"ignore_eos": True, "stop_token_ids": (7,)}),
        ({"extra_body": {"bad_words": ["no"]}}, {"bad_words": ("no",)}),
        ({"extra_body": {"allowed_token_ids": [7, 8]}}, {"allowed_token_ids": (7, 8)}),
    ]
    for policy in ("untrained", "refuse", "ignore"):
        async with serve(tiny_model, off_policy=policy) as served:
            for options, sampled in asked:
                call = served.client.chat.completions.create(model=MODEL, messages=USER, user="s", **options)
                if policy == "refuse":
                    with pytest.raises(openai.BadRequestError):
                        await call
                    continue
                await call
                sampling = served.policy.requests[-1].sampling
                kept = policy == "untrained" or "response_format" in options
                assert all((getattr(sampling, name) == value) == kept for name, value in sampled.items()), options
                if kept:
                    await served.client.post("/feedback", cast_to=object, body={"id": "s", "reward": 1.0})
                    assert served.book.sessions.take()[1] == {"not_trained": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_parsed_and_not_shown_as_text(tiny_model: Path, stream: bool) -> None:
    said = 'so <tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    async with serve(tiny_model, lambda prompt: said, max_length=600) as served:
        if stream:
            chunks = await streamed(served, tools=[TOOL])
            deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
            assert "".join(delta.content or "" for delta in deltas) == "so "
            [call] = [call for delta in deltas for call in delta.tool_calls or []]
            reason = chunks[-1].choices[0].finish_reason
        else:
            answer = await served.client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL])
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            assert message.content == "so " and message.tool_calls
            [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert reason == "tool_calls"
        plain = await served.client.chat.completions.create(model=MODEL, messages=USER)
        assert plain.choices[0].message.content == said and plain.choices[0].message.tool_calls is None


async def test_a_template_that_knows_no_tools_is_shown_them_and_their_results_as_text(tiny_model: Path) -> None:
    said = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    async with serve(tiny_model, lambda prompt: said, max_length=600) as served:
        ask: Any = {"model": MODEL, "tools": [TOOL], "extra_headers": {"X-Session-Id": "s"}}
        first = await served.client.chat.completions.create(messages=USER, **ask)
        called = first.choices[0].message
        assert called.tool_calls
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "three"}
        messages: Any = [*USER, called.model_dump(exclude_none=True), result]
        await served.client.chat.completions.create(messages=messages, **ask)
        prompts = [served.policy.tokenizer.hf.decode(request.prompt) for request in served.policy.requests]
        assert '"name": "add"' in prompts[0] and "three" in prompts[1]
        answer = served.policy.sampled[0].token_ids
        assert tuple(served.policy.requests[1].prompt[len(served.policy.requests[0].prompt) :][: len(answer)]) == answer
        assert served.book.sessions.feedback(first.id, 1.0, {}, 0.0) == "s"
        [group] = served.book.sessions.take()[0]
        assert len(group.rows) == 1 and int(group.rows[0].action_mask.sum()) == 2 * len(answer)


async def test_a_call_that_cannot_be_read_is_shown_as_it_is(tiny_model: Path) -> None:
    async with serve(tiny_model, lambda prompt: "<tool_call>{oh no", max_length=600) as served:
        chunks = await streamed(served, tools=[TOOL])
        assert "".join(each.delta.content or "" for chunk in chunks for each in chunk.choices) == "<tool_call>{oh no"


@register_call_format("raising")
class Raising(HermesCalls):
    async def read_answer(self, answer: str, tools: Tools) -> list[ToolCall | MalformedCall]:
        raise KeyError("arguments")


async def test_an_answer_on_which_a_format_of_ones_own_raises_is_text_and_counted(tiny_model: Path) -> None:
    async with serve(tiny_model, lambda prompt: "<tool_call>", max_length=600, tool_calls="raising") as served:
        answer = await served.client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL])
        message = answer.choices[0].message
        assert message.content == "<tool_call>" and not message.tool_calls
        assert (await served.http.get("/v1/stats")).json()["malformed_calls"] == 1


CHAT: dict[str, Any] = {"model": MODEL, "messages": USER}


def _said(**message: Any) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", **message}]}


def _called(function: Any) -> dict[str, Any]:
    return _said(tool_calls=[{"function": function}])


SOUND = {"type": "input_audio", "input_audio": {"data": "x"}}
CHATS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "invalid_value": [
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": ["x" * 257]}, "stop.0"),
        ({"chat_template_kwargs": {"enable_thinking": []}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": [{"role": "user", "content": [SOUND]}]}, "messages.0.content.0.type"),
        ({"messages": USER * 4097}, "messages"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"model": "x" * 257}, "model"),
    ],
    "unsupported_parameter": [
        ({"best_of": 3}, "best_of"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tools": [{"function": 5}]}, "tools"),
        (_called("x"), "messages.1.tool_calls"),
        (_called({"name": "f", "arguments": "[1]"}), "messages.1.tool_calls.arguments"),
        (_called({"name": "f", "arguments": "oops"}), "messages.1.tool_calls.arguments"),
        ({"messages": [{**USER[0], "reasoning_content": "hm"}]}, "messages.0.reasoning_content"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
    "context_length_exceeded": [({"messages": [{"role": "user", "content": "x" * 200}]}, "messages")],
}
"""What is refused of chat completions, and the field."""
TEXT = {"model": MODEL, "prompt": "hi"}
MANY = {str(number): 0 for number in range(65)}


REFUSED: list[tuple[str, Any, int, str, str | None]] = [
    *(("chat/completions", {**CHAT, **more}, 400, code, at) for code, bodies in CHATS.items() for more, at in bodies),
    ("chat/completions", "{not json", 400, "invalid_json", None),
    ("chat/completions", {"model": MODEL}, 400, "missing_required_parameter", "messages"),
    ("chat/completions", {**CHAT, "model": "gpt-5"}, 404, "model_not_found", "model"),
    ("completions", {**TEXT, "prompt": "x" * 1_000_000}, 400, "context_length_exceeded", "prompt"),
    ("completions", {**TEXT, "chat_template_kwargs": {}}, 400, "unsupported_parameter", "chat_template_kwargs"),
    ("completions", {**TEXT, "prompt": [10**6]}, 400, "invalid_value", "request"),
    ("completions", {**TEXT, "prompt": [1 << 32]}, 400, "invalid_value", "prompt.0.0"),
    ("completions", {**TEXT, "prompt": []}, 400, "invalid_value", None),
    ("completions", {**TEXT, "prompt": ["x"] * 600, "n": 2}, 400, "unsupported_parameter", "n"),
    ("completions", {**TEXT, "max_tokens": 0}, 400, "unsupported_parameter", "max_tokens"),
    (
        "completions",
        {**TEXT, "max_tokens": 0, "echo": True, "stream": True},
        400,
        "unsupported_parameter",
        "max_tokens",
    ),
    ("responses", {"model": MODEL, "input": "x", "include": ["x"] * 17}, 400, "invalid_value", "include"),
    ("feedback", {"id": "x" * 257, "reward": 1.0}, 400, "invalid_value", "id"),
    ("feedback", {"id": "x", "reward": 1.0, "components": MANY}, 400, "invalid_value", "components"),
    ("feedback", {"id": "nobody", "reward": 1.0}, 404, "session_not_found", "id"),
    ("feedback", {"id": "nobody"}, 400, "missing_required_parameter", "reward"),
    ("feedback", '{"id": "nobody", "reward": NaN}', 400, "invalid_value", "reward"),
]


async def test_bad_requests_are_refused_with_their_field_and_counted(served: Served) -> None:
    for path, body, status, code, param in REFUSED:
        served.endpoint.outcomes.clear()
        content = body if isinstance(body, str) else json.dumps(body)
        response = await served.http.post(f"/v1/{path}", content=content)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code), (path, body, error)
        assert param is None or error["param"] == param, (path, body, error)
        assert error["message"] and error["type"]
        assert served.endpoint.outcomes == {f"{status} {code}": 1}
        assert (await served.client.chat.completions.create(**CHAT)).choices, "others are served"


async def test_only_a_right_key_opens_and_the_health_check_needs_none(served: Served) -> None:
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
        served.http.headers.pop("Authorization", None)
        for path in ("/v1/models", "/v1/stats"):
            assert (await served.http.get(path, headers=header)).status_code == 401
        assert (await served.http.post("/v1/feedback", headers=header, json={})).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        await openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="no").chat.completions.create(**CHAT)
    assert (await served.http.get("/health")).status_code == 200
    assert served.endpoint.outcomes == {"401 invalid_api_key": 10}
    second = await served.http.get("/v1/models", headers={"Authorization": "bearer sk-0"})
    assert second.status_code == 200


@pytest.mark.parametrize("base", ["/sessions/" + "x" * 257, ""])
async def test_a_name_of_a_session_that_is_too_long_is_refused(served: Served, base: str) -> None:
    headers = {} if base else {"X-Task-Id": "x" * 257}
    response = await served.http.post(f"{base}/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] in ("X-Session-Id", "X-Task-Id")


FOREIGN: list[tuple[dict[str, str], int]] = [
    ({"Host": "evil.example"}, 403),
    ({"Host": "127.0.0.1.evil.example:8000"}, 403),
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content-Type": "text/plain; charset=application/json"}, 415),
    ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
    ({"Host": "[::1]:8000"}, 200),
]


async def test_without_keys_nothing_that_a_web_page_can_send_is_taken(tiny_model: Path, served: Served) -> None:
    async with serve(tiny_model, keys=()) as keyless:
        for own, status in FOREIGN:
            headers, before = {"Content-Type": "application/json", **own}, keyless.book.sessions.stats().open
            response = await keyless.http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
            assert response.status_code == status, (own, response.text)
            taken = keyless.book.sessions.stats().open - before
            assert taken == (status == 200), "a refused request is no session"
            read = await keyless.http.get("/v1/stats", headers=headers)
            assert read.status_code == (403 if status == 403 else 200), "reading needs no content type"
            assert (await keyless.http.get("/health", headers=headers)).status_code == 200
            assert (await keyless.client.chat.completions.create(**CHAT)).choices, "others are served"
            if "Host" in own or "Content-Type" in own:  # with a key, which no other web page has
                response = await served.http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
                assert response.status_code == 200


async def test_a_body_that_comes_too_slowly_is_refused_and_others_are_served(tiny_model: Path) -> None:
    async with serve(tiny_model, body_s=0.05) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n"
        writer.write(head.encode() + b'{"model": ')
        answer = await asyncio.wait_for(reader.read(), 20)  # to the end of the connection
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        assert served.endpoint.outcomes == {"408 body_timeout": 1}
        assert (await served.client.chat.completions.create(**CHAT)).choices
        assert served.endpoint.open == 0


async def test_a_giant_body_is_refused_before_it_is_read(tiny_model: Path) -> None:
    async with serve(tiny_model, max_body_kib=64) as served:
        read = 0

        async def endless() -> Any:
            nonlocal read
            while read < 1 << 30:
                read += 1 << 16
                yield b"x" * (1 << 16)

        response = await served.http.post("/v1/chat/completions", content=b"x" * (1 << 20))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # the connection ends while the client writes
            assert (await served.http.post("/v1/chat/completions", content=endless())).status_code == 413
        assert read < 1 << 28
        assert served.endpoint.outcomes["413 request_too_large"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request_and_is_counted(served: Served, stream: bool) -> None:
    served.policy.holding.clear()
    asking = asyncio.create_task(served.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}))
    await served.until(lambda: len(served.policy.requests) == 1)
    asking.cancel()
    await served.until(lambda: served.policy.aborted == 1)
    await served.until(lambda: served.endpoint.outcomes == {"499 client_gone": 1})
    await served.until(lambda: served.book.sessions.stats().calls == {"client_gone": 1})  # after the outcome
    served.policy.holding.set()
    stats = (await served.http.get("/v1/stats")).json()
    assert stats["open"] == 1 and stats["requests"] == {"499 client_gone": 1}  # itself


async def test_a_thousand_open_streams_are_served_and_more_are_refused(tiny_model: Path) -> None:
    async with serve(tiny_model, max_requests=1000) as served:
        served.policy.holding.clear()
        # The application itself is called, for which a process need not have thousands of open files.
        transport = httpx.ASGITransport(served.endpoint.app())
        http = httpx.AsyncClient(transport=transport, base_url=served.url, headers=served.http.headers, timeout=60)
        stream = {**CHAT, "stream": True}
        asked = [asyncio.create_task(http.post("/v1/chat/completions", json=stream)) for _ in range(1000)]
        await served.until(lambda: len(served.policy.requests) == 1000)
        refused = await http.post("/v1/chat/completions", json=stream)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        with pytest.raises(openai.RateLimitError):
            await served.client.chat.completions.create(**CHAT)
        # What needs no engine is answered.
        unknown = await served.http.post("/v1/feedback", json={"id": "nobody", "reward": 1.0})
        assert (unknown.status_code, (await served.http.get("/v1/stats")).json()["open"]) == (404, 1001)
        served.policy.holding.set()
        answers = await asyncio.gather(*asked)
        assert {(each.status_code, each.text[-14:].strip()) for each in answers} == {(200, "data: [DONE]")}
        assert served.endpoint.outcomes == {"200": 1001, "429 rate_limit_exceeded": 2, "404 session_not_found": 1}


async def test_a_dead_engine_and_a_late_answer_are_errors_of_the_server(tiny_model: Path) -> None:
    async with serve(tiny_model, deadline_s=0.05) as served:
        inside = "\x1b[36mray::Engine (pid=7, ip=10.0.0.1, actor_id=c0ffee)\x1b[39m"
        for error, code in [(ActorDied(inside), "engine_died"), (EngineFailed(inside), "engine_failed")]:
            served.policy.error = error
            response = await served.http.post("/v1/chat/completions", json=CHAT)
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
            assert response.json()["error"]["code"] == code and "ray" not in response.text
        served.policy.error = KeyError(inside)
        response = await served.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 500 and "ray" not in response.text and "KeyError" not in response.text
        served.policy.error = None
        served.policy.holding.clear()
        assert (await served.http.post("/v1/chat/completions", json=CHAT)).status_code == 504
        async with served.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as late:
            assert '"code": "timeout"' in (await late.aread()).decode()
        failed = {"503 engine_died": 1, "503 engine_failed": 1, "500 internal_error": 1}
        await served.until(lambda: served.endpoint.outcomes == {**failed, "504 timeout": 2})
        assert served.policy.aborted == 2
        counted = {outcome.split()[1]: count for outcome, count in failed.items()}
        assert served.book.sessions.stats().calls == {**counted, "timeout": 2}


@pytest.mark.parametrize(
    ("off_policy", "status", "temperature", "trained"),
    [("untrained", 200, 0.5, False), ("ignore", 200, 1.0, True), ("refuse", 400, None, None)],
)
async def test_sampling_of_ones_own_is_masked_ignored_or_refused(
    tiny_model: Path, off_policy: str, status: int, temperature: float | None, trained: bool | None
) -> None:
    async with serve(tiny_model, off_policy=off_policy) as served:
        response = await served.http.post("/v1/chat/completions", json={**CHAT, "temperature": 0.5, "top_p": 1.0})
        assert response.status_code == status
        if temperature is None:
            assert response.json()["error"]["param"] == "temperature"
            return
        assert served.policy.requests[0].sampling.temperature == temperature
        served.book.sessions.feedback(response.json()["id"], 1.0, {}, 0.0)
        groups, dropped = served.book.sessions.take()
        assert (len(groups), dict(dropped)) == ((1, {}) if trained else (0, {"not_trained": 1}))


async def test_an_answer_is_as_long_as_the_context_allows(tiny_model: Path) -> None:
    async with serve(tiny_model, lambda prompt: "y" * 500) as served:
        messages: list[Any] = [{"role": "user", "content": "x" * 100}]
        answer = await served.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=64)
        assert answer.usage and answer.usage.total_tokens == MAX_LENGTH
        assert answer.choices[0].finish_reason == "length"
