"""Formats of calls by name, and calls as vLLM's tool parsers read them, in a process that imports vLLM."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import re
from functools import partial
from typing import Any, Self

from rayrft.data.chat_template import Tools
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import CallFailed, ConfigError, nearest
from rayrft.explorer.engines.arguments import parsed_source
from rayrft.explorer.tools.call_formats import (
    PROBE_TOOLS,
    CallFormat,
    HermesCalls,
    MalformedCall,
    Probe,
    ToolCall,
    call_formats,
    calls_of,
    probe_template,
    shown_call,
)
from rayrft.runtime.processes.calls import CallQueue
from rayrft.runtime.processes.pool import ProcessPool

_CALL_IDS = re.compile(r"\[CALL_ID\]\w+(?=\[ARGS\])")
"""Ids in calls of Mistral's models, which vLLM's parser would take for parts of names."""
_START_S, _DEADLINE_S = 300.0, 60.0
_REMEDY = (
    "name the format in which the model writes calls, such as hermes, json or one of vLLM's parsers, or add one of "
    "your own with register_call_format"
)
_Reading = tuple[str, Tools]


def check_call_format(name: str, field: str) -> None:
    """Raise ConfigError, with the nearest name, unless `open_call_format` knows a format of this name."""
    known = ["auto", *call_formats, *_vllm_parsers()]
    if name not in known:
        raise ConfigError("unknown format of calls", nearest(name, known), field=field, value=name)
    if name in call_formats and (missing := call_formats.get(name).__abstractmethods__):
        problem, remedy = f"the format of calls lacks {', '.join(sorted(missing))}", "define it in the class"
        raise ConfigError(problem, remedy, field=field, value=name)


def _vllm_parsers() -> list[str]:
    """Return the names of vLLM's tool parsers, which its source has."""
    values = (each.value for each in parsed_source("tool_parsers/__init__.py") if isinstance(each, ast.Assign))
    keys = (key for table in values if isinstance(table, ast.Dict) for key in table.keys)
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]


async def open_call_format(name: str, tokenizer: ChatTokenizer, field: str) -> CallFormat:
    """Return a format by name: a registered one, ``auto``, or that of one of vLLM's tool parsers.

    ``auto`` is the first format that reads back what the chat template shows of calls: of those of this package, then
    of vLLM's parsers; ``hermes`` if the template shows none, or no tools and none reads its calls. Raises ConfigError
    if there is no such parser, or none reads the template's calls.
    """
    if name in call_formats:
        return call_formats.get(name, field)()
    probe = probe_template(tokenizer)
    if name == "auto":
        if probe is None:
            return HermesCalls()
        for each in call_formats:
            form = call_formats.get(each)()
            if await form.read(probe.text, PROBE_TOOLS) == list(probe.calls):
                return form
        if not tokenizer.template.takes_tools:  # the prompt says how to call any
            with contextlib.suppress(ConfigError):
                return await VllmCalls.open(tokenizer, None, probe, field)
            return HermesCalls()
    return await VllmCalls.open(tokenizer, None if name == "auto" else name, probe, field)


async def check_template(tokenizer: ChatTokenizer, field: str) -> str | None:
    """Open format ``auto`` for a tokenizer, and close it; return a notice where it is a guess. Raises ConfigError if
    nothing reads the calls that the chat template shows."""
    form = await open_call_format("auto", tokenizer, field)
    await form.close()
    template, probe = tokenizer.template, probe_template(tokenizer)
    if template.takes_tools:
        shown = None if probe is not None else "tools, but no calls"
    else:
        shown = "calls, but no tools, which are described as text" if template.shows_tool_calls else None
    guess = ": calls are read as hermes" if isinstance(form, HermesCalls) else ""
    return f"{field}: the chat template shows {shown}{guess}" if shown is not None else None


