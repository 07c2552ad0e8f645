"""Tasks drawn by their measured difficulty, against tasks drawn evenly: GRPO from the same weights.

A warmed-up model answers each word eight times, as `rayrft data difficulty` does. The runs that follow differ in the
sampler alone: ``shuffled`` draws evenly, ``near_half`` and ``failure`` begin with what was measured.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from rayrft.benchmark.difficulty import measure_difficulty
from rayrft.cli.reproduce import Figures
from rayrft.core.run import Run
from tests.bench.lessons.lessons import CLIPPED_GRPO, TINY, arguments, base, figures, sft, trained, words


def measure_tasks(folder: Path, seed: int) -> tuple[Path, Path]:
    """Warm a model up and measure its pass rates; return the folder of its weights, and the file of tasks."""
    config = {
        **base("warmup", folder, seed, 9, 38),
        "model": TINY,
        "tasks": {"eval_size": 500, "sources": [words(6, 10_000)]},
        "demonstrations": {"warmup": {"size": 4500, "wrong_share": 0.5, "wrong_field": "word"}},
        "stages": [sft("warmup", "warmup", 350)],
    }
    weights, tasks = trained(config).folder / "checkpoints" / "final", folder / "tasks.parquet"
    found = measure_difficulty(config, tasks, tries=8, model=str(weights), say=lambda _: None)
    print(f"{found.tried} tasks, {found.solved} solved at least once, mean pass rate {found.mean:.3f}", flush=True)
    return weights, tasks


def train(folder: Path, seed: int, sampler: str, weights: Path, tasks: Path) -> Run:
    """Train from the weights on the tasks by one sampler; return the run."""
    grpo = {"name": sampler, "algorithm": CLIPPED_GRPO, "steps": 80, "batch_size": 256, "group_size": 8}
    config = {
        **base(sampler, folder, seed, 9, 38),
        "model": {"path": str(weights), "max_length": 48},
        "tasks": {"eval_size": 500, "sampler": sampler, "sources": [{"source": "tasks", "path": str(tasks)}]},
        "stages": [{**grpo, "evaluate_every": 10, "optimizer": {"lr": 3e-4}}],
    }
    return trained(config)


def compare(folder: Path, seed: int) -> list[Run]:
    """Do it all; return a run for each sampler."""
    weights, tasks = measure_tasks(folder, seed)
    return [train(folder, seed, sampler, weights, tasks) for sampler in ("shuffled", "near_half", "failure")]


def measure(folder: Path, seed: int) -> Figures:
    """Do it all; return the figures of `rayrft reproduce`."""
    return figures(compare(folder, seed))


def main() -> None:
    """Do it all from the seed of the command line, and print a table."""
    seed, folder = arguments()
    evaluations = pd.concat(run.evaluations() for run in compare(folder, seed))
    found = evaluations.pivot_table(index="step", columns=["temperature", "stage"], values="accuracy")
    print(found.to_string())


if __name__ == "__main__":
    main()
