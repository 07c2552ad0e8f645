"""The Responses API, as the official client and coding agents use it, over a scripted policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.endpoint.scripted import MODEL, Served, serve

LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


async def responded(served: Served, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await served.client.responses.create(**asked)
    async with served.client.responses.stream(**asked) as events:
        return await events.get_final_response()


async def test_a_response_is_whole_with_usage_log_probs_and_why_it_ends(served: Served) -> None:
    include: Any = ["message.output_text.logprobs"]
    ask = served.client.responses.create
    answer = await ask(model=MODEL, input="hi", instructions="Be kind.", include=include)
    assert (answer.status, answer.output_text) == ("completed", "hello")
    assert answer.usage and (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(served.policy.requests[0].prompt), 6,
    )  # fmt: skip
    assert "Be kind." in served.prompts[0]
    message: Any = answer.output[0]
    assert [entry.logprob for entry in message.content[0].logprobs] == [-0.5] * 6
    short = await ask(model=MODEL, input="hi", max_output_tokens=3)
    assert (short.status, short.output_text) == ("incomplete", "hel")
    assert short.incomplete_details and short.incomplete_details.reason == "max_output_tokens"


async def test_the_events_of_a_stream_add_up_to_the_response(served: Served) -> None:
    async with served.client.responses.stream(model=MODEL, input="hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "hello" and final.status == "completed"
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == "hello"  # as they are sampled, not at the end
    expected = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    expected += ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert list(dict.fromkeys(kinds)) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_coding_agent_gives_tools_that_take_a_text_and_gets_the_reasoning_apart(
    stream: bool, tiny_model: Path
) -> None:
    call = json.dumps({"name": "patch", "arguments": {"input": "*** Begin"}})

    def patches(prompt: str) -> str:
        return "red" if "patched" in prompt else f"<think>so</think>Hm.<tool_call>{call}</tool_call>"

    form = {"type": "grammar", "syntax": "lark", "definition": "start: begin"}
    tools: Any = [{"type": "custom", "name": "patch", "format": form}, {"type": "web_search"}]
    async with serve(tiny_model, patches, max_length=600) as served:
        items: list[Any] = [{"role": "user", "content": "Mend it."}]
        for kinds in (["reasoning", "message", "custom_tool_call"], ["message"]):
            asked: Any = {"model": MODEL, "input": items, "tools": tools, "user": "s", "max_output_tokens": 200}
            asked["reasoning"] = {"summary": "auto"}
            if stream:
                async with served.client.responses.stream(**asked) as events:
                    seen = [event async for event in events]
                    answer = await events.get_final_response()
                for index, item in enumerate(answer.output):
                    of_item = [event for event in seen if getattr(event, "output_index", None) == index]
                    assert of_item[0].type == "response.output_item.added"
                    assert of_item[-1].type == "response.output_item.done" and of_item[-1].item.id == item.id
            else:
                answer = await served.client.responses.create(**asked)
            assert [item.type for item in answer.output] == kinds
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            if len(kinds) == 3:
                thought, _, called = answer.output
                assert thought.content[0].text == "so" and answer.output_text == "Hm."
                assert (called.name, called.input) == ("patch", "*** Begin")
                items.append({"type": "custom_tool_call_output", "call_id": called.call_id, "output": "patched"})
        assert answer.output_text == "red"
        assert "web_search" not in served.prompts[0] and "start: begin" in served.prompts[0], "the grammar is shown"
        assert len(served.rows("s")) == 1


EXIT = {"stdout": "blue", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
OPERATION = {"type": "delete_file", "path": "a.py"}
HOSTED = [{"type": "mcp", "server_label": "x"}, {"type": "shell", "environment": {"type": "container_auto"}}]
CLIENT_TOOLS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "look": (
        LOOK,
        {},
        {"type": "function_call", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "output": "blue"},
    ),
    "local_shell": (
        {"type": "local_shell"},
        {"command": ["ls"]},
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "output": "blue"},
    ),
    "shell": (
        {"type": "shell", "environment": {"type": "local"}},
        {"commands": ["ls"]},
        {"type": "shell_call", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "output": [EXIT]},
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        OPERATION,
        {"type": "apply_patch_call", "operation": OPERATION},
        {"type": "apply_patch_call_output", "status": "completed", "output": "blue"},
    ),
    "agents.look": (
        {"type": "namespace", "name": "agents", "description": "Others.", "tools": [LOOK]},
        {},
        {"type": "function_call", "name": "look", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "output": [{"type": "input_text", "text": "blue"}]},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CLIENT_TOOLS)
async def test_the_loop_of_a_tool_of_any_kind_is_one_row_as_it_was_sampled(
    name: str, stream: bool, tiny_model: Path
) -> None:
    """Tools of coding agents are functions to the policy. Before the call of a function it says something."""
    tool, arguments, item, output = CLIENT_TOOLS[name]
    text = "Hm." if name == "look" else ""
    call = f"{text}<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    async with serve(tiny_model, lambda prompt: "red" if "blue" in prompt else call, max_length=900) as served:
        items: list[Any] = [{"type": "web_search_call", "id": "w", "status": "completed", "action": {}}]
        items.append({"role": "user", "content": [{"type": "input_text", "text": "Go."}]})
        asked: Any = {"model": MODEL, "tools": [tool, *HOSTED], "user": "s", "max_output_tokens": 200}
        asked["extra_body"] = {"client_metadata": {}}
        first = await responded(served, stream, input=items, **asked)
        *said, called = first.model_dump(exclude_none=True)["output"]
        assert first.output_text == text and {key: called[key] for key in item} == item
        items += [*said, called, {**output, "call_id": called["call_id"], "id": called["call_id"]}]
        assert (await responded(served, stream, input=items, **asked)).output_text == "red"
        assert "mcp" not in served.prompts[0]
        [row] = served.rows("s")
        assert served.sampled(row)
        assert [turn["role"] for turn in row.turns][-4:] == ["user", "assistant", "tool", "assistant"]


UNSUPPORTED: list[tuple[dict[str, Any], str | None]] = [
    ({}, "input"),
    ({"input": []}, "messages"),
    ({"input": 3, "instructions": "Be kind."}, "input"),
    ({"input": [3]}, "input.0"),
    ({"input": [{"role": "user"}]}, "input.0"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
    ({"input": "hi", "tools": [{"type": "computer_use_preview"}]}, "tools"),
    ({"input": "hi", "tools": [{"type": "namespace", "name": "a", "tools": [{"type": "computer"}]}]}, "tools"),
    ({"input": "hi", "tools": [{"type": "namespace", "name": 7, "tools": [LOOK]}]}, "tools"),
    ({"input": [{"type": "shell_call", "call_id": "c", "action": 5}]}, "input.0"),
    ({"input": [{"type": "mcp_call", "id": "c"}]}, "input.0"),
    ({"input": "hi", "tools": [{"type": "custom"}]}, "tools"),
    ({"input": "hi", "tools": 5}, "tools"),
    ({"input": "hi", "text": {"format": 5}}, "text.format"),
    ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "hi", "text": {"format": {"type": "yaml"}}}, "response_format.type"),
    ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "hi", "max_tokens": 3}, "max_tokens"),
    ({"input": "hi", "logprobs": True}, "logprobs"),
]


async def test_what_responses_do_not_support_is_refused_with_its_field(served: Served) -> None:
    for body, param in UNSUPPORTED:
        response = await served.http.post("/v1/responses", json={"model": MODEL, **body})
        error = response.json()["error"]
        assert response.status_code == 400 and (param is None or error["param"] == param), (body, error)
    assert served.policy.requests == []
