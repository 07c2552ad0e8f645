"""How models write calls of tools: each chat template's own format is found, and read as vLLM reads it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from rayrft.data.chat_template import Tools
from rayrft.data.reasoning import split_reasoning
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.decoding import AnswerText, decode_message
from rayrft.errors import ConfigError
from rayrft.explorer.tools import vllm_parsers
from rayrft.explorer.tools.call_formats import (
    PROBE_TOOLS,
    CallFormat,
    MalformedCall,
    Probe,
    ToolCall,
    call_formats,
    calls_of,
    instructed,
    probe_template,
)
from rayrft.explorer.tools.vllm_parsers import (
    HostedParser,
    VllmCalls,
    check_call_format,
    check_template,
    open_call_format,
)
from rayrft.registry import Registry
from rayrft.trainer.tiny import make_tokenizer
from tests.conftest import ROOT
from tests.scripted import PoolHere

_TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}{% if m.role == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OWN = {
    "llama4": '[{% for c in m.tool_calls %}{{ c.function.name }}(city="{{ c.function.arguments.city }}", '
    "days={{ c.function.arguments.days }}){{ ', ' if not loop.last }}{% endfor %}]"
}
"""Calls of models whose templates are neither samples nor in trl."""
FORMATS = {
    "qwen3": ("hermes", "hermes"),
    "qwen3_6": (None, "qwen3_coder"),
    "glm4moe": (None, "glm45"),
    "gemma4": (None, "gemma4"),
    "lfm2_2_5": (None, "lfm2"),
    "llama3_1": ("json", "llama3_json"),
    "muse_glimmer": (None, "muse_glimmer"),
    "gptoss": ("harmony", None),
    "deepseek": (None, "deepseek_v31"),
    "deepseekv3": (None, "deepseek_v3"),
    "kimi": (None, "kimi_k2"),
    "llama4": (None, "pythonic"),
    "minimax": (None, "minimax_m2"),
    "mistral": (None, "mistral"),
    "devstral": (None, "mistral"),
    "nemotron_3_nano": (None, "qwen3_coder"),
}
"""By template: the format of rayrft, and the parser of vLLM, that read it."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatTokenizer]:
    """Return a tokenizer with a template, and a token for each of its marks."""
    made: dict[str, ChatTokenizer] = {}

    def make(name: str) -> ChatTokenizer:
        if name not in made:
            if name in OWN:
                text = _TURNS.replace("CALLS", OWN[name])
            elif (sample := ROOT / "tests" / "samples" / "chat_templates" / f"{name}.jinja").exists():
                text = sample.read_text()
            else:
                text = resources.files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()
            marks = sorted(set(re.findall(r"<[^<>\s'\"{}%=+]{2,40}>|\[[A-Z_]{4,}\]", text)))
            hf = make_tokenizer([], ["\uff5c\u2581"], special=["<|bos|>", *marks], template=text)
            hf.bos_token = "<|bos|>"
            folder = tmp_path_factory.mktemp(name)
            hf.save_pretrained(folder)
            made[name] = ChatTokenizer(folder)
        return made[name]

    return make


def probed(tokenizer: ChatTokenizer) -> Probe:
    probe = probe_template(tokenizer)
    assert probe is not None
    return probe


class InThisProcess(CallFormat):
    """vLLM's parser without a process."""

    def __init__(self, tokenizer: ChatTokenizer, name: str | None) -> None:
        probe = probed(tokenizer)
        self.begins = probe.begins
        self.parser = HostedParser(tokenizer.path, name, probe)

    async def read_answer(self, answer: str, tools: tuple[dict[str, object], ...]) -> list[ToolCall | MalformedCall]:
        return calls_of(self.parser.read([(answer, tools)])[0])