class HostedParser:
    """The object of the process: one of vLLM's tool parsers for one tokenizer."""

    def __init__(self, path: str, name: str | None, probe: Probe | None) -> None:
        from transformers import AutoTokenizer
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # a call that cannot be read is not worth a log line
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        names = sorted(ToolParserManager.list_registered())
        if name is not None and name not in names:
            raise LookupError(nearest(name, ["auto", "hermes", "json", *names]))
        self.name = name or next((each for each in names if self._reads(each, probe)), "")
        if not self.name:
            raise LookupError("none of vLLM's parsers reads the calls that the chat template shows")

    def max_batch(self) -> int:
        """Return how many calls may be made at a time."""
        return 64

    def read(self, readings: list[_Reading]) -> list[list[tuple[str, str]]]:
        """Return the names and arguments (JSON) of the calls in each answer."""
        return [self._read(self.name, *reading) for reading in readings]

    def _read(self, name: str, answer: str, tools: Tools) -> list[tuple[str, str]]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager

        shown: Any = list(tools)
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=shown, tool_choice="auto")
        parser = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
        assert parser is not None  # the name is known
        answer = _CALL_IDS.sub("", answer)
        ids = self._tokenizer.encode(answer, add_special_tokens=False)
        _, _, calls = parser(self._tokenizer, request.tools).parse(answer, request, True, ids)
        return [(call.name, call.arguments) for call in calls or ()]

    def _reads(self, name: str, probe: Probe | None) -> bool:
        """Return whether a parser reads back the calls of a probe. Those of other models may raise anything."""
        with contextlib.suppress(Exception):
            return probe is not None and calls_of(self._read(name, probe.text, PROBE_TOOLS)) == list(probe.calls)
        return False


class VllmCalls(CallFormat):
    """The format that one of vLLM's tool parsers reads."""

    def __init__(self, tokenizer: ChatTokenizer, name: str | None, probe: Probe | None, field: str) -> None:
        hosted = partial(HostedParser, tokenizer.path, name, probe)
        pool = ProcessPool(hosted, processes=2, spares=0, start_s=_START_S, inherit=True)
        self.name, self.begins = name or "auto", probe.begins if probe is not None else ""
        self._tokenizer = tokenizer
        if probe is not None and not tokenizer.template.takes_tools:
            self.instructions = f"To call tools, write as in this example:\n{probe.text}"
        self._queue = CallQueue[_Reading, list[tuple[str, str]]](
            pool,
            lambda worker, calls: worker.call("read", [call.argument for call in calls], deadline_s=_DEADLINE_S),
            workers=1,
            spare=1,
            deadline_s=_DEADLINE_S,
            start_s=_START_S,
            failure=lambda why: ConfigError(
                str(why).rpartition("LookupError: ")[2], _REMEDY, field=field, value=self.name
            ),
        )

    @classmethod
    async def open(cls, tokenizer: ChatTokenizer, name: str | None, probe: Probe | None, field: str) -> Self:
        """Start the process. Raises ConfigError if there is no such parser, or none reads the probe."""
        made = cls(tokenizer, name, probe, field)
        await made._queue.open()
        return made

    async def read_answer(self, answer: str, tools: Tools) -> list[ToolCall | MalformedCall]:
        if self.begins and self.begins not in answer:
            return []
        try:
            found = calls_of(await self._queue.put((answer, tools)).done)
        except CallFailed as error:  # a parser may raise, hang or die on what a model writes
            return [MalformedCall(f"vLLM's parser {self.name} failed on the call: {error}")]
        if not found and self.begins:
            return [MalformedCall(f"vLLM's parser {self.name} reads no call after {self.begins}")]
        return found

    def written(self, call: str) -> str:
        function = json.loads(call)
        for arguments in (function["arguments"], json.dumps(function["arguments"])):  # some templates take a text
            shown = shown_call("callabc01", function["name"], arguments)
            if text := self._tokenizer.template.shown_calls([shown], (), self._tokenizer.ends):
                return text
        return call

    async def close(self) -> None:
        await self._queue.close()
