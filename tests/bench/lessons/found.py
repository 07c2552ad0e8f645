"""Expert rows that a run makes of its own right answers to hard tasks, and MIX on them, against GRPO alone.

Words of three to six letters are spelled backward. After a warm-up of which two demonstrations in five are right, both
take the same number of steps on as many groups; MIX adds the shortest right answer of each group in which at most half
are right, as an expert row.

    python -m tests.bench.lessons.found [seed] [folder]      trains both, and prints their evaluations
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

import rayrft

_GROUPS = {"group_size": 8, "evaluate_every": 20, "optimizer": {"lr": 3e-4}}
_CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def make_config(folder: Path, seed: int, *, mix: bool, steps: int = 80) -> dict[str, Any]:
    """Return the config of a warm-up, and then of GRPO, or of MIX on what is found."""
    source = {
        "source": "reasoning_gym",
        "dataset": "spell_backward",
        "options": {"min_word_len": 3, "max_word_len": 6},
        "size": 30_000,
    }
    sft = {
        "name": "warmup",
        "algorithm": {"name": "sft"},
        "demonstrations": "warmup",
        "steps": 250,
        "batch_size": 64,
        "optimizer": {"lr": 1e-3, "schedule": "linear"},
    }
    alone = {"name": "grpo", "algorithm": {"name": "grpo", **_CLIPS}, "batch_size": 256, **_GROUPS}
    beside = {
        "name": "mix",
        "algorithm": {"name": "mix", "mu": 0.1, **_CLIPS},
        "demonstrations": "found",
        "batch_size": 288,
        "expert_share": 1 / 9,
        **_GROUPS,
    }
    operators = [{"name": "expert_rows", "max_pass_rate": 0.5, "keep": True}]
    return {
        "name": f"{'mix' if mix else 'grpo'}-{seed}",
        "storage": str(folder / "runs"),
        "seed": seed,
        "model": {"tiny": {"layers": 3, "hidden_size": 128, "heads": 4, "intermediate_size": 384}, "max_length": 48},
        "tasks": {"eval_size": 500, "sources": [source]},
        "demonstrations": {"warmup": {"size": 5000, "wrong_share": 0.6, "wrong_field": "word"}},
        "explorer": {
            "engine": {"count": 1},
            "sampling": {"max_tokens": 9, "max_prompt_tokens": 38},
            "over_sampling": 1.5,
        },
        "trainer": {"ranks": 1},
        "pipelines": {"experiences": operators, "made": "found"} if mix else {},
        "stages": [sft, {**(beside if mix else alone), "steps": steps}],
    }


def main() -> None:
    """Train both from the seed of the command line, and print a table."""
    seed = int(sys.argv[1]) if sys.argv[1:] else 0
    folder = Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp())
    tables = []
    for mix in (False, True):
        run = rayrft.start(make_config(folder, seed, mix=mix), say=lambda _: None)
        run.result()
        tables.append(run.evaluations().assign(run=run.name))
    print(pd.concat(tables)[["run", "stage", "step", "temperature", "accuracy", "low", "high"]].to_string(index=False))


if __name__ == "__main__":
    main()