@pytest.mark.parametrize("name", FORMATS)
async def test_the_calls_that_a_template_shows_are_read_as_vllm_reads_them(
    name: str, tokenizer: Callable[[str], ChatTokenizer]
) -> None:
    known, (ours, theirs) = tokenizer(name), FORMATS[name]
    probe = probed(known)
    if theirs is not None:
        its_own = InThisProcess(known, theirs)
        assert await its_own.read(probe.text, PROBE_TOOLS) == list(probe.calls)
    if ours is not None:
        form = await open_call_format("auto", known, "form")
        assert type(form) is call_formats.get(ours)
    else:
        form = InThisProcess(known, None)
        assert form.parser.name == theirs or await InThisProcess(known, theirs).read(probe.text, PROBE_TOOLS)
    assert await form.read(probe.text, PROBE_TOOLS) == list(probe.calls)
    assert await form.read(f"<think>{probe.text}</think>It is fine.", PROBE_TOOLS) == []
    for before in ("", "I look it up. "):
        whole = before + probe.text
        ids = known.tokens(whole)
        text, shown = AnswerText(known, held=form.begins), ""
        for token in ids:  # as it is streamed
            text.add([token])
            shown += text.show()
        text.end()
        found = await decode_message(text.text, form, PROBE_TOOLS)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in found.tool_calls]
        if name == "llama4" and before:
            assert not calls, "its calls are the whole answer"
            continue
        assert calls_of(calls) == list(probe.calls)
        assert found.content.startswith(shown), "what was shown is no part of a call"
        if form.begins and ours != "harmony":
            assert shown == found.content == before
        if theirs is not None:
            assert await its_own.read(text.text, PROBE_TOOLS) == list(probe.calls)


