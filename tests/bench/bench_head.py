"""Peak memory and time of the chunked head beside the plain one, forward and backward.

Both give log-probs of the targets, with gradient, and entropies; the plain head's reuse the log-softmax. Each
measurement is a process of its own: on a CPU the growth of its peak resident memory (VmHWM) over what it held with
inputs made and torch warm, on a GPU ``torch.cuda.max_memory_allocated`` over the same. Gradients count.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rayrft.trainer.head import head_logprobs
from tests.bench.helpers import parse

KINDS = ("chunked", "plain")


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T).float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


def run(kind: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Forward and backward."""
    if kind == "plain":
        logprobs, entropy = plain(hidden, weight, targets)
    else:
        logprobs, entropy = head_logprobs(hidden, weight, targets, None)
    assert torch.isfinite(entropy.detach()).all()
    torch.autograd.backward(-logprobs.mean())


def peak_bytes(device: torch.device) -> int:
    """The most that this process held at once, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


def measure(kind: str, tokens: int, hidden_size: int, vocabulary: int, on: str, threads: int) -> list[float]:
    """Measure one head in this process; return its peak in GiB, seconds, and those of the processor, and a number that
    is the same for both heads."""
    torch.set_num_threads(threads)
    device = torch.device(on)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    run(kind, torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.arange(8))
    # In place: what was held and given back would hide as much of the peak.
    hidden, weight = (
        torch.empty(rows, hidden_size, device=device, dtype=dtype).normal_(std=std).requires_grad_()
        for rows, std in ((tokens, 1.0), (vocabulary, 0.02))
    )
    targets = torch.randint(vocabulary, (tokens,), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak_bytes(device)
    started = time.perf_counter(), time.process_time()
    run(kind, hidden, weight, targets)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, processor = time.perf_counter() - started[0], time.process_time() - started[1]
    assert hidden.grad is not None and weight.grad is not None
    held = (peak_bytes(device) - before) / 2**30
    return [held, seconds, processor, float(hidden.grad.float().norm())]


def main() -> None:
    options = parse(__doc__, tokens=4096, hidden=[256, 1024], vocabulary=151936, device="cpu", threads=1, rounds=3)
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}, {options.device}; median of {options.rounds}")
    print(f"{'hidden':>6} {'head':>8} {'peak GiB':>9} {'s':>7} {'proc. s':>8}")
    given = options.vocabulary, options.device, options.threads
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for hidden in options.hidden:
            found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
            for _ in range(options.rounds):
                for kind, results in found.items():
                    results.append(processes.submit(measure, kind, options.tokens, hidden, *given).result())
            ours, theirs = (np.median(found[kind], axis=0) for kind in KINDS)
            if abs(ours[3] / theirs[3] - 1) > 1e-2:
                raise RuntimeError(f"the gradients differ: {ours[3]} and {theirs[3]}")
            for name, row in ((KINDS[0], ours), (KINDS[1], theirs), ("ratio", theirs / ours)):
                print(f"{hidden:>6} {name:>8} {row[0]:>9.2f} {row[1]:>7.2f} {row[2]:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
