"""Tokens a second and model FLOPs utilisation (MFU) of the Trainer's step on one NVIDIA GPU.

Qwen3 models of these sizes with random weights, in float32 under FSDP2 with bfloat16 compute, packed rows, and gradient
checkpointing or none. FLOPs are those of `tests.bench.workload.Shape.flops`, over the device's dense bfloat16 peak:
what checkpointing and the head compute again is not counted. Medians of steps, each timed until the device is idle.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch

from rayrft.trainer.policy import Policy
from tests.bench.helpers import parse
from tests.bench.workload import Shape, join_alone, log_normal_lengths, make_learner, make_rows

SHAPES = {
    "0.6B": Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "1.7B": Shape(2048, 28, 16, 8, 128, 6144, 151936),
    "4B": Shape(2560, 36, 32, 8, 128, 9728, 151936),
    "8B": Shape(4096, 36, 32, 8, 128, 12288, 151936),  # of Qwen3-8B the head has weights of its own
    "tiny": Shape(64, 2, 2, 1, 32, 128, 500),
}
PEAKS = {"B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989}
PEAKS |= {"H800": 989, "A100": 312, "A800": 312, "L40S": 362}
"""Dense bfloat16 TFLOP/s by a part of the device's name, the first that fits; from NVIDIA's data sheets."""
WARM_UP = 3


def synchronize(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench(
    shape: Shape, lengths: list[int], options: argparse.Namespace, device: torch.device, *, checkpointing: bool
) -> list[float]:
    """Seconds of each step."""
    with torch.device(device):
        policy = Policy(shape.model())
    if checkpointing:
        policy.checkpoint_layers()
    tokens = options.micro_batch_tokens
    learner = make_learner(policy, "grpo", tokens=tokens, device=device, compute=torch.bfloat16)
    rows = make_rows(lengths, options.prompt, shape.vocabulary)
    seconds = []
    for _ in range(WARM_UP + options.steps):
        synchronize(device)
        started = time.perf_counter()
        learner.step([rows])
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def run(name: str, options: argparse.Namespace, device: torch.device, peak: float | None) -> None:
    """A line for each way to run the model of that size."""
    shape = SHAPES[name]
    count = max(1, options.tokens // options.length)
    lengths = (
        log_normal_lengths(count, options.length // 4, options.length * 5 // 2)
        if options.skewed
        else [options.length] * count
    )
    flops = shape.flops(lengths, sum(lengths) - count * options.prompt)
    for checkpointing in (False, True):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            second = statistics.median(bench(shape, lengths, options, device, checkpointing=checkpointing))
        except torch.OutOfMemoryError:
            second = None
        held = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        # The models are in cycles; the next one needs their memory.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        start = f"{name:>6} {'on' if checkpointing else 'off':>13}"
        if second is None:
            print(f"{start}  out of memory; lower --micro-batch-tokens", flush=True)
            continue
        speed = flops / second / 1e12
        mfu = f"{speed / peak:>6.1%}" if peak else f"{'-':>6}"
        print(
            f"{start} {sum(lengths) / second:>10,.0f} {second * 1e3:>9,.1f} {speed:>8.2f} {mfu} {held:>9.1f}",
            flush=True,
        )


def main() -> None:
    options = parse(
        __doc__,
        sizes=["0.6B", "1.7B"],
        tokens=(65536, "of a step"),
        length=(2048, "tokens of a row"),
        skewed=(False, "log-normal lengths, from a quarter to 2.5 of --length"),
        prompt=(128, "tokens of each row that are its prompt"),
        micro_batch_tokens=16384,
        steps=8,
        peak=(float, "TFLOP/s of the device, where its name is not known"),
        device=("cuda", "cpu: for the path of the code, on machines without a GPU"),
        tiny=(False, "a small model, likewise"),
    )
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: the bench did not run")
        return
    if options.tiny:
        options.sizes, options.tokens, options.length, options.prompt = ["tiny"], 512, 64, 8
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    title, peak = "CPU", options.peak
    if device.type == "cuda":
        torch.cuda.set_device(device)
        title = torch.cuda.get_device_name(device)
        peak = peak or next((value for part, value in PEAKS.items() if part in title), None)
    print(f"{title}, torch {torch.__version__}, peak {peak or '?'} TFLOP/s; {options.steps} steps, {vars(options)}")
    print(f"{'size':>6} {'checkpointing':>13} {'tokens/s':>10} {'ms a step':>9} {'TFLOP/s':>8} {'MFU':>6} {'GiB':>9}")
    join_alone(device)
    for name in options.sizes:
        run(name, options, device, peak)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
