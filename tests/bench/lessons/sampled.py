"""Tasks drawn by their measured difficulty, against tasks drawn evenly: GRPO from the same weights.

Words of three to six letters are spelled backward. A warmed-up model, of whose demonstrations half are right,
answers each task eight times, as `rayrft data difficulty` does. The runs that follow differ in the sampler of these
tasks alone: ``shuffled`` draws them evenly, ``near_half`` and ``failure`` begin with what was measured. What counts is
accuracy on held-out words of all lengths.

    python -m tests.bench.lessons.sampled [seed] [folder]     measures, trains three times, and prints evaluations
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

import rayrft
from rayrft.benchmark.difficulty import measure_difficulty

_WARMUP = {
    "name": "warmup",
    "algorithm": {"name": "sft"},
    "demonstrations": "warmup",
    "steps": 350,
    "batch_size": 64,
    "optimizer": {"lr": 1e-3, "schedule": "linear"},
}
_WORDS = {
    "source": "reasoning_gym",
    "dataset": "spell_backward",
    "options": {"min_word_len": 3, "max_word_len": 6},
    "size": 10_000,
}


def base(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Return what all runs share."""
    return {
        "name": f"{name}-{seed}",
        "storage": str(folder / "runs"),
        "seed": seed,
        "explorer": {
            "engine": {"count": 1},
            "sampling": {"max_tokens": 9, "max_prompt_tokens": 38},
            "over_sampling": 1.5,
        },
        "trainer": {"ranks": 1},
    }


def measure(folder: Path, seed: int) -> tuple[Path, Path]:
    """Warm a model up and measure its pass rates; return the folder of its weights, and the file of tasks."""
    tiny = {"layers": 3, "hidden_size": 128, "heads": 4, "intermediate_size": 384}
    config = {
        **base(folder, "warmup", seed),
        "model": {"tiny": tiny, "max_length": 48},
        "tasks": {"eval_size": 500, "sources": [_WORDS]},
        "demonstrations": {"warmup": {"size": 4500, "wrong_share": 0.5, "wrong_field": "word"}},
        "stages": [_WARMUP],
    }
    run = rayrft.start(config, say=lambda _: None)
    run.result()
    weights, tasks = run.folder / "checkpoints" / "final", folder / "tasks.parquet"
    found = measure_difficulty(config, tasks, tries=8, model=str(weights), say=lambda _: None)
    print(f"{found.tried} tasks, {found.solved} solved at least once, mean pass rate {found.mean:.3f}", flush=True)
    return weights, tasks


def train(folder: Path, seed: int, sampler: str, weights: Path, tasks: Path) -> pd.DataFrame:
    """Train from the weights on the tasks by one sampler; return the evaluations."""
    grpo = {
        "name": sampler,
        "algorithm": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28},
        "steps": 80,
        "batch_size": 256,
        "group_size": 8,
        "evaluate_every": 10,
        "optimizer": {"lr": 3e-4},
    }
    run = rayrft.start(
        {
            **base(folder, sampler, seed),
            "model": {"path": str(weights), "max_length": 48},
            "tasks": {"eval_size": 500, "sampler": sampler, "sources": [{"source": "tasks", "path": str(tasks)}]},
            "stages": [grpo],
        },
        say=lambda _: None,
    )
    run.result()
    return run.evaluations()


def main() -> None:
    """Do it all from the seed of the command line, and print a table."""
    seed = int(sys.argv[1]) if sys.argv[1:] else 0
    folder = Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp())
    weights, tasks = measure(folder, seed)
    tables = [train(folder, seed, sampler, weights, tasks) for sampler in ("shuffled", "near_half", "failure")]
    found = pd.concat(tables).pivot_table(index="step", columns=["temperature", "stage"], values="accuracy")
    print(found.to_string())


if __name__ == "__main__":
    main()
