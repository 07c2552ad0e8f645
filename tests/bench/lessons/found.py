"""Expert rows that a run makes of its own right answers to hard tasks, and MIX on them, against GRPO alone.

Both take the same number of steps on as many groups; MIX adds the shortest right answer of each group in which at most
half are right, as an expert row.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from rayrft.cli.reproduce import Figures
from rayrft.core.run import Run
from tests.bench.lessons.lessons import CLIPPED_GRPO, TINY, Row, arguments, base, figures, sft, trained, words


def make_config(folder: Path, seed: int, *, mix: bool, steps: int = 80) -> Row:
    """Return the config of a warm-up, and then of GRPO, or of MIX on what is found."""
    groups = {"steps": steps, "group_size": 8, "evaluate_every": 20, "optimizer": {"lr": 3e-4}}
    alone = {"name": "grpo", "algorithm": CLIPPED_GRPO, "batch_size": 256, **groups}
    mixed = {"algorithm": {**CLIPPED_GRPO, "name": "mix", "mu": 0.1}, "demonstrations": "found", "expert_share": 1 / 9}
    beside = {"name": "mix", "batch_size": 288, **mixed, **groups}
    operators = [{"name": "expert_rows", "max_pass_rate": 0.5, "keep": True}]
    return {
        **base("mix" if mix else "grpo", folder, seed, 9, 38),
        "model": TINY,
        "tasks": {"eval_size": 500, "sources": [words(6, 30_000)]},
        "demonstrations": {"warmup": {"size": 5000, "wrong_share": 0.6, "wrong_field": "word"}},
        "pipelines": {"experiences": operators, "made": "found"} if mix else {},
        "stages": [sft("warmup", "warmup", 250), beside if mix else alone],
    }


def train(folder: Path, seed: int) -> list[Run]:
    """Train both; return the runs."""
    return [trained(make_config(folder, seed, mix=mix)) for mix in (False, True)]


def measure(folder: Path, seed: int) -> Figures:
    """Train both; return the figures of `rayrft reproduce`."""
    return figures(train(folder, seed))


def main() -> None:
    """Train both from the seed of the command line, and print a table."""
    seed, folder = arguments()
    runs = train(folder, seed)
    found = pd.concat(run.evaluations().assign(run=run.name) for run in runs)
    print(found[["run", "stage", "step", "temperature", "accuracy", "low", "high"]].to_string(index=False))


if __name__ == "__main__":
    main()
