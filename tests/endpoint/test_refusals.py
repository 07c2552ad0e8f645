"""What the API refuses, each by its field and counted, and that others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rayrft.errors import ActorDied, EngineFailed
from tests.endpoint.scripted import CHAT, KEY, MODEL, TOOL, USER, Served, serve


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


ANSWERED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            *_called({"name": "add", "arguments": "{}"})["messages"],
            {"role": "tool", "tool_call_id": "a", "content": "2"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "metadata": {"session_id": "s"},
        "stop": ["x"],
    },
    "completions": {"prompt": ["hi", "you"], "logit_bias": {"5": 1.0}, "stop_token_ids": [5]},
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "shell_call", "call_id": "a", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "a", "output": [{"stdout": "x"}]},
        ],
        "tools": [
            {"type": "shell"},
            {"type": "namespace", "name": "own", "tools": [{"type": "function", "name": "f"}]},
        ],
        "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
    },
    "messages": {
        "max_tokens": 8,
        "system": [{"type": "text", "text": "hi"}],
        "messages": [
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "d"}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "2"}]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
}
ODD: list[Any] = [None, 0.5, "x", [], [{}], {"type": {}}, {"type": ["x"]}]


def _changed(value: Any, odd: Any) -> Iterator[Any]:
    """Yield the value with another one in its place, and in each place inside of it, or without what is there."""
    yield odd
    if isinstance(value, dict):
        yield from ({key: value[key] for key in value if key != left_out} for left_out in value)
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for other in _changed(inner, odd):
            changed = value.copy()
            changed[key] = other
            yield changed


async def test_whatever_stands_at_any_place_of_a_request_is_answered_or_refused(served: Served) -> None:
    for path, given in ANSWERED.items():
        for body in (each for odd in ODD for each in _changed({"model": MODEL, **given}, odd)):
            response = await served.http.post(f"/v1/{path}", json=body)
            assert response.status_code in (200, 400, 404), (path, body, response.text)


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