def parsed_by_vllm(known: ChatTokenizer, parser: str, text: str) -> tuple[str, list[ToolCall | MalformedCall]]:
    """Return the content and the calls of an answer as vLLM's server finds them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.parser.harmony import get_encoding

    harmony = parser == "openai"  # its parser has the model's own vocabulary
    ids = get_encoding().encode(text, allowed_special="all") if harmony else known.tokens(text)
    shown: Any = list(PROBE_TOOLS)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=shown, tool_choice="auto")
    made = ParserManager.get_parser(tool_parser_name=parser, enable_auto_tools=True, is_harmony=harmony)
    assert made is not None
    _, content, calls = made(known.hf, request.tools).parse(text, request, True, ids)
    return content or "", calls_of([(call.name, call.arguments) for call in calls or ()])


@pytest.mark.parametrize("name", [name for name, (_, theirs) in FORMATS.items() if theirs and name != "mistral"])
async def test_text_after_calls_and_a_good_call_before_a_malformed_one_are_read_as_vllm_reads_them(
    name: str, tokenizer: Callable[[str], ChatTokenizer]
) -> None:
    known, (ours, theirs) = tokenizer(name), FORMATS[name]
    assert theirs is not None
    form = await open_call_format("auto", known, "form") if ours else InThisProcess(known, theirs)
    probe = probed(known)
    for text in (f"{probe.text}\nThat is all.", f"I look it up. {probe.text}\nThat is all."):
        content, calls = parsed_by_vllm(known, theirs, text)
        assert await form.read(text, PROBE_TOOLS) == calls
        assert calls == list(probe.calls) or name == "llama4", "its calls are the whole answer"
        found = await decode_message(known.decode(known.tokens(text)), form, PROBE_TOOLS)
        assert found.content.strip() == content.removesuffix("That is all." * (name == "lfm2_2_5")).strip()

    if len(probe.calls) == 1:
        return
    mixed = probe.text.partition("Rome")[0]
    content, calls = parsed_by_vllm(known, theirs, mixed)
    read = await form.read(mixed, PROBE_TOOLS)
    if ours == "hermes":
        assert not calls, "vLLM's parser drops the good one, too"
        assert read[0] == probe.calls[0] and isinstance(read[1], MalformedCall) and len(read) == 2
    else:
        assert list(map(str, read)) == list(map(str, calls))
        assert read[:1] == ([] if name in ("lfm2_2_5", "llama4") else [probe.calls[0]])
    found = await decode_message(mixed, form, PROBE_TOOLS)
    assert found.malformed == sum(isinstance(each, MalformedCall) for each in read)
    assert len(found.tool_calls) == (0 if found.malformed else len(read)), "an answer with a malformed call is text"


@pytest.mark.parametrize(
    ("before", "written", "count"),
    [
        ("", '{"city": "Paris", "days": 3}', 1),
        ("<|channel|>analysis<|message|>I need to=functions.get_weather.", '{"city": "Paris", "days": 3}', 2),
        ("<|channel|>commentary<|message|>I look it up.", '{"city": "Paris", "days": 3}', 2),
        ("", "{}", 2),
        ("", '{"city": "', 1),
        ("<|channel|>commentary<|message|>I look it up.", '["Paris"]', 2),
        ("<|channel|>final<|message|>No call.", "", 0),
    ],
)
async def test_calls_of_gpt_oss_are_read_as_vllm_reads_them(
    before: str, written: str, count: int, tokenizer: Callable[[str], ChatTokenizer]
) -> None:
    known = tokenizer("gptoss")
    form = await open_call_format("auto", known, "form")
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{written}<|call|>"
    next_turn = "<|start|>assistant"
    text = next_turn.join([before + "<|end|>"] * bool(before) + [call] * count)
    content, calls = parsed_by_vllm(known, "openai", text)
    answer = known.decode(known.tokens(text))
    read = await form.read(answer, PROBE_TOOLS)
    kinds = [[each if isinstance(each, ToolCall) else type(each) for each in found] for found in (read, calls)]
    assert kinds[0] == kinds[1] and len(read) == count
    found = await decode_message(answer, form, PROBE_TOOLS)
    assert split_reasoning(found.content)[1] == content or found.malformed, "an answer with a malformed call is text"


@pytest.mark.parametrize("name", FORMATS)
async def test_a_call_that_is_cut_off_or_garbled_is_malformed_or_none(
    name: str, tokenizer: Callable[[str], ChatTokenizer]
) -> None:
    known = tokenizer(name)
    probe = probed(known)
    form = await open_call_format("auto", known, "form") if FORMATS[name][0] else InThisProcess(known, None)
    first = probe.text.partition("Paris")[0]
    if FORMATS[name][0]:
        assert all(isinstance(found, MalformedCall) for found in await form.read(first, PROBE_TOOLS) or [None])
    for text in (first, first.replace(probe.calls[0].name, ""), "No call."):
        for found in await form.read(text, PROBE_TOOLS):
            assert isinstance(found, MalformedCall) or found.arguments.get("city") != "Paris"


async def test_a_parser_of_vllm_works_in_a_process_and_what_it_cannot_read_is_told(
    tokenizer: Callable[[str], ChatTokenizer],
) -> None:
    known = tokenizer("glm4moe")
    form = await open_call_format("auto", known, "form")
    try:
        probe = probed(known)
        assert await form.read(probe.text, PROBE_TOOLS) == list(probe.calls)
        [malformed] = await form.read("So: <tool_call><arg_key>", PROBE_TOOLS)
        assert isinstance(malformed, MalformedCall) and "<tool_call>" in malformed.problem
        assert await form.read("Nothing to call.", PROBE_TOOLS) == []
    finally:
        await form.close()


@pytest.mark.parametrize("name", ["gptoss", "gemma4"])
def test_results_follow_calls_in_every_loop_as_the_template_writes_them(
    name: str, tokenizer: Callable[[str], ChatTokenizer]
) -> None:
    known = tokenizer(name)
    call = {"type": "function", "id": "call00000", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "get_weather", "tool_call_id": "call00000", "content": "dry"}
    said = {"role": "assistant", "content": "the calls, as text"}
    user = {"role": "user", "content": "?"}
    shown = known.hf.apply_chat_template([user, called], tools=list(PROBE_TOOLS), tokenize=False)
    whole = known.hf.apply_chat_template(
        [user, called, result], tools=list(PROBE_TOOLS), tokenize=False, add_generation_prompt=True
    )
    last = known.tokens(shown.rstrip())[-1]
    told = {"role": "tool", "name": "get_weather", "content": "dry"}
    for before in ([user, said], [user, said, told, said]):
        ids = known.observation(before, [told], (), PROBE_TOOLS, last=last)
        assert known.hf.decode(ids).strip() == whole.removeprefix(shown.rstrip()).strip()


class FaultyParser(HostedParser):
    """A parser that raises, hangs and dies, as the answer says."""

    def __init__(self, *_: object) -> None:
        self.name = "faulty"

    def _read(self, name: str, answer: str, tools: Tools) -> list[tuple[str, str]]:
        if answer == "raise":
            raise KeyError("arguments")
        if answer == "hang":
            time.sleep(1e6)
        if answer == "die":
            os._exit(3)
        return [("look", "{}")]


async def test_a_parser_that_raises_hangs_or_dies_costs_that_call_alone(
    tokenizer: Callable[[str], ChatTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_parsers, "HostedParser", FaultyParser)
    monkeypatch.setattr(vllm_parsers, "_DEADLINE_S", 3.0)
    form = await VllmCalls.open(tokenizer("glm4moe"), "glm45", None, "form")
    try:
        for answer in ("raise", "hang", "die"):
            found, good = await asyncio.gather(form.read(answer, ()), form.read("good", ()))
            assert [type(each) for each in found] == [MalformedCall] and good == [ToolCall("look", {})], answer
    finally:
        await form.close()


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has imported vLLM, which takes another one seconds."""
    monkeypatch.setattr(vllm_parsers, "ProcessPool", PoolHere)


