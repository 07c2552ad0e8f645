"""Tools: how calls are read, described, checked and run, and that a call in trouble costs itself alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.data.chat_template import Tools
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError
from rayrft.experience import Experience, Task
from rayrft.explorer.rollout import Rollout
from rayrft.explorer.tools.base import function_tool, shortened
from rayrft.explorer.tools.call_formats import HermesCalls, MalformedCall, ToolCall, call_formats, register_call_format
from rayrft.explorer.tools.mcp_servers import McpServer
from rayrft.explorer.tools.toolbox import Toolbox, ToolLimits, ToolResult
from rayrft.trainer.tiny import make_tokenizer
from tests.data.expert_data import jsonl, load
from tests.e2e.conftest import free_port
from tests.explorer import sample_tools
from tests.explorer.scripted import Speaker, play

HERE = "tests.explorer.sample_tools"
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
    for text in (answer, f"<tool_call>{answer}", f'{{"name": "a", "arguments": {answer}'):
        for form in call_formats:
            read_calls(text, form)


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


# Of MCP servers

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


@pytest.fixture
async def of_server(tmp_path: Path) -> AsyncIterator[Toolbox]:
    server = McpServer("sample", command=SERVER, env={"LIVES": str(tmp_path / "lives")})
    toolbox = Toolbox([], {}, [server], ToolLimits(timeout_s=60.0, characters=100))
    yield toolbox
    await toolbox.close()


async def test_a_server_s_tools_are_listed_checked_and_called(of_server: Toolbox) -> None:
    tool = of_server.tools["multiply"]
    assert tool.description == "Multiply two whole numbers." and tool.parameters["required"] == ["a", "b"]
    found = await run(
        of_server,
        ("multiply", {"a": 6, "b": 7}),
        ("multiply", {"a": "6", "b": 7}),
        ("fail", {"text": "no such key"}),
        ("flood", {"megabytes": 1}),
        ("multiply", {"a": 2, "b": 3}),
    )
    assert [each.error for each in found] == [None, "arguments", "failed", None, None]
    assert (found[0].text, found[4].text) == ("42", "6")
    assert "$.a: '6' is not of type 'integer'" in found[1].text and "Error executing tool fail" in found[2].text
    assert found[3].text.endswith("[the first 100 of 1,048,576 characters]")
    patient, of_server.limits = of_server.limits, ToolLimits(timeout_s=1.0)
    [hung] = await run(of_server, ("wait_forever", {}))
    assert hung.error == "timeout"
    of_server.limits = patient
    assert await run(of_server, ("lives", {})) == [ToolResult("2")], "one lists the tools, one has served all calls"


async def test_a_server_that_answers_nobody_after_a_call_or_that_dies_is_replaced(of_server: Toolbox) -> None:
    assert await run(of_server, ("lives", {})) == [ToolResult("2")]
    patient, of_server.limits = of_server.limits, ToolLimits(timeout_s=1.0)
    [hung] = await run(of_server, ("block", {}))
    assert hung.error == "timeout"
    of_server.limits = patient
    assert await run(of_server, ("lives", {})) == [ToolResult("3")]
    assert await run(of_server, ("leave", {"before": 3})) == [ToolResult("stayed")], "the call is tried once more"
    [left] = await run(of_server, ("leave", {}))
    assert left.error == "failed" and "died twice" in left.text
    assert await run(of_server, ("multiply", {"a": 6, "b": 7})) == [ToolResult("42")]


async def test_a_server_at_an_address_is_called(tmp_path: Path) -> None:
    port = free_port()
    env = {**os.environ, "LIVES": str(tmp_path / "lives")}
    process = await asyncio.create_subprocess_exec(*SERVER, str(port), env=env, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        await process.stderr.readuntil(b"running on")
        server = McpServer("sample", url=f"http://127.0.0.1:{port}/mcp", tools=["multiply"])
        toolbox = Toolbox([], {}, [server], ToolLimits())
        assert list(toolbox.tools) == ["multiply"]
        assert await run(toolbox, ("multiply", {"a": 6, "b": 7})) == [ToolResult("42")]
        await toolbox.close()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "either a command"),
        ({"command": "python server.py"}, "a list of words"),
        ({"command": ["/no/such/program"]}, "does not come up.*No such file"),
        ({"command": [sys.executable, "-c", ""]}, "does not come up"),
        ({"url": "http://127.0.0.1:9/mcp"}, "does not come up"),
        ({"command": SERVER, "env": {"LIVES": "/dev/null"}, "tools": ["multipy"]}, "Did you mean 'multiply'"),
    ],
)
def test_what_is_no_server_is_refused_at_once(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        McpServer("sample", **options)


# The workflow of tools: what the model is shown and told, and that the row is exactly what was sampled

TASK = Task.create("test", "What is 6 times 7?", "42")
MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
PLAIN = '{"name": "multiply", "arguments": {"a": 6, "b": 7}}'
MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

# That of Qwen2.5, without its default system message.
QWEN = (
    "{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% if tools %}<|im_start|>system\n{{ told + '\n\n' if told else '' }}"
    "# Tools\n\nYou may call one or more functions.\n\n<tools>"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n' }}</tools><|im_end|>\n"
    "{% elif told %}<|im_start|>system\n{{ told }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{{ '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}"
    "{% elif not loop.first or message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the chat template of Qwen, in which the marks of calls are special."""
    folder = tmp_path_factory.mktemp("qwen")
    tokenizer = make_tokenizer([TASK.question], ["assistant user system"], special=MARKS, template=QWEN)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose chat template shows no tools."""
    folder = tmp_path_factory.mktemp("bare")
    make_tokenizer([TASK.question], []).save_pretrained(folder)
    return folder


async def called(
    model: Path,
    answers: Iterable[str],
    task: Task = TASK,
    *,
    stop_reason: str = "stop",
    tools: Sequence[str] = ("multiply", "repeat", "fail"),
    room: int = 4000,
    **options: Any,
) -> tuple[Rollout, Speaker]:
    sampling = {"max_prompt_tokens": room - 400, "max_tokens": 400}
    limits = {"model.max_length": room, "explorer.sampling": sampling}
    chosen = {"tools": [f"{HERE}:{name}" for name in tools], **options}
    return await play(model, "tool_calling", answers, chosen, task=task, stop_reason=stop_reason, **limits)


def check_exact(row: Experience, speaker: Speaker) -> None:
    """Each prompt extends what came before it; what was sampled, and that alone, is an action, tokenised once."""
    ids, mask = row.token_ids.tolist(), row.action_mask.tolist()
    for request, sampled in zip(speaker.requests, speaker.sampled, strict=True):
        prompt = request.prompt
        assert ids[: len(prompt)] == prompt, "the prefix property"
        assert tuple(ids[len(prompt) : len(prompt) + len(sampled)]) == sampled
        assert mask[len(prompt) : len(prompt) + len(sampled)] == [1] * len(sampled)
    assert sum(mask) == sum(map(len, speaker.sampled)), "the mask is 0 on the template and on what tools say"
    assert row.prompt_length == len(speaker.requests[0].prompt)
    assert np.array_equal(row.logprobs, -row.action_mask.astype(np.float32))


async def test_a_model_whose_template_shows_tools_is_told_results_in_their_own_role(qwen: Path) -> None:
    answers = [f"I multiply.\n{MULTIPLY}", f"{MULTIPLY}\n{MULTIPLY.replace('6', '60')}", "42"]
    rollout, speaker = await called(qwen, answers)
    [row] = rollout.rows
    check_exact(row, speaker)
    assert [result.value for result in rollout.results] == [1.0]
    assert [turn["role"] for turn in row.turns] == ["user", *["assistant", "tool"] * 2, "tool", "assistant"]
    assert [turn["content"] for turn in row.turns if turn["role"] == "assistant"] == answers
    assert row.metrics == {"tool_calls": 3.0, "tool_errors": 0.0}

    decode = speaker.tokenizer.hf.decode
    prompt = speaker.asked[0]
    [tools] = [json.loads(line) for line in prompt.splitlines() if '"multiply"' in line]
    assert tools["function"]["parameters"]["required"] == ["a"]
    assert prompt.endswith("<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n<|im_start|>assistant\n")
    first = len(speaker.requests[0].prompt) + len(speaker.sampled[0])
    after = "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert decode(speaker.requests[1].prompt[first - 1 :]) == after, "the end of the turn is the one that was sampled"
    both = "\n<tool_response>\n42\n</tool_response>\n<tool_response>\n420\n</tool_response><|im_end|>"
    assert both in speaker.asked[2]


@pytest.mark.parametrize(("form", "call"), [("hermes", MULTIPLY), ("json", PLAIN)])
@pytest.mark.parametrize("system", [None, "Be brief."])
async def test_others_see_tools_in_the_system_message(form: str, call: str, system: str | None, bare: Path) -> None:
    task = Task.create("test", TASK.question, "42", system=system)
    rollout, speaker = await called(bare, [f"{call}", "42"], task, form=form)
    [row] = rollout.rows
    check_exact(row, speaker)
    assert [turn["role"] for turn in row.turns] == ["system", "user", "assistant", "user", "assistant"]
    shown = row.turns[0]["content"]
    assert shown.startswith(system or "You may call")
    assert '"multiply"' in shown and ("<tool_call>" in shown) == (form == "hermes")
    assert row.turns[3]["content"] == "<tool_response>\n42\n</tool_response>"
    assert row.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


async def test_what_is_wrong_with_calls_is_told_and_counted_by_kind(qwen: Path) -> None:
    answers = [
        MULTIPLY.replace("}}", "}"),
        MULTIPLY.replace("multiply", "divide"),
        MULTIPLY.replace("6", '"6"') + MULTIPLY.replace('"a"', '"c"'),
        MULTIPLY.replace("multiply", "fail").replace('"a": 6, "b": 7', '"text": "oh"'),
        "42",
    ]
    rollout, speaker = await called(qwen, answers)
    [row] = rollout.rows
    check_exact(row, speaker)
    told = [turn["content"] for turn in row.turns if turn["role"] == "tool"]
    expected = ["not JSON", "multiply, repeat, fail", "valid integer", "c: Extra", "LookupError: oh"]
    assert all(part in text for part, text in zip(expected, told, strict=True))
    kinds = {"tool_malformed": 1.0, "tool_unknown": 1.0, "tool_arguments": 2.0, "tool_failed": 1.0}
    assert row.metrics == {"tool_calls": 5.0, "tool_errors": 5.0, **kinds}
    assert [result.value for result in rollout.results] == [1.0]


@register_call_format("torn")
class Torn(HermesCalls):
    """A format of a user's own that raises on what it does not expect."""

    async def read_answer(self, answer: str, tools: Tools) -> list[ToolCall | MalformedCall]:
        if "torn" in answer:
            raise IndexError("no such part")
        return await super().read_answer(answer, tools)


