"""A task that needs a tool: products of numbers of three digits, by a model too small to multiply.

Demonstrations are few and of mixed quality: three in five guess the product, the others call the tool. A model that has
learned from them calls the tool now and then, and copies the factors with mistakes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rayrft.explorer.tools.base import function_tool
from rayrft.trainer.tiny import make_tokenizer
from tests.bench.lessons import lessons
from tests.bench.lessons.lessons import conversation, main, measured, write_demonstrations, write_model, write_rows
from tests.conftest import ROOT

TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|eos|>"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = '<tool_call>{{"name": "multiply", "arguments": {{"a": {}, "b": {}}}}}</tool_call>'
PIECES = ["<tool_call>", '{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}", "</tool_call>"]
"""What the tokenizer has as one token: a call is its digits and little else."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def write_task(
    folder: Path, seed: int, *, demonstrations: int = 200, held_out: int = 500, least: int = 100, beyond: int = 1000
) -> None:
    """Write tasks, whose factors are from ``least`` up to ``beyond``, demonstrations and a random model with its
    tokenizer."""
    chance = np.random.default_rng(seed)
    count = beyond - least
    pairs = chance.permutation(count * count)[: 8000 + demonstrations + held_out]
    factors = [(int(pair) // count + least, int(pair) % count + least) for pair in pairs]
    tasks = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a, b in factors]
    shown, kept, asked = np.split(np.arange(len(tasks)), [demonstrations, demonstrations + held_out])
    write_rows(folder / "train.jsonl", [tasks[index] for index in asked])
    write_rows(folder / "held_out.jsonl", [tasks[index] for index in kept])
    good = chance.random(demonstrations) < 0.4
    rows = [_demonstration(tasks[index], *factors[index], chance, calls=good[index]) for index in shown]
    write_demonstrations(folder, zip(rows, good, strict=True))

    questions = [task["question"] for task in tasks[:100]]
    tokenizer = make_tokenizer(questions, [], special=["<|tool|>"], template=TEMPLATE)
    tokenizer.add_tokens([*PIECES, "multiply"])
    write_model(folder, tokenizer, seed, 256)


TOOL = {"tools": ["multiply"], "max_turns": 3, "characters": 40, "timeout_s": 10}
make_config = partial(
    lessons.make_config,
    "calculator",
    warmup_steps=250,
    control_steps=200,
    control_every=50,
    tokens=(24, 64),
    max_length=192,
    plugins=[str(ROOT / "jobs" / "plugins" / "calculator.py")],
    reward={"name": "exact"},
    explorer={"workflow": "tool_calling", "workflow_options": {"tool_calling": TOOL}},
)


def _demonstration(task: dict[str, str], a: int, b: int, chance: np.random.Generator, *, calls: bool) -> dict[str, Any]:
    answer = CALL.format(a, b) if calls else f"it is {chance.integers(10_000, 1_000_000)}"
    shown = conversation(task["question"], answer)
    if calls:
        shown["messages"] += [{"role": role, "content": task["answer"]} for role in ("tool", "assistant")]
    return {**shown, "tools": [function_tool("multiply", multiply).schema]}


measure = partial(measured, write_task, make_config)

if __name__ == "__main__":
    main(write_task, make_config)
