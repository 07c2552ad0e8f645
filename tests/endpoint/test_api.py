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
from fastapi import FastAPI

from rayrft.errors import ActorDied, EngineFailed
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


async def call(app: FastAPI, body: dict[str, Any]) -> tuple[int, dict[str, str], str]:
    """Call the application itself, for which a process need not have thousands of open files."""
    sent: list[Any] = []
    asked = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    answered = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent).decode()


async def test_the_official_client_gets_answers_models_and_usage(tiny_model: Path) -> None:
    async with serve(tiny_model) as served:
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


async def test_nothing_is_kept_of_who_does_not_want_it(tiny_model: Path) -> None:
    async with serve(tiny_model) as served:
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


async def test_a_session_may_be_named_by_the_base_url(tiny_model: Path) -> None:
    async with serve(tiny_model) as served:
        client = served.client.with_options(base_url=f"{served.url}/sessions/s-7/v1")
        assert [model.id async for model in client.models.list()] == [MODEL]
        answer = await client.chat.completions.create(model=MODEL, messages=USER, extra_headers={"X-Session-Id": "no"})
        rated: Any = await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": 1.0})
        assert rated["session_id"] == "s-7" and len(served.book.sessions.take()[0]) == 1


async def test_streamed_text_is_the_whole_answer_and_usage_comes_last(tiny_model: Path) -> None:
    async with serve(tiny_model) as served:
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
async def test_a_stop_string_ends_the_answer_at_the_engine_and_is_not_shown(
    tiny_model: Path, stream: bool, thought: str
) -> None:
    async with serve(tiny_model, lambda prompt: f"{thought}one two three four five six") as served:
        options: dict[str, Any] = {"stop": ["o t", "never"]}
        if stream:
            chunks = await streamed(served, **options)
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        else:
            answer = await served.client.chat.completions.create(model=MODEL, messages=USER, **options)
            text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
            assert reason == "stop" and answer.usage and answer.usage.completion_tokens == len(f"{thought}one two t")
        assert text == f"{thought}one tw"
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


async def test_options_of_the_template_are_the_requests_own_and_a_session_goes_by_them(tiny_model: Path) -> None:
    shown = "{% if quiet is defined and quiet %}!{% endif %}"
    async with serve(tiny_model, lambda prompt: "5</think>6") as served:
        template = served.policy.tokenizer.hf.chat_template
        served.policy.tokenizer.hf.chat_template = shown + template + "{% if not quiet %}<think>{% endif %}"
        chats = [*USER, {"role": "assistant", "content": "<think>5</think>6"}, {"role": "user", "content": "more"}]
        texts = []
        for messages, quiet in [(USER, False), (chats, False), (chats, True)]:
            body = {"model": MODEL, "user": "s", "messages": messages, "chat_template_kwargs": {"quiet": quiet}}
            answer = (await served.http.post("/v1/chat/completions", json=body)).json()
            texts.append(answer["choices"][0]["message"]["content"])
        assert texts == ["<think>5</think>6", "<think>5</think>6", "5</think>6"]
        prompts = [served.policy.tokenizer.hf.decode(request.prompt) for request in served.policy.requests]
        assert prompts[0] == "<|user|>hi<|assistant|><think>" and prompts[1].startswith(prompts[0] + "5</think>6")
        assert prompts[2] == "!<|user|>hi<|assistant|><think>5</think>6<|eos|><|user|>more<|assistant|>"


async def test_a_second_reward_is_refused_once(tiny_model: Path) -> None:
    async with serve(tiny_model) as served:
        answer = await served.client.chat.completions.create(**CHAT)
        client = served.client.with_options(max_retries=2)
        for refused in (False, True):
            with pytest.raises(openai.ConflictError) if refused else contextlib.nullcontext():
                await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": 1.0})
        assert served.endpoint.outcomes == {"200": 2, "409 already_rewarded": 1}


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


CHAT: dict[str, Any] = {"model": MODEL, "messages": USER}


def _said(**message: Any) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", **message}]}


def _called(function: Any) -> dict[str, Any]:
    return _said(tool_calls=[{"function": function}])


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
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
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": USER * 4097}, "messages"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"model": "x" * 257}, "model"),
    ],
    "unsupported_parameter": [
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"tool_choice": "required"}, "tool_choice"),
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


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        *(("chat/completions", {**CHAT, **more}, 400, code, param)
          for code, bodies in CHATS.items() for more, param in bodies),
        ("chat/completions", "{not json", 400, "invalid_json", None),
        ("chat/completions", {"model": MODEL}, 400, "missing_required_parameter", "messages"),
        ("chat/completions", {**CHAT, "model": "gpt-5"}, 404, "model_not_found", "model"),
        ("completions", {**TEXT, "prompt": "x" * 1_000_000}, 400, "context_length_exceeded", "prompt"),
        ("completions", {**TEXT, "chat_template_kwargs": {}}, 400, "unsupported_parameter", "chat_template_kwargs"),
        ("completions", {**TEXT, "prompt": [10**6]}, 400, "invalid_value", "request"),
        ("completions", {**TEXT, "prompt": [1 << 32]}, 400, "invalid_value", "prompt.0"),
        ("completions", {**TEXT, "prompt": []}, 400, "invalid_value", None),
        ("responses", {"model": MODEL, "input": "x", "include": ["x"] * 17}, 400, "invalid_value", "include"),
        ("feedback", {"id": "x" * 257, "reward": 1.0}, 400, "invalid_value", "id"),
        ("feedback", {"id": "x", "reward": 1.0, "components": MANY}, 400, "invalid_value", "components"),
        ("feedback", {"id": "nobody", "reward": 1.0}, 404, "session_not_found", "id"),
        ("feedback", {"id": "nobody"}, 400, "missing_required_parameter", "reward"),
        ("feedback", '{"id": "nobody", "reward": NaN}', 400, "invalid_value", "reward"),
    ],
)  # fmt: skip
async def test_bad_requests_are_refused_with_their_field_and_counted(
    tiny_model: Path, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    async with serve(tiny_model) as served:
        content = body if isinstance(body, str) else json.dumps(body)
        response = await served.http.post(f"/v1/{path}", content=content)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code), error
        assert param is None or error["param"] == param
        assert error["message"] and error["type"]
        assert served.endpoint.outcomes == {f"{status} {code}": 1}
        assert (await served.client.chat.completions.create(**CHAT)).choices  # others are served


