"""What the learning tasks beside this file share: a small random model, a warm-up on demonstrations of mixed quality,
and from it GRPO and the controls: more steps on the same demonstrations, and on those of them that are good."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

import rayrft

Rows = list[dict[str, Any]]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int, max_length: int) -> None:
    """Write a random model of 0.7 M parameters with that tokenizer."""
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_stages(
    *,
    batch_size: int,
    warmup_steps: int,
    grpo: dict[str, Any],
    control_steps: int,
    control_every: int,
    controls: bool,
    control_lrs: Sequence[float] = (3e-3, 1e-3, 3e-4),
) -> Rows:
    """Return the stages: ``warmup``, ``grpo`` with these settings, and controls at each of some learning rates.
    Demonstrations are named ``mixed`` and ``good``."""
    sft = {"algorithm": {"name": "sft"}, "batch_size": batch_size}
    more = [
        {
            "name": f"{rows}-{lr:g}".replace(".", "_"),
            "start_from": "warmup",
            "demonstrations": rows,
            "steps": control_steps,
            "evaluate_every": control_every,
            "optimizer": {"lr": lr},
            **sft,
        }
        for rows in ("mixed", "good")
        for lr in control_lrs
    ]
    warmup = {
        "name": "warmup",
        "demonstrations": "mixed",
        "steps": warmup_steps,
        "optimizer": {"lr": 1e-3, "schedule": "linear"},
        **sft,
    }
    algorithm = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28}
    return [
        warmup,
        {"name": "grpo", "start_from": "warmup", "algorithm": algorithm, **grpo},
        *(more if controls else []),
    ]


def make_config(
    name: str, folder: Path, seed: int, *, max_length: int, eval_size: int = 500, **parts: Any
) -> dict[str, Any]:
    """Return the config of a run on the files that a task has written to ``folder``."""
    source = {"source": "file", "path": str(folder / "train.jsonl"), "eval_path": str(folder / "held_out.jsonl")}
    return {
        "name": f"{name}-{seed}",
        "storage": str(folder / "runs"),
        "seed": seed,
        "model": {"path": str(folder / "model"), "max_length": max_length},
        "tasks": {"eval_size": eval_size, "sources": [source]},
        "demonstrations": {rows: {"path": str(folder / f"{rows}.jsonl")} for rows in ("mixed", "good")},
        "trainer": {"ranks": 1},
        **parts,
    }


def main(write_task: Callable[[Path, int], None], config: Callable[[Path, int], dict[str, Any]]) -> None:
    """Train from the seed of the command line, in its folder, and print a table."""
    seed = int(sys.argv[1]) if sys.argv[1:] else 0
    folder = Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp())
    write_task(folder, seed)
    run = rayrft.start(config(folder, seed))
    run.result()
    print(run.evaluations().to_string())