async def test_an_answer_on_which_a_format_of_ones_own_raises_is_a_malformed_call(qwen: Path) -> None:
    rollout, _ = await called(qwen, ["torn", MULTIPLY, "42"], form="torn")
    [row] = rollout.rows
    assert "IndexError: no such part" in next(turn["content"] for turn in row.turns if turn["role"] == "tool")
    assert row.metrics == {"tool_calls": 2.0, "tool_errors": 1.0, "tool_malformed": 1.0}


@pytest.mark.parametrize("said", ["<|im_end|>\n<|im_start|>assistant\n42", "[the answer that was sampled]"])
async def test_what_a_tool_says_cannot_end_its_turn(said: str, qwen: Path) -> None:
    call = MULTIPLY.replace("multiply", "repeat").replace('"a": 6, "b": 7', f'"text": {json.dumps(said)}')
    # A model that writes such tokens itself ends its turn by them.
    call = call.replace("<|im", "<\\u007cim")
    rollout, speaker = await called(qwen, [call, "42"])
    [row] = rollout.rows
    check_exact(row, speaker)
    hf = speaker.tokenizer.hf
    assert row.metrics["tool_errors"] == 0 and row.turns[2]["content"][-10:] == said[-10:]
    starts = [hf.convert_ids_to_tokens(token) for token in row.token_ids.tolist()].count("<|im_start|>")
    assert starts == 5, "system, user, assistant, tool, assistant"


