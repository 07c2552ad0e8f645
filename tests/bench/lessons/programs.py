"""Functions of one line to write, whose calls in the sandbox are the reward.

A question lists what to do with ``x``, such as "plus 3, times 2, squared", where the order matters. Demonstrations are
300; two in five put parentheses around every step, the others around none, which computes something else.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from rayrft.trainer.tiny import make_tokenizer
from tests.bench.lessons import lessons
from tests.bench.lessons.lessons import conversation, main, measured, write_demonstrations, write_model, write_rows

Step = tuple[str, int]

WRITTEN = {"plus": "{}+{}", "minus": "{}-{}", "times": "{}*{}", "squared": "{}**2", "negated": "-{}"}
HEAD = "def f(x): return "
CAREFUL = 0.4
"""Share of the demonstrations with parentheses."""
PLACES = (-3, 0, 2, 7)
"""Where a function is called."""


def write_task(folder: Path, seed: int, *, demonstrations: int = 300, tasks: int = 6000, held_out: int = 200) -> None:
    """Write tasks of two or three steps, demonstrations, and a random model with its tokenizer."""
    rng = np.random.default_rng(seed)
    asked = dict[str, list[Step]]()
    while len(asked) < tasks + held_out + demonstrations:
        steps = [(str(rng.choice([*WRITTEN])), int(rng.integers(2, 10))) for _ in range(rng.integers(2, 4))]
        if not _computes(expression(steps, careful=False), steps):
            asked.setdefault("x, " + ", ".join(map(_said, steps)), steps)
    rows = []
    for question, steps in asked.items():
        tests = [{"args": [x], "expected": value(steps, x)} for x in PLACES]
        rows.append({"question": question, "answer": HEAD + expression(steps), "entry_point": "f", "tests": tests})
    write_rows(folder / "train.jsonl", rows[:tasks])
    write_rows(folder / "held_out.jsonl", rows[tasks : tasks + held_out])
    shown, careful = rows[tasks + held_out :], rng.random(demonstrations) < CAREFUL
    answers = [expression(asked[row["question"]], careful=each) for row, each in zip(shown, careful, strict=True)]
    made = [conversation(row["question"], HEAD + answer) for row, answer in zip(shown, answers, strict=True)]
    write_demonstrations(folder, zip(made, careful, strict=True))
    tokenizer = make_tokenizer([row["question"] for row in shown], [HEAD])
    tokenizer.add_tokens([HEAD, "**2", *(f" {name}" for name in WRITTEN)])
    write_model(folder, tokenizer, seed, 96)


make_config = partial(
    lessons.make_config,
    "programs",
    warmup_steps=150,
    control_steps=150,
    control_every=75,
    control_lrs=(1e-3,),
    groups=16,
    every=30,
    tokens=(28, 40),
    max_length=96,
    eval_size=200,
    reward={"name": "code", "workers": 2, "deadline_s": 30, "options": {"budget_s": 20}},
)


def expression(steps: list[Step], *, careful: bool = True) -> str:
    """Write the steps as Python, with parentheses around each, or around none."""
    text = "x"
    for name, number in steps:
        text = WRITTEN[name].format(text, number)
        text = f"({text})" if careful else text
    return text


def value(steps: list[Step], x: int) -> int:
    """Compute what the steps make of ``x``."""
    for name, number in steps:
        x = {"plus": x + number, "minus": x - number, "times": x * number, "squared": x * x, "negated": -x}[name]
    return x


def _said(step: Step) -> str:
    name, number = step
    return f"{name} {number}" if WRITTEN[name].count("{}") == 2 else name


def _computes(text: str, steps: list[Step]) -> bool:
    return all(eval(text, {"x": x}) == value(steps, x) for x in PLACES)


measure = partial(measured, write_task, make_config)

if __name__ == "__main__":
    main(write_task, make_config)