def test_a_format_is_named_by_rayrft_or_vllm_and_another_name_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.tool_parsers import ToolParserManager

    for name in ("auto", *call_formats, *ToolParserManager.list_registered()):
        check_call_format(name, "form")
    with pytest.raises(ConfigError, match="qwen3_coder"):
        check_call_format("qwen3_codr", "form")
    formats: Registry[type[CallFormat]] = Registry("call format")
    formats.register("mine")(type("Mine", (CallFormat,), {}))
    monkeypatch.setattr(vllm_parsers, "call_formats", formats)
    with pytest.raises(ConfigError, match="read_answer"):
        check_call_format("mine", "form")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", ["deepseek", "deepseekv3"])
async def test_a_model_whose_template_shows_calls_but_no_tools_is_told_to_write_them_so(
    name: str, tokenizer: Callable[[str], ChatTokenizer]
) -> None:
    known = tokenizer(name)
    form, probe = await open_call_format("auto", known, "form"), probed(known)
    assert form.instructions.endswith(probe.text)
    [system, _] = instructed([{"role": "user", "content": "?"}], PROBE_TOOLS, form.instructions)
    assert '"name": "get_weather"' in system["content"] and probe.text in system["content"]
    call = {"name": "look", "arguments": {"at": "it"}}
    assert await form.read(form.written(json.dumps(call)), PROBE_TOOLS) == [ToolCall("look", {"at": "it"})]
    await form.close()


@pytest.mark.usefixtures("in_this_process")
async def test_a_template_without_calls_is_one_of_hermes_and_one_that_nobody_reads_is_refused(
    tokenizer: Callable[[str], ChatTokenizer],
) -> None:
    assert type(await open_call_format("auto", tokenizer("llama3"), "form")) is call_formats.get("hermes")
    names = ("llama3", "qwen3", "lfm2", "deepseek_r1_distill", "deepseekv3", "deepseek")
    notices = [await check_template(tokenizer(name), "form") for name in names]
    guesses = [notice and "read as hermes" in notice for notice in notices]
    assert guesses == [None, None, True, True, False, False], "where it is a guess"
    strange = tokenizer("kimi")
    strange.hf.chat_template = _TURNS.replace("CALLS", "{% for c in m.tool_calls %}~{{ c.function }}~{% endfor %}")
    with pytest.raises(ConfigError, match="none of vLLM's parsers"):
        await open_call_format("auto", strange, "form")
