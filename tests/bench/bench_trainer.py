"""The Trainer's step beside a plain Hugging Face loop, on the same rows with the same weights, in one run.

    python -m tests.bench.bench_trainer [--rounds 10] [--algorithm sft] [--hidden 512]

Both are one process with float32 weights. The loop is what one writes by hand: micro-batches padded on the right to
their longest row, logits of the answers only (``logits_to_keep``), log-softmax, gather, the loss, clip, AdamW. Two
batches:

* ``equal``: all rows have one length, so that there is nothing to win by packing. What the Trainer costs more is the
  price of sharding, of the chunked head and of its metrics.
* ``skewed``: log-normal lengths, the longest ten times the shortest. The loop takes as many rows as they come as fit
  into the token budget, padding included; then once more with the rows sorted by length, the best that padding can do.

Every round gives each contender one step; a table gives medians over rounds, tokens without padding. The seconds of
the processor are there for machines that do other work, too: they are what the step itself took.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from rayrft.config.trainer import OptimizerConfig
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.model import load_policy
from tests.bench.workload import OPTIMIZER, Shape, join_alone, log_normal_lengths, make_learner, make_rows

CPU = torch.device("cpu")
WARM_UP = 2


@dataclass
class Contender:
    """``step`` trains on the batch once and gives the loss. Times are pairs, of the clock and of the processor."""

    name: str
    step: Callable[[], float]
    losses: list[float] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)


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


def contenders(folder: str, options: argparse.Namespace, rows: list[TrainRow]) -> list[Contender]:
    learner = make_learner(
        load_policy(folder), options.algorithm, micro_batch_tokens=options.budget, device=CPU, compute=torch.float32
    )
    found = [Contender("rayrft, packed", lambda: learner.step([rows]).metrics.loss)]
    orders = {"loop, padded as they come": rows}
    if len({len(row.mask) for row in rows}) > 1:
        orders["loop, padded, sorted"] = sorted(rows, key=lambda row: len(row.mask))
    for name, ordered in orders.items():
        loop = Loop(folder, options.prompt, OPTIMIZER)
        micro_batches = padded(ordered, options.budget)
        found.append(Contender(name, lambda loop=loop, given=micro_batches: loop.step(given)))
    return found


def race(batch: str, rows: list[TrainRow], found: list[Contender], rounds: int) -> None:
    """One step of each contender a round, beginning with another one each time; prints a line for each."""
    for number in range(WARM_UP + rounds):
        first = number % len(found)
        for each in found[first:] + found[:first]:
            started = time.perf_counter(), time.process_time()
            each.losses.append(each.step())
            if number >= WARM_UP:
                each.seconds.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    # They did the same work.
    for each in found:
        np.testing.assert_allclose(each.losses, found[0].losses, rtol=1e-3, atol=1e-5, err_msg=each.name)
    tokens = sum(len(row.mask) for row in rows)
    ours = np.array(found[0].seconds)
    for each in found:
        seconds = np.array(each.seconds)
        wall, processor = np.median(seconds, axis=0)
        low, middle, high = np.percentile(seconds / ours, [10, 50, 90], axis=0)
        cells = " |".join(f"{m:>6.2f} ({a:.2f}-{b:.2f})" for m, a, b in zip(middle, low, high, strict=True))
        print(
            f"{batch:7} {each.name:26} {tokens / wall:>9,.0f} {wall * 1e3:>8,.0f} {processor * 1e3:>8,.0f} |{cells}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--algorithm", choices=("grpo", "sft"), default="grpo")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each row that are its prompt")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row in the equal batch")
    parser.add_argument("--shortest", type=int, default=64, help="of the skewed batch; the longest is ten times that")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch, padding included")
    options = parser.parse_args()
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
            race(batch, rows, contenders(folder, options, rows), options.rounds)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
