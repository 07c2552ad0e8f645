"""Tools: how calls are read, described, checked and run, and that a call in trouble costs itself alone."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.errors import ConfigError
from rayrft.explorer.tools.base import function_tool, shortened
from rayrft.explorer.tools.call_formats import MalformedCall, ToolCall, call_formats
from rayrft.explorer.tools.toolbox import Toolbox, ToolLimits, ToolResult
from tests.explorer import sample_tools
from tests.explorer.toolboxes import HERE, run

ADD = {"name": "add", "arguments": {"a": 1}}
ADDED, STOPPED = ToolCall("add", {"a": 1}), ToolCall("stop", {})


def read_calls(answer: str, form: str) -> list[ToolCall | MalformedCall]:
    return asyncio.run(call_formats.get(form)().read(answer, ()))


def block(call: Any) -> str:
    return f"<tool_call>\n{call if isinstance(call, str) else json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "answer", "calls"),
    [
        ("hermes", "It is 4.", []),
        ("hermes", '{"name": "add", "arguments": {"a": 1}}', []),
        ("hermes", block(ADD), [ADDED]),
        ("hermes", "<think>hm</think>I add. " + block(ADD) + "\n" + block({"name": "stop"}), [ADDED, STOPPED]),
        ("hermes", block({"name": "add", "parameters": {"a": 1}}), [ADDED]),
        ("hermes", block({"name": "add", "arguments": '{"a": 1}'}), [ADDED]),
        ("hermes", "<tool_call>" + json.dumps(ADD), [ADDED]),
        ("json", "It is 4.", []),
        ("json", "The set {1, 2} and {}.", []),
        ("json", '{"answer": 4}', []),
        ("json", '{"name": "Ada"}', []),
        ("json", json.dumps(ADD), [ADDED]),
        ("json", f"I add.\n```json\n{json.dumps(ADD, indent=2)}\n```\nDone.", [ADDED]),
        ("json", json.dumps([ADD, {"name": "stop", "parameters": {}}]), [ADDED, STOPPED]),
        ("json", f"{json.dumps(ADD)}; {json.dumps(ADD)}", [ADDED, ADDED]),
        ("json", json.dumps({"arguments": {"a": 1}, "name": "add"}), [ADDED]),
        ("json", json.dumps({"type": "function", "function": ADD}), [ADDED]),
        ("json", json.dumps({"name": "run", "arguments": ADD}), [ToolCall("run", ADD)]),
    ],
)
def test_calls_are_read_between_marks_or_in_plain_json(form: Any, answer: str, calls: list[ToolCall]) -> None:
    assert read_calls(answer, form) == calls


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add", "arguments": {"a": 1},}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}",
        '{"name": "add", "arguments": ' + "[" * 100_000,
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "a"}',
        '{"name": 3, "arguments": {}}',
    ],
    ids=["open", "comma", "NaN", "too long a number", "too deep", "list", "text", "no name"],
)
def test_a_call_that_cannot_be_read_is_told_in_both_forms(call: str) -> None:
    for answer, form in ((block(call), "hermes"), (f"I add: {call}", "json")):
        [found] = read_calls(answer, form)
        assert isinstance(found, MalformedCall) and found.problem and len(found.problem) < 200
    assert all(
        isinstance(call, MalformedCall) for text in ("", "add", "[]") for call in read_calls(block(text), "hermes")
    )


@given(st.text(st.sampled_from(list('{}[]"\\:,<>/ natool_cemrguxs1`\n')), max_size=60))
def test_whatever_is_answered_is_read_without_an_error(answer: str) -> None:
    async def read_all() -> None:
        for text in (answer, f"<tool_call>{answer}", f'{{"name": "a", "arguments": {answer}'):
            for form in ("hermes", "json", "harmony"):
                await call_formats.get(form)().read_answer(text, ())

    asyncio.run(read_all())


def test_a_function_is_described_by_its_docstring_and_signature() -> None:
    schema = function_tool("times", sample_tools.multiply).schema
    properties = {"a": {"type": "integer", "description": "the first factor"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    described = {"name": "times", "description": "Multiply two whole numbers.", "parameters": parameters}
    assert schema == {"type": "function", "function": described}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "a: Field required"),
        ({"a": "3"}, "a: Input should be a valid integer"),
        ({"a": 3.5}, "a: Input should be a valid integer"),
        ({"a": True}, "a: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_names(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        function_tool("times", sample_tools.multiply).check(arguments)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"names": [f"{HERE}:with_any"]}, "cannot be given by name"),
        ({"names": [f"{HERE}:with_object"]}, "cannot be checked"),
        ({"names": [f"{HERE}:Awaited"]}, "async"),
        ({"names": [f"{HERE}:nothing"]}, "cannot be imported"),
        ({"names": ["nothing"]}, "unknown tool"),
        ({"names": [f"{HERE}:multiply"] * 2}, "two tools of one name"),
        ({"names": [f"{HERE}:Counter"], "options": {f"{HERE}:Counter": {"begin": 1}}}, "rejects its options"),
        ({"names": [f"{HERE}:multiply"], "options": {f"{HERE}:multiply": {"begin": 1}}}, "has no options"),
        ({"names": [f"{HERE}:multiply"], "options": {"Counter": {}}}, "not among the tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_at_once(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Toolbox(**{"options": {}, "servers": [], "limits": ToolLimits(), **settings})


def test_what_is_no_text_is_json_and_what_is_long_is_cut() -> None:
    assert shortened({"a": (1, b"\xff"), "b": float("nan")}, 100) == '{"a":[1,"_w=="],"b":NaN}'
    assert shortened("x" * 5000, 10) == f"{'x' * 10}\n[the first 10 of 5,000 characters]"


@pytest.fixture
async def toolbox(tmp_path: Path) -> AsyncIterator[Toolbox]:
    names = ["multiply", "hang", "leave", "flood", "fail", "repeat", "meet", "wait_forever", "quit_python", "Counter"]
    options = {f"{HERE}:Counter": {"start": 10, "address": str(tmp_path / "closed")}}
    limits = ToolLimits(timeout_s=60.0, characters=100, calls=8, processes=2)
    toolbox = Toolbox([f"{HERE}:{name}" for name in names], options, [], limits)
    yield toolbox
    await toolbox.close()


async def test_a_call_in_trouble_costs_itself_alone(toolbox: Toolbox, caplog: pytest.LogCaptureFixture) -> None:
    """All at once, with more calls than processes: each is told, and those between them have their results."""
    toolbox.limits = replace(toolbox.limits, timeout_s=4.0)
    found = await run(
        toolbox,
        ("hang", {}),
        ("multiply", {"a": 21}),
        ("leave", {"code": 5}),
        ("flood", {"megabytes": 10}),
        ("fail", {"text": "no such key"}),
        ("multiply", {"a": 6, "b": 7}),
        ("wait_forever", {}),
        ("quit_python", {}),
    )
    errors = ["timeout", None, "failed", None, "failed", None, "timeout", "failed"]
    assert [outcome.error for outcome in found] == errors
    texts = [outcome.text for outcome in found]
    assert "not done within 4 s" in texts[0] and "exit code 5" in texts[2] and "LookupError: no such key" in texts[4]
    assert (texts[1], texts[5]) == ("42", "42")
    told = {record.getMessage().partition(":")[0] for record in caplog.records}
    assert told == {f"tool '{name}'" for name in ("hang", "leave", "fail", "wait_forever", "quit_python")}
    assert texts[3] == f"{'x' * 100}\n[the first 100 of 10,485,760 characters]"
    assert await run(toolbox, ("repeat", {"text": "here"})) == [ToolResult("here")]


async def test_calls_run_side_by_side_and_results_keep_their_order(toolbox: Toolbox) -> None:
    found = await run(toolbox, *(("meet", {"number": number, "of": 5}) for number in range(5)))
    assert [outcome.text for outcome in found] == list("01234"), "none returns before all have begun"


async def test_an_answer_calls_no_more_than_its_share(toolbox: Toolbox) -> None:
    found = await run(toolbox, *[("multiply", {"a": 1})] * 10)
    assert [outcome.error for outcome in found] == [None] * 8 + ["failed"] * 2
    assert "at most 8" in found[-1].text


async def test_every_attempt_has_objects_of_its_own_which_are_closed(toolbox: Toolbox, tmp_path: Path) -> None:
    closed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    closed.bind(str(tmp_path / "closed"))
    closed.setblocking(False)
    async with toolbox.session() as one, toolbox.session() as other:
        assert [each.text for each in await one.run([ToolCall("add", {}), ToolCall("add", {"by": 5})])] == ["11", "16"]
        assert [each.text for each in await other.run([ToolCall("add", {})])] == ["11"]
        [died] = await other.run([ToolCall("crash", {})])
        assert died.error == "failed" and "exit code 7" in died.text
        assert [each.text for each in await other.run([ToolCall("add", {})])] == ["11"], "the next one begins anew"
        assert [each.text for each in await one.run([ToolCall("add", {})])] == ["17"], "another's is not affected"
    receive = asyncio.get_running_loop().sock_recv
    assert sorted([await receive(closed, 10) for _ in range(2)]) == [b"11", b"17"]
    closed.close()
