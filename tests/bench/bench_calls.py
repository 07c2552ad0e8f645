"""Microseconds of processor time to read the calls of tools in an answer: by `hermes` and `json`, by vLLM's parsers of
the same formats in this process, and by the wrapper that runs these in a process of their own.

The tokenizer is a tiny one: vLLM's parsers need the tokens of an answer, which are encoded again. Times of the wrapper
are those of this process; in brackets by the clock, with 64 answers in flight. Before them, how long it takes to start,
and the memory that its processes share with no other.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import psutil

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.explorer.tools.call_formats import PROBE_TOOLS, CallFormat, call_formats, probe_template
from rayrft.explorer.tools.vllm_parsers import HostedParser, VllmCalls
from rayrft.trainer.tiny import make_tokenizer
from tests.bench.helpers import parse, race, spread

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "{% if m.role == 'assistant' %}<|eos|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{# tools #}"
)
CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
FORMATS = {"hermes": ("hermes", f"<tool_call>{CALL}</tool_call>"), "json": ("llama3_json", CALL)}
"""By format of rayrft: the parser of vLLM, and a call."""
SHOWN = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'


def answers(call: str) -> dict[str, str]:
    """Answers by what is in them."""
    return {
        "no call": "It is dry in Paris, and warm. " * 10,
        "a call": call,
        "a call after 4,000 characters of reasoning": f"<think>{'It may be dry in Paris. ' * 167}</think>{call}",
    }


def tokenizer(call: str) -> ChatTokenizer:
    """A tokenizer whose template shows calls as a format writes them."""
    folder, marks = tempfile.mkdtemp(prefix="bench-"), ["<tool_call>", "</tool_call>", "<|python_tag|>"]
    template = TEMPLATE.replace("CALL", call.replace(CALL, SHOWN))
    make_tokenizer([], [], special=marks, template=template).save_pretrained(folder)
    return ChatTokenizer(folder)


def read_all(loop: asyncio.AbstractEventLoop, form: CallFormat, texts: Sequence[str]) -> None:
    async def read() -> None:
        for text in texts:
            await form.read(text, PROBE_TOOLS)

    loop.run_until_complete(read())


def parse_all(parser: HostedParser, texts: Sequence[str]) -> None:
    parser.read([(text, PROBE_TOOLS) for text in texts])


async def in_flight(form: CallFormat, texts: Sequence[str], most: int = 64) -> float:
    """Return the seconds by the clock of reading the texts, so many at a time."""
    started = time.perf_counter()
    for first in range(0, len(texts), most):
        await asyncio.gather(*(form.read(text, PROBE_TOOLS) for text in texts[first : first + most]))
    return time.perf_counter() - started


def main() -> None:
    options = parse(__doc__, answers=256, rounds=7)
    loop = asyncio.new_event_loop()
    print("| µs of processor time per answer, median (range) | rayrft | vLLM, this process | vLLM, its own process |")
    for name, (theirs, call) in FORMATS.items():
        known = tokenizer(call)
        probe = probe_template(known)
        started = time.perf_counter()
        wrapped = loop.run_until_complete(VllmCalls.open(known, theirs, probe, "form"))
        seconds = time.perf_counter() - started
        own = [each.memory_full_info().uss >> 20 for each in psutil.Process().children(recursive=True)]
        print(f"| `{name}`: {seconds:.1f} s to start, MiB of each of its processes alone: {own} |")
        ours, parser = call_formats.get(name)(), HostedParser(known.path, theirs, probe)
        for what, text in answers(call).items():
            texts = [text] * options.answers
            read = {
                "ours": partial(read_all, loop, ours, texts),
                "theirs": partial(parse_all, parser, texts),
                "wrapped": partial(read_all, loop, wrapped, texts),
            }
            times = race(read, options.rounds, warm_up=1)
            cells = [spread(each[:, 1] / len(texts) * 1e6, ".0f") for each in times.values()]
            clock = [loop.run_until_complete(in_flight(wrapped, texts)) / len(texts) for _ in range(options.rounds)]
            print(f"| `{name}`, {what} | " + " | ".join(cells) + f" [{np.median(clock) * 1e6:.0f}] |")
        loop.run_until_complete(wrapped.close())


if __name__ == "__main__":
    main()
