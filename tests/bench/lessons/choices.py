"""Questions of school with several right options, answered in whatever style, scored by the `k12` reward.

A question names three words, and asks whether there are animals, fruits, colours or tools among them.
Demonstrations are 2,000 in four styles; two in five name the right options, the others any.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from rayrft.trainer.tiny import make_tokenizer
from tests.bench.lessons import lessons
from tests.bench.lessons.lessons import Row, conversation, main, measured, write_demonstrations, write_model, write_rows

WORDS = {
    "animals": ["cat", "dog", "cow", "horse", "sheep", "mouse", "tiger", "whale", "eagle", "snake"],
    "fruits": ["apple", "pear", "plum", "grape", "melon", "cherry", "peach", "lemon", "mango", "fig"],
    "colours": ["red", "blue", "green", "black", "white", "brown", "pink", "grey", "violet", "amber"],
    "tools": ["saw", "hammer", "drill", "axe", "rake", "spade", "chisel", "wrench", "pliers", "file"],
}
OPTIONS = "\n".join(f"{letter}. {kind}" for letter, kind in zip("ABCD", WORDS, strict=True))
KNOWING = 0.4
"""Share of the demonstrations that name the right options; others do by chance."""


def write_task(folder: Path, seed: int, *, demonstrations: int = 2000, tasks: int = 8000, held_out: int = 500) -> None:
    """Write tasks, demonstrations, and a random model with its tokenizer."""
    rng = np.random.default_rng(seed)
    rows = dict[str, Row]()
    while len(rows) < tasks + held_out + demonstrations:
        kinds = [str(kind) for kind in rng.choice(list(WORDS), 3)]
        named = [str(rng.choice(WORDS[kind])) for kind in kinds]
        question = f"Which are among these: {', '.join(named)}?\n{OPTIONS}"
        right = "".join(letter for letter, kind in zip("ABCD", WORDS, strict=True) if kind in kinds)
        rows[question] = {"question": question, "answer": right, "options": list(WORDS)}
    made = list(rows.values())
    write_rows(folder / "train.jsonl", made[:tasks])
    write_rows(folder / "held_out.jsonl", made[tasks : tasks + held_out])
    write_demonstrations(folder, [_demonstration(row, rng) for row in made[tasks + held_out :]])
    tokenizer = make_tokenizer([row["question"] for row in made[:100]], [], frequent=0.9)
    words = [word for words in WORDS.values() for word in words]
    tokenizer.add_tokens([*words, OPTIONS, "It is ", " and "])
    write_model(folder, tokenizer, seed, 64)


make_config = partial(
    lessons.make_config,
    "choices",
    warmup_steps=300,
    control_steps=200,
    control_every=100,
    control_lrs=(1e-3,),
    tokens=(10, 40),
    max_length=64,
    reward={"name": "k12"},
)


def _demonstration(row: Row, rng: np.random.Generator) -> tuple[Row, bool]:
    """Return a conversation, and whether it names the right options."""
    some = rng.permutation(list("ABCD"))[: rng.integers(1, 4)]
    chosen = row["answer"] if rng.random() < KNOWING else "".join(sorted(some))
    styles = [chosen, " and ".join(chosen), f"({', '.join(chosen)})", f"It is {', '.join(chosen)}."]
    return conversation(row["question"], str(rng.choice(styles))), chosen == row["answer"]


measure = partial(measured, write_task, make_config)

if __name__ == "__main__":
    main(write_task, make_config)
