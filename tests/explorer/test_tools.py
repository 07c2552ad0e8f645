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
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from rayrft.errors import ConfigError
from rayrft.explorer.tools.base import function_tool, shortened
from rayrft.explorer.tools.parsing import Malformed, ToolCall, parse_calls
from rayrft.explorer.tools.toolbox import Toolbox, ToolLimits, ToolResult
from tests.explorer import sample_tools

HERE = "tests.explorer.sample_tools"
ADD = {"name": "add", "arguments": {"a": 1}}
ADDED = ToolCall("add", {"a": 1})


def block(call: Any) -> str:
    return f"<tool_call>\n{call if isinstance(call, str) else json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("It is 4.", []),
        ('{"name": "add", "arguments": {"a": 1}}', []),
        (block(ADD), [ADDED]),
        ("<think>hm</think>I add. " + block(ADD) + "\n" + block({"name": "stop"}), [ADDED, ToolCall("stop", {})]),
        (block({"name": "add", "parameters": {"a": 1}}), [ADDED]),
        (block({"name": "add", "arguments": '{"a": 1}'}), [ADDED]),
        ("<tool_call>" + json.dumps(ADD), [ADDED]),
    ],
)
def test_calls_between_marks_are_read(answer: str, calls: list[ToolCall]) -> None:
    assert parse_calls(answer, "hermes") == calls


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("It is 4.", []),
        ("The set {1, 2} and {}.", []),
        ('{"answer": 4}', []),
        ('{"name": "Ada"}', []),
        (json.dumps(ADD), [ADDED]),
        (f"I add.\n```json\n{json.dumps(ADD, indent=2)}\n```\nDone.", [ADDED]),
        (json.dumps([ADD, {"name": "stop", "parameters": {}}]), [ADDED, ToolCall("stop", {})]),
        (f"{json.dumps(ADD)}; {json.dumps(ADD)}", [ADDED, ADDED]),
        (json.dumps({"arguments": {"a": 1}, "name": "add"}), [ADDED]),
        (json.dumps({"type": "function", "function": ADD}), [ADDED]),
        (json.dumps({"name": "run", "arguments": ADD}), [ToolCall("run", ADD)]),
    ],
)
def test_calls_in_plain_json_are_read(answer: str, calls: list[ToolCall]) -> None:
    assert parse_calls(answer, "json") == calls


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
        [found] = parse_calls(answer, form)  # type: ignore[arg-type]
        assert isinstance(found, Malformed) and found.problem and len(found.problem) < 200
    assert all(isinstance(call, Malformed) for text in ("", "add", "[]") for call in parse_calls(block(text), "hermes"))


@given(st.text(st.sampled_from(list('{}[]"\\:,<>/ natool_cemrguxs1`\n')), max_size=60))
def test_whatever_is_answered_is_read_without_an_error(answer: str) -> None:
    for text in (answer, f"<tool_call>{answer}", f'{{"name": "a", "arguments": {answer}'):
        parse_calls(text, "hermes")
        parse_calls(text, "json")


def test_a_function_is_described_by_its_docstring_and_signature() -> None:
    assert function_tool("times", sample_tools.multiply).schema == {
        "type": "function",
        "function": {
            "name": "times",
            "description": "Multiply two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first factor"},
                    "b": {"type": "integer"},
                },
                "required": ["a"],
            },
        },
    }


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


@pytest_asyncio.fixture
async def toolbox(tmp_path: Path) -> AsyncIterator[Toolbox]:
    names = ["multiply", "hang", "leave", "flood", "fail", "repeat", "meet", "wait_forever", "quit_python", "Counter"]
    options = {f"{HERE}:Counter": {"start": 10, "address": str(tmp_path / "closed")}}
    limits = ToolLimits(timeout_s=60.0, characters=100, calls=6, processes=2)
    toolbox = Toolbox([f"{HERE}:{name}" for name in names], options, [], limits)
    yield toolbox
    await toolbox.close()


async def run(toolbox: Toolbox, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    async with toolbox.session() as session:
        return await session.run([ToolCall(*call) for call in calls])


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
    )
    assert [outcome.error for outcome in found] == ["timeout", None, "failed", None, "failed", None]
    texts = [outcome.text for outcome in found]
    assert "not done within 4 s" in texts[0] and "exit code 5" in texts[2] and "LookupError: no such key" in texts[4]
    assert (texts[1], texts[5]) == ("42", "42")
    told = {record.getMessage().partition(":")[0] for record in caplog.records}
    assert told == {"tool 'hang'", "tool 'leave'", "tool 'fail'"}
    assert texts[3] == f"{'x' * 100}\n[the first 100 of 10,485,760 characters]"


async def test_calls_run_side_by_side_and_results_keep_their_order(toolbox: Toolbox) -> None:
    found = await run(toolbox, *(("meet", {"number": number, "of": 5}) for number in range(5)))
    assert [outcome.text for outcome in found] == list("01234"), "none returns before all have begun"


async def test_async_tools_in_trouble_cost_themselves_alone(toolbox: Toolbox) -> None:
    toolbox.limits, patient = replace(toolbox.limits, timeout_s=0.3), toolbox.limits
    found = await run(toolbox, ("wait_forever", {}), ("quit_python", {}))
    assert [outcome.error for outcome in found] == ["timeout", "failed"]
    toolbox.limits = patient
    assert await run(toolbox, ("repeat", {"text": "here"})) == [ToolResult("here")]


async def test_calls_that_cannot_be_made_are_told_with_what_can(toolbox: Toolbox) -> None:
    async with toolbox.session() as session:
        unknown, wrong, malformed = await session.run(
            [ToolCall("divide", {}), ToolCall("multiply", {"a": "x" * 5000}), Malformed("the call is not JSON")]
        )
    assert unknown.error == "unknown" and "'divide'" in unknown.text and "multiply, hang" in unknown.text
    assert wrong.error == "arguments" and "a: Input should be a valid integer" in wrong.text
    assert malformed == ToolResult("Error: the call is not JSON", "malformed")


async def test_an_answer_calls_no_more_than_its_share(toolbox: Toolbox) -> None:
    found = await run(toolbox, *[("multiply", {"a": 1})] * 8)
    assert [outcome.error for outcome in found] == [None] * 6 + ["failed"] * 2
    assert "at most 6" in found[-1].text


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