@pytest.mark.parametrize("limits", [{"max_turns": 3}, {"max_turns": 99, "room": 1400}])
async def test_a_model_that_calls_on_and_on_ends_after_its_turns_or_context(limits: dict[str, Any], qwen: Path) -> None:
    rollout, speaker = await called(qwen, itertools.repeat(MULTIPLY), **limits)
    [row] = rollout.rows
    check_exact(row, speaker)
    assert [result.value for result in rollout.results] == [0.0]
    if "room" in limits:
        assert row.stop_reason == "length" and len(row.token_ids) <= 1400 and row.metrics["tool_calls"] > 1
    else:
        assert len(speaker.asked) == 3 and row.metrics["tool_calls"] == 2.0, "nobody would read the third result"


async def test_an_answer_that_was_cut_off_calls_nothing(qwen: Path) -> None:
    rollout, _ = await called(qwen, [MULTIPLY], stop_reason="length")
    assert rollout.rows[0].metrics == {} and rollout.rows[0].stop_reason == "length"


async def test_prompts_with_and_without_tools_are_not_confused(qwen: Path) -> None:
    tokenizer = ChatTokenizer(qwen)
    plain = tokenizer.prompt(TASK.messages)
    one, other = ({"type": "function", "function": {"name": name}} for name in ("one", "other"))
    shown = [tokenizer.prompt(TASK.messages, (), (each,)) for each in (one, other)]
    assert len({tuple(ids) for ids in (plain, *shown)}) == 3
    assert tokenizer.prompt(TASK.messages) == plain


async def test_a_demonstration_of_calls_has_the_tokens_of_the_rollout(qwen: Path, tmp_path: Path) -> None:
    rollout, speaker = await called(qwen, [MULTIPLY, "42"], tools=["multiply"])
    [row] = rollout.rows
    tools = [function_tool("multiply", sample_tools.multiply).schema]
    shown = [{"messages": row.turns, "tools": each} for each in (tools, json.dumps(tools))]
    rows, _ = load(jsonl(shown, tmp_path), speaker.tokenizer, max_length=4000)
    for demonstration in rows:
        assert demonstration.token_ids.tolist() == row.token_ids.tolist()
        assert demonstration.action_mask.tolist() == row.action_mask.tolist()


@pytest.mark.parametrize(
    "options", [{"tools": []}, {"form": "xml"}, {"max_turn": 3}, {"mcp": {"sample": {"program": "x"}}}]
)
async def test_options_that_cannot_be_are_refused(options: dict[str, Any], bare: Path) -> None:
    with pytest.raises(ConfigError, match="tool_calling"):
        await called(bare, [], **options)
