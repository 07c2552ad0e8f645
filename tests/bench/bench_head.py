"""Peak memory and time of the chunked head beside the plain one, forward and backward.

    python -m tests.bench.bench_head [--tokens 4096] [--hidden 256 1024] [--vocabulary 151936] [--device cuda]

Both give log-probs of the targets, with gradient, and entropies. The plain head is ``hidden @ weight.T``, log-softmax,
gather; its entropy, without gradient, reuses the log-softmax. Each measurement is a process of its own: on a CPU the
growth of its peak resident memory (VmHWM) over what it held with inputs made and torch warm, on a GPU
``torch.cuda.max_memory_allocated`` over the same. Inputs and gradients of weight and states are ``(V + T) H`` numbers,
of which the gradients count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from rayrft.trainer.head import head_logprobs

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
        logprobs, entropy = head_logprobs(hidden, weight, targets, torch.ones(len(targets), device=hidden.device))
    assert torch.isfinite(entropy.detach()).all()
    torch.autograd.backward(-logprobs.mean())


def peak_bytes(device: torch.device) -> int:
    """The most that this process held at once, so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


def child(kind: str, tokens: int, hidden_size: int, vocabulary: int, device: torch.device, threads: int) -> None:
    """Measure one head in this process; prints JSON."""
    torch.set_num_threads(threads)
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
    # The plain head's numbers must be the chunked one's.
    print(
        json.dumps(
            {
                "bytes": peak_bytes(device) - before,
                "seconds": seconds,
                "processor": processor,
                "check": float(hidden.grad.float().norm()),
            }
        )
    )


def measure(kind: str, hidden: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.bench_head", "--child", kind, "--hidden", str(hidden)]
    for name in ("tokens", "vocabulary", "device", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(said.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        device = torch.device(options.device)
        child(options.child, options.tokens, options.hidden[0], options.vocabulary, device, options.threads)
        return
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}, {options.device}; median of {options.rounds}")
    print(f"{'hidden':>6} {'head':>8} {'peak GiB':>9} {'s':>7} {'proc. s':>8}")
    for hidden in options.hidden:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind, results in found.items():
                results.append(measure(kind, hidden, options))
        middles = {
            kind: {name: statistics.median(result[name] for result in results) for name in results[0]}
            for kind, results in found.items()
        }
        ours, theirs = middles["chunked"], middles["plain"]
        if abs(ours["check"] / theirs["check"] - 1) > 1e-2:
            raise RuntimeError(f"the gradients differ: {ours['check']} and {theirs['check']}")
        for kind, each in middles.items():
            print(
                f"{hidden:>6} {kind:>8} {each['bytes'] / 2**30:>9.2f} {each['seconds']:>7.2f} {each['processor']:>8.2f}"
            )
        ratios = [theirs[name] / ours[name] for name in ("bytes", "seconds", "processor")]
        print(f"{hidden:>6} {'ratio':>8} {ratios[0]:>9.1f} {ratios[1]:>7.2f} {ratios[2]:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