async def test_only_a_right_key_opens_and_the_health_check_needs_none(tiny_model: Path) -> None:
    async with serve(tiny_model) as served:
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
async def test_a_name_of_a_session_that_is_too_long_is_refused(tiny_model: Path, base: str) -> None:
    async with serve(tiny_model) as served:
        headers = {} if base else {"X-Task-Id": "x" * 257}
        response = await served.http.post(f"{base}/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 400 and response.json()["error"]["param"] in ("X-Session-Id", "X-Task-Id")


FOREIGN = [
    ("host", {"Host": "evil.example"}, 403),
    ("host", {"Host": "127.0.0.1.evil.example:8000"}, 403),
    ("origin", {"Origin": "https://evil.example"}, 403),
    ("origin", {"Origin": "null"}, 403),
    ("form", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ("text", {"Content-Type": "text/plain; charset=application/json"}, 415),
    ("own", {"Content-Type": "application/json; charset=utf-8"}, 200),
    ("own", {"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
    ("own", {"Host": "[::1]:8000"}, 200),
]


@pytest.mark.parametrize(("kind", "headers", "status"), FOREIGN)
async def test_without_keys_nothing_that_a_web_page_can_send_is_taken(
    tiny_model: Path, kind: str, headers: dict[str, str], status: int
) -> None:
    async with serve(tiny_model, keys=()) as served:
        headers = {"Content-Type": "application/json", **headers}
        response = await served.http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
        assert response.status_code == status, response.text
        assert bool(served.book.sessions.stats().open) == (status == 200), "a refused request is no session"
        read = await served.http.get("/v1/stats", headers=headers)
        assert read.status_code == (403 if status == 403 else 200), "reading needs no content type"
        assert (await served.http.get("/health", headers=headers)).status_code == 200
        assert (await served.client.chat.completions.create(**CHAT)).choices  # others are served
    if kind in ("host", "form"):
        async with serve(tiny_model) as served:  # with a key, which no other web page has
            response = await served.http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
            assert response.status_code == 200


async def test_a_body_that_comes_too_slowly_is_refused_and_others_are_served(tiny_model: Path) -> None:
    async with serve(tiny_model, body_s=0.05) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        head = [
            "POST /v1/completions HTTP/1.1",
            "Host: a",
            f"Authorization: Bearer {KEY}",
            "Content-Length: 99",
            "",
            "",
        ]
        writer.write("\r\n".join(head).encode() + b'{"model": ')
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
async def test_a_client_that_goes_away_aborts_its_request_and_is_counted(tiny_model: Path, stream: bool) -> None:
    async with serve(tiny_model) as served:
        served.policy.holding.clear()
        asking = asyncio.create_task(served.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}))
        await served.until(lambda: len(served.policy.requests) == 1)
        asking.cancel()
        await served.until(lambda: served.policy.aborted == 1)
        await served.until(lambda: served.endpoint.outcomes == {"499 client_gone": 1})
        assert served.book.sessions.stats().calls == {"client_gone": 1}
        served.policy.holding.set()
        stats = (await served.http.get("/v1/stats")).json()
        assert stats["open"] == 1 and stats["requests"] == {"499 client_gone": 1}  # itself


async def test_a_thousand_open_streams_are_served_and_more_are_refused(tiny_model: Path) -> None:
    async with serve(tiny_model, max_requests=1000) as served:
        served.policy.holding.clear()

        app = served.endpoint.app()
        asked = [asyncio.create_task(call(app, {**CHAT, "stream": True})) for _ in range(1000)]
        await served.until(lambda: len(served.policy.requests) == 1000)
        status, headers, _ = await call(app, {**CHAT, "stream": True})
        assert (status, headers["retry-after"]) == (429, "1")
        with pytest.raises(openai.RateLimitError):
            await served.client.chat.completions.create(**CHAT)
        # What needs no engine is answered.
        unknown = await served.http.post("/v1/feedback", json={"id": "nobody", "reward": 1.0})
        assert (unknown.status_code, (await served.http.get("/v1/stats")).json()["open"]) == (404, 1001)
        served.policy.holding.set()
        answers = await asyncio.gather(*asked)
        assert {(status, body[-14:].strip()) for status, _, body in answers} == {(200, "data: [DONE]")}
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
