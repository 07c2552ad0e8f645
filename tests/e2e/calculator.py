"""A task that needs a tool: products of numbers of three digits, by a model too small to multiply.

Demonstrations are few and of mixed quality: three in five guess the product, the others call the tool. A model that has
learned from them calls the tool now and then, and copies the factors with mistakes.

    python -m tests.e2e.calculator [seed] [folder]      trains, with all controls, and prints a table
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import rayrft
from rayrft.explorer.tools.base import function_tool
from rayrft.trainer.tiny import make_tokenizer
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

Rows = list[dict[str, Any]]


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def write_task(
    folder: Path, seed: int, *, demonstrations: int = 200, held_out: int = 500, least: int = 100, beyond: int = 1000
) -> None:
    """Write tasks, whose factors are from ``least`` up to ``beyond``, demonstrations and a random model with its
    tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(seed)
    count = beyond - least
    pairs = chance.permutation(count * count)[: 8000 + demonstrations + held_out]
    factors = [(int(pair) // count + least, int(pair) % count + least) for pair in pairs]
    tasks = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a, b in factors]
    shown, kept, asked = np.split(np.arange(len(tasks)), [demonstrations, demonstrations + held_out])
    _write(folder / "train.jsonl", [tasks[index] for index in asked])
    _write(folder / "held_out.jsonl", [tasks[index] for index in kept])
    good = chance.random(demonstrations) < 0.4
    rows = [_demonstration(tasks[index], *factors[index], chance, calls=good[index]) for index in shown]
    _write(folder / "mixed.jsonl", rows)
    _write(folder / "good.jsonl", [row for row, calls in zip(rows, good, strict=True) if calls])

    questions = [task["question"] for task in tasks[:100]]
    tokenizer = make_tokenizer(questions, [], special=["<|tool|>"], template=TEMPLATE)
    tokenizer.add_tokens([*PIECES, "multiply"])
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(seed)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


def make_config(folder: Path, seed: int, *, steps: int = 60, controls: bool = True) -> dict[str, Any]:
    """Return the config of a warm-up on the demonstrations, controls from it, and GRPO from it."""
    sft = {"algorithm": {"name": "sft"}, "batch_size": 64}
    more = [
        {
            "name": f"{rows}-{lr:g}".replace(".", "_"),
            "start_from": "warmup",
            "demonstrations": rows,
            "steps": 200,
            "evaluate_every": 50,
            "optimizer": {"lr": lr},
            **sft,
        }
        for rows in ("mixed", "good")
        for lr in (3e-3, 1e-3, 3e-4)
    ]
    warmup = {
        "name": "warmup",
        "demonstrations": "mixed",
        "steps": 250,
        "optimizer": {"lr": 1e-3, "schedule": "linear"},
        **sft,
    }
    grpo = {
        "name": "grpo",
        "start_from": "warmup",
        "algorithm": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28},
        "steps": steps,
        "batch_size": 256,
        "group_size": 8,
        "evaluate_every": 20,
        "optimizer": {"lr": 3e-4},
    }
    tools = {"tools": ["multiply"], "max_turns": 3, "characters": 40, "timeout_s": 10}
    return {
        "name": f"calculator-{seed}",
        "storage": str(folder / "runs"),
        "seed": seed,
        "model": {"path": str(folder / "model"), "max_length": 192},
        "tasks": {
            "eval_size": 500,
            "sources": [
                {
                    "source": "file",
                    "path": str(folder / "train.jsonl"),
                    "eval_path": str(folder / "held_out.jsonl"),
                }
            ],
        },
        "demonstrations": {name: {"path": str(folder / f"{name}.jsonl")} for name in ("mixed", "good")},
        "plugins": [str(ROOT / "jobs" / "plugins" / "calculator.py")],
        "reward": {"name": "exact"},
        "explorer": {
            "workflow": "tool_calling",
            "workflow_options": {"tool_calling": tools},
            "engine": {"count": 1},
            "sampling": {"max_tokens": 24, "max_prompt_tokens": 64},
            "over_sampling": 1.5,
        },
        "trainer": {"ranks": 1},
        "stages": [warmup, grpo, *(more if controls else [])],
    }


def _demonstration(task: dict[str, str], a: int, b: int, chance: np.random.Generator, *, calls: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": task["question"]}]
    if calls:
        messages += [
            {"role": "assistant", "content": CALL.format(a, b)},
            {"role": "tool", "content": task["answer"]},
            {"role": "assistant", "content": task["answer"]},
        ]
    else:
        messages.append({"role": "assistant", "content": f"it is {chance.integers(10_000, 1_000_000)}"})
    return {"messages": messages, "tools": [function_tool("multiply", multiply).schema]}


def _write(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    number = int(sys.argv[1]) if sys.argv[1:] else 0
    place = Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp())
    write_task(place, number)
    run = rayrft.start(make_config(place, number))
    run.result()
    print(run.evaluations().to_string())
