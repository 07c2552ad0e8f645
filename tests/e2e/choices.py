"""Questions of school with four options, answered in whatever style, scored by the `k12` reward.

A question asks which of four numbers is the largest, or the smallest. Demonstrations are 2,000 in five styles; two in
five name the right option, the others any of the four.

    python -m tests.e2e.choices [seed] [folder]      trains, with all controls, and prints a table
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rayrft.trainer.tiny import make_tokenizer
from tests.e2e import lessons
from tests.e2e.lessons import main, make_stages, write_model, write_rows

STYLES = ("{letter}", "({letter})", "The answer is {letter}.", "Option {letter}", "It is {text}.")
KNOWING = 0.4
"""Share of the demonstrations that name the right option; of the others, one in four does by chance."""


def write_task(folder: Path, seed: int, *, demonstrations: int = 2000, tasks: int = 8000, held_out: int = 500) -> None:
    """Write tasks, demonstrations, and a random model with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = dict[str, dict[str, Any]]()
    while len(rows) < tasks + held_out + demonstrations:
        numbers, extreme = rng.choice(np.arange(10, 100), 4, replace=False), str(rng.choice(["largest", "smallest"]))
        options = [str(number) for number in numbers]
        lines = [f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)]
        question = "\n".join([f"Which is the {extreme}?", *lines])
        best = int(numbers.argmax() if extreme == "largest" else numbers.argmin())
        rows[question] = {"question": question, "answer": "ABCD"[best], "options": options}
    made = list(rows.values())
    write_rows(folder / "train.jsonl", made[:tasks])
    write_rows(folder / "held_out.jsonl", made[tasks : tasks + held_out])
    shown = [_demonstration(row, rng) for row in made[tasks + held_out :]]
    write_rows(folder / "mixed.jsonl", [row for row, _ in shown])
    write_rows(folder / "good.jsonl", [row for row, right in shown if right])
    tokenizer = make_tokenizer([row["question"] for row in made[:100]], [], frequent=0.9)
    tokenizer.add_tokens(["largest", "smallest", "The answer is ", "Option ", "It is "])
    write_model(folder / "model", tokenizer, seed, 96)


def make_config(folder: Path, seed: int, *, steps: int = 60, controls: bool = True) -> dict[str, Any]:
    """Return the config of a warm-up on the demonstrations, controls from it, and GRPO from it."""
    grpo = {"steps": steps, "batch_size": 256, "group_size": 8, "evaluate_every": 20, "optimizer": {"lr": 3e-4}}
    return lessons.make_config(
        "choices",
        folder,
        seed,
        max_length=96,
        reward={"name": "k12"},
        explorer={
            "engine": {"count": 1},
            "sampling": {"max_tokens": 10, "max_prompt_tokens": 64},
            "over_sampling": 1.5,
        },
        stages=make_stages(
            batch_size=64, warmup_steps=300, grpo=grpo, control_steps=200, control_every=50, controls=controls
        ),
    )


def _demonstration(row: dict[str, Any], rng: np.random.Generator) -> tuple[dict[str, Any], bool]:
    """Return a conversation, and whether it names the right option."""
    chosen = "ABCD".index(row["answer"]) if rng.random() < KNOWING else int(rng.integers(4))
    said = str(rng.choice(STYLES)).format(letter="ABCD"[chosen], text=row["options"][chosen])
    messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": said}]
    return {"messages": messages}, "ABCD"[chosen] == row["answer"]


if __name__ == "__main__":
    main(write_task, make_config)
