"""Anthropic's Messages API, as the official client uses it, over a scripted policy."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.endpoint.scripted import KEY, MODEL, Served, serve

TOOL: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HI: list[Any] = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def asked(
    folder: Path, say: Callable[[str], str] = lambda prompt: "hello", **config: Any
) -> AsyncIterator[tuple[Served, anthropic.AsyncAnthropic]]:
    async with serve(folder, say, **{"max_length": 600, **config}) as served:
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        client = anthropic.AsyncAnthropic(base_url=served.url, api_key=KEY, max_retries=0, http_client=http)
        yield served, client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["hello", "<think>hm\nso</think>\n\nhello", f"ok {CALL}", f"<think>hm</think>{CALL}"])
async def test_the_official_client_gets_thinking_text_and_calls_of_tools(
    said: str, stream: bool, tiny_model: Path
) -> None:
    async with asked(tiny_model, lambda prompt: said) as (served, client):
        options: Any = {"model": MODEL, "max_tokens": 100, "messages": HI, "system": "Be kind.", "tools": [TOOL]}
        if stream:
            async with client.messages.stream(**options) as events:
                kinds = [event.type async for event in events]
                message = await events.get_final_message()
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        else:
            message = await client.messages.create(**options)
        blocks = {block.type: block for block in message.content}
        assert message.role == "assistant"
        assert message.usage.output_tokens > 3 and message.usage.input_tokens > 3
        assert message.stop_reason == ("tool_use" if CALL in said else "end_turn")
        assert ("thinking" in blocks) == ("<think>" in said) and ("tool_use" in blocks) == (CALL in said)
        if "thinking" in blocks:
            assert blocks["thinking"].thinking == ("hm\nso" if "hello" in said else "hm")
        if "text" in blocks:
            assert blocks["text"].text == ("ok " if CALL in said else "hello")
        if CALL in said:
            assert (blocks["tool_use"].name, blocks["tool_use"].input) == ("add", {"a": 1})
        assert "Be kind." in served.prompts[0] and "add" in served.prompts[0]


async def test_a_conversation_with_results_of_tools_is_one_row(tiny_model: Path) -> None:
    answers = iter([f"<think>hm</think>{CALL}", "3"])
    async with asked(tiny_model, lambda prompt: next(answers)) as (served, client):
        options: Any = {"model": MODEL, "max_tokens": 100, "tools": [TOOL], "metadata": {"user_id": "u"}}
        first = await client.messages.create(messages=HI, **options)
        use = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "one"}]}
        said: list[Any] = [block.model_dump() for block in first.content]
        history = [*HI, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        await client.messages.create(messages=history, **options)
        one, two = served.policy.requests
        assert two.prompt[: len(one.prompt)] == one.prompt
        [row] = served.rows("u")
        assert [turn["role"] for turn in row.turns][-3:] == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_a_stop_sequence_ends_names_it(stream: bool, tiny_model: Path) -> None:
    async with asked(tiny_model, lambda prompt: "one. two; three") as (_, client):
        options: Any = {"model": MODEL, "max_tokens": 50, "messages": HI}
        if stream:
            async with client.messages.stream(**options, stop_sequences=[";", ". "]) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**options, stop_sequences=[";", ". "])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ". ")
        assert [block.text for block in answer.content if block.type == "text"] == ["one"]
        whole = await client.messages.create(**options, stop_sequences=["!"])
        assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)


async def test_tokens_are_counted_and_a_forced_tool_is_called(tiny_model: Path) -> None:
    said = '{"name": "add", "arguments": {"a": 2}}'
    async with asked(tiny_model, lambda prompt: said) as (served, client):
        counted = await client.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
        choice: Any = {"type": "tool", "name": "add"}
        options: Any = {"model": MODEL, "max_tokens": 60, "messages": HI, "system": "Be kind."}
        answer = await client.messages.create(**options)
        assert counted.input_tokens == answer.usage.input_tokens > 3
        called = await client.messages.create(**options, tools=[TOOL], tool_choice=choice)
        assert [block.type for block in called.content] == ["tool_use"]
        schema = json.loads(served.policy.requests[-1].sampling.json_schema)
        assert schema["properties"]["name"] == {"const": "add"}


CLIENT_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"type": "bash_20250124", "name": "bash"}, "restart"),
    (
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 77},
        "max_characters: 77",
    ),
    ({"type": "memory_20250818", "name": "memory"}, "rename"),
    ({"type": "computer_20251124", "name": "computer", "display_width_px": 640, "display_height_px": 480}, "640"),
]


@pytest.mark.parametrize(("tool", "shown"), CLIENT_TOOLS)
async def test_tools_that_the_client_runs_are_functions_to_the_policy_and_documents_are_text(
    tool: Any, shown: str, tiny_model: Path
) -> None:
    call = f'<tool_call>{{"name": "{tool["name"]}", "arguments": {{"command": "view"}}}}</tool_call>'
    async with asked(tiny_model, lambda prompt: call, max_length=2000) as (served, client):
        page: Any = {"type": "document", "title": "Rome", "source": {"type": "text", "data": "It is old."}}
        content = [page, {"type": "text", "text": "Look."}]
        options: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": content}]}
        answer = await client.messages.create(**options, tools=[tool])
        [use] = [block for block in answer.content if block.type == "tool_use"]
        assert (use.name, use.input) == (tool["name"], {"command": "view"})
        assert shown in served.prompts[0] and "Rome\nIt is old.\nLook." in served.prompts[0]


async def test_an_answer_follows_the_schema_and_has_one_call_where_the_client_says_so(tiny_model: Path) -> None:
    async with asked(tiny_model, lambda prompt: f"ok {CALL}{CALL}") as (served, client):
        options: Any = {"model": MODEL, "max_tokens": 200, "messages": HI}
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        form: Any = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
        await client.messages.create(**options, output_config=form)
        assert json.loads(served.policy.requests[-1].sampling.json_schema) == schema
        for alone in (False, True):
            choice: Any = {"type": "auto", "disable_parallel_tool_use": alone}
            answer = await client.messages.create(**options, tools=[TOOL], tool_choice=choice)
            assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"][: 3 - alone]


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({"model": "gpt"}, 404, "not_found_error", "does not exist"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "invalid_request_error", "'video'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "data URL"),
        (
            {"tools": [{"type": "web_fetch_20250910", "name": "f"}, {"type": "tool_search_20251119", "name": "s"}]},
            400,
            "invalid_request_error",
            "tool_search",
        ),
        ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}, 400, "invalid_request_error", "names no"),
        ({"n": 2}, 400, "invalid_request_error", "n: is not supported"),
        ({"output_config": {"format": {"type": "yaml"}}}, 400, "invalid_request_error", "response_format"),
        ({"messages": [{"role": "user", "content": "x" * 99_999}]}, 400, "invalid_request_error", "context length"),
    ],
)
async def test_errors_have_the_form_of_anthropic(
    body: dict[str, Any], status: int, kind: str, said: str, tiny_model: Path
) -> None:
    async with asked(tiny_model) as (served, client):
        given = {"model": MODEL, "max_tokens": 9, "messages": HI, **body}
        answer = await served.http.post("/v1/messages", json=given)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == kind and said in answer.json()["error"]["message"]
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client.with_options(api_key="no").messages.create(model=MODEL, max_tokens=9, messages=HI)
        assert refused.value.body == {
            "type": "error",
            "error": {"type": "authentication_error", "message": "Incorrect API key provided."},
        }


async def test_an_engine_that_fails_in_a_stream_is_an_error_event(tiny_model: Path) -> None:
    async with asked(tiny_model) as (served, client):
        served.policy.error = RuntimeError("boom")
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as events:
                [event async for event in events]
