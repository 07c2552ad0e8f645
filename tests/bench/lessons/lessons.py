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
from transformers import PreTrainedTokenizerBase

import rayrft
from rayrft.cli.reproduce import Figures, run_figures
from rayrft.core.run import Run
from tests.trainer.learners import qwen3

Row = dict[str, Any]
Writes, Makes = Callable[[Path, int], None], Callable[[Path, int], Row]
TINY = {"tiny": {"layers": 3, "hidden_size": 128, "heads": 4, "intermediate_size": 384}, "max_length": 48}
CLIPPED_GRPO = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28}


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_demonstrations(folder: Path, rows: Iterable[tuple[Row, bool]]) -> None:
    """Write demonstrations, each with whether it is good, as ``mixed`` and ``good``."""
    found = [*rows]
    write_rows(folder / "mixed.jsonl", (row for row, _ in found))
    write_rows(folder / "good.jsonl", (row for row, good in found if good))


def write_model(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int, max_length: int) -> None:
    """Write a random model of 0.7 M parameters with that tokenizer."""
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(seed)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    model = qwen3(len(tokenizer), 128, 384, layers=3, heads=4, max_position_embeddings=max_length, **ends)
    model.save_pretrained(folder / "model")


def conversation(question: str, answer: str) -> Row:
    """Return a demonstration."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def sft(name: str, demonstrations: str, steps: int, rows: int = 64, **more: Any) -> Row:
    """Return a stage of SFT."""
    stage = {"name": name, "algorithm": {"name": "sft"}, "demonstrations": demonstrations, "steps": steps}
    return {**stage, "batch_size": rows, "optimizer": {"lr": 1e-3, "schedule": "linear"}, **more}


def base(name: str, folder: Path, seed: int, tokens: int, prompt: int, **explorer: Any) -> Row:
    """Return the part that all configs share; ``tokens`` and ``prompt`` are the most in an answer and in a prompt."""
    sampling = {"max_tokens": tokens, "max_prompt_tokens": prompt}
    return {
        "name": f"{name}-{seed}",
        "storage": str(folder / "runs"),
        "seed": seed,
        "explorer": {"engine": {"count": 1}, "sampling": sampling, "over_sampling": 1.5, **explorer},
        "trainer": {"ranks": 1},
    }


def words(longest: int, size: int) -> Row:
    """Return a source of words of three letters and more, to be spelled backward."""
    options = {"min_word_len": 3, "max_word_len": longest}
    return {"source": "reasoning_gym", "dataset": "spell_backward", "options": options, "size": size}


def make_config(
    name: str,
    folder: Path,
    seed: int,
    *,
    steps: int = 60,
    controls: bool = True,
    warmup_steps: int,
    control_steps: int,
    control_every: int,
    control_lrs: Sequence[float] = (3e-3, 1e-3, 3e-4),
    rows: int = 64,
    groups: int = 32,
    every: int = 20,
    lr: float = 3e-4,
    tokens: tuple[int, int],
    max_length: int,
    eval_size: int = 500,
    explorer: Row | None = None,
    **parts: Any,
) -> Row:
    """Return the config of a run on the files that a task has written to ``folder``: a warm-up on the demonstrations,
    ``steps`` steps of GRPO from it, of so many groups of 8, and controls from it at each of some learning rates."""
    source = {"source": "file", "path": str(folder / "train.jsonl"), "eval_path": str(folder / "held_out.jsonl")}
    grpo = {"name": "grpo", "start_from": "warmup", "algorithm": CLIPPED_GRPO, "steps": steps, "evaluate_every": every}
    from_warmup = {"start_from": "warmup", "evaluate_every": control_every}
    more = [
        sft(f"{kind}-{each:g}".replace(".", "_"), kind, control_steps, rows, optimizer={"lr": each}, **from_warmup)
        for kind in ("mixed", "good")
        for each in control_lrs
    ]
    return {
        **base(name, folder, seed, *tokens, **explorer or {}),
        "model": {"path": str(folder / "model"), "max_length": max_length},
        "tasks": {"eval_size": eval_size, "sources": [source]},
        "demonstrations": {kind: {"path": str(folder / f"{kind}.jsonl")} for kind in ("mixed", "good")},
        "stages": [
            sft("warmup", "mixed", warmup_steps, rows),
            {**grpo, "batch_size": 8 * groups, "group_size": 8, "optimizer": {"lr": lr}},
            *(more if controls else []),
        ],
        **parts,
    }


def arguments() -> tuple[int, Path]:
    """Return the seed and the folder of the command line."""
    return int(sys.argv[1]) if sys.argv[1:] else 0, Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp())


def trained(config: Row) -> Run:
    """Train to the end; return the run."""
    run = rayrft.start(config, say=lambda _: None)
    run.result()
    return run


def figures(runs: Iterable[Run], metric: str = "accuracy") -> Figures:
    """Return the figures of `rayrft reproduce` of runs whose stages have different names."""
    return {name: value for run in runs for name, value in run_figures(run.folder, metric).items()}


def measured(write_task: Writes, config: Makes, folder: Path, seed: int) -> Figures:
    """Train from a seed; return the figures of `rayrft reproduce`."""
    write_task(folder, seed)
    return run_figures(trained(config(folder, seed)).folder)


def main(write_task: Writes, config: Makes) -> None:
    """Train from the seed of the command line, in its folder, and print a table."""
    seed, folder = arguments()
    write_task(folder, seed)
    print(trained(config(folder, seed)).evaluations().to_string())
