"""The Trainer's step beside a plain Hugging Face loop, on the same rows with the same weights, in one process.

The loop pads micro-batches on the right to their longest row, and computes logits of the answers only. Rows are of one
length, so that packing wins nothing, or of log-normal lengths, the longest ten times the shortest: then the loop takes
the rows as they come, and once more sorted by length, the best that padding can do. Medians of rounds in which each
contender takes one step; tokens without padding.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

import numpy as np
import torch

from rayrft.config.trainer import OptimizerConfig
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.loading import load_policy
from tests.bench.helpers import parse, race
from tests.bench.workload import OPTIMIZER, Shape, join_alone, log_normal_lengths, make_learner, make_rows

CPU = torch.device("cpu")
WARM_UP = 2


class Loop:
    """The plain loop over micro-batches that are rows of a batch, as they are."""

    def __init__(self, folder: str, prompt: int, config: OptimizerConfig) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        self._prompt = prompt
        self._clip_norm = config.clip_norm
        self._adam = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )

    def step(self, micro_batches: list[list[TrainRow]]) -> float:
        tokens = sum(int(row.mask.sum()) for rows in micro_batches for row in rows)
        total = 0.0
        for rows in micro_batches:
            loss = self._loss(rows) / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._adam.step()
        self._adam.zero_grad()
        return total

    def _loss(self, rows: list[TrainRow]) -> torch.Tensor:
        ids, mask, behaviour, advantages = (
            _pad([getattr(row, name) for row in rows]) for name in ("token_ids", "mask", "logprobs", "advantages")
        )
        present = _pad([np.ones(len(row.mask), dtype=np.int64) for row in rows])
        answer = ids.shape[1] - self._prompt
        logits = self._model(
            ids.long(),
            # Without padding there is nothing to mask, and attention is quicker.
            attention_mask=None if bool(present.all()) else present,
            logits_to_keep=answer + 1,
            use_cache=False,
        ).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, -answer:, None].long()).squeeze(-1)
        if rows[0].expert:
            values = -chosen
        else:
            ratio = (chosen - behaviour[:, -answer:]).exp()
            gain = advantages[:, -answer:]
            values = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain)
        return (values * mask[:, -answer:]).sum()


def _pad(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(array) for array in arrays], batch_first=True)


def padded(rows: list[TrainRow], budget: int) -> list[list[TrainRow]]:
    """Micro-batches of rows as they come, each at most ``budget`` tokens with its padding."""
    found: list[list[TrainRow]] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row.mask))
        if not found or (len(found[-1]) + 1) * longest > budget:
            found.append([])
            longest = len(row.mask)
        found[-1].append(row)
    return found


def contenders(folder: str, options: argparse.Namespace, rows: list[TrainRow]) -> dict[str, Callable[[], float]]:
    """Return the functions to compare, which train on the rows once and return the loss."""
    policy = load_policy(folder)
    learner = make_learner(policy, options.algorithm, tokens=options.budget, device=CPU, compute=torch.float32)
    found: dict[str, Callable[[], float]] = {"rayrft, packed": lambda: learner.step([rows]).metrics.loss}
    orders = {"loop, padded as they come": rows}
    if len({len(row.mask) for row in rows}) > 1:
        orders["loop, padded, sorted"] = sorted(rows, key=lambda row: len(row.mask))
    for name, ordered in orders.items():
        loop = Loop(folder, options.prompt, OPTIMIZER)
        micro_batches = padded(ordered, options.budget)
        found[name] = lambda loop=loop, given=micro_batches: loop.step(given)
    return found


def compare(batch: str, rows: list[TrainRow], found: dict[str, Callable[[], float]], rounds: int) -> None:
    """Let each contender take a step a round; print a line for each."""
    losses = {name: list[float]() for name in found}
    steps = {name: lambda name=name, step=step: losses[name].append(step()) for name, step in found.items()}
    times = race(steps, rounds, WARM_UP)
    [ours, *_] = times.values()
    tokens = sum(len(row.mask) for row in rows)
    for name, seconds in times.items():
        # They did the same work.
        np.testing.assert_allclose(losses[name], losses["rayrft, packed"], rtol=1e-3, atol=1e-5, err_msg=name)
        wall, processor = np.median(seconds, axis=0)
        low, middle, high = np.percentile(seconds / ours, [10, 50, 90], axis=0)
        cells = " |".join(f"{m:>6.2f} ({a:.2f}-{b:.2f})" for m, a, b in zip(middle, low, high, strict=True))
        times_ms = f"{wall * 1e3:>8,.0f} {processor * 1e3:>8,.0f}"
        print(f"{batch:7} {name:26} {tokens / wall:>9,.0f} {times_ms} |{cells}", flush=True)


def main() -> None:
    options = parse(
        __doc__,
        rounds=10,
        threads=1,
        algorithm=("grpo", "grpo or sft"),
        hidden=256,
        layers=4,
        vocabulary=8192,
        rows=64,
        prompt=(32, "tokens of each row that are its prompt"),
        length=(256, "tokens of a row in the equal batch"),
        shortest=(64, "of the skewed batch; the longest is ten times that"),
        budget=(8192, "tokens of a micro-batch, padding included"),
    )
    from transformers.utils import logging

    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    join_alone(CPU)
    heads = max(1, options.hidden // 64)
    shape = Shape(options.hidden, options.layers, heads, heads, 64, 3 * options.hidden, options.vocabulary)
    batches = {
        "equal": [options.length] * options.rows,
        "skewed": log_normal_lengths(options.rows, options.shortest, 10 * options.shortest),
    }
    print("ms of the clock and of the processor; then how many times ours, median (10-90 %), by either")
    print(f"{'batch':7} {'':26} {'tokens/s':>9} {'ms':>8} {'proc. ms':>8} |{'clock':^19} |{'processor':^19}")
    with tempfile.TemporaryDirectory() as folder:
        shape.model().save_pretrained(folder)
        for batch, lengths in batches.items():
            rows = make_rows(lengths, options.prompt, options.vocabulary, expert=options.algorithm == "sft")
            compare(batch, rows, contenders(folder, options, rows), options.rounds)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
