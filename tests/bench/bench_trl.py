"""Seconds of a GRPO step, generation included, beside TRL's `GRPOTrainer` on the same cores.

Both start from the same weights and tokenizer and take the same prompts in groups of the same size: temperature 1,
float32, AdamW with the same settings, no KL, one update a step, a cheap reward with variance, and a learning rate that
hardly changes the policy. Weights are random, so that an answer of up to 64 tokens ends earlier in a third of cases;
with ``--ends`` the model was first taught to end its answers, the longest ten times as long as the shortest.

* rayrft: the whole system on a Ray of its own; engines and ranks of one thread each. A step includes the weight sync.
* TRL: one process that generates with transformers in one padded batch, or with ``--continuous 1`` by continuous
  batching, on the number of threads that makes it fastest. Its defaults stand but for gradient checkpointing, bfloat16
  and splitting the batch.

Each run is a process of its own that may use only those cores; in every round all runs follow one another. A step is
the time from the end of one to the end of the next, after the first few; the seconds of all processors are beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np

from rayrft.experience import Task
from rayrft.rewards import inline
from tests.bench.helpers import parse, start_ray
from tests.bench.workload import OPTIMIZER

SKIPPED = 3
"""Steps at the beginning that are not counted: imports, first allocations, the weight group's rendezvous."""
LR = 1e-6


@inline
def vowels() -> Callable[[Task, str], float]:
    """A reward that costs nothing: the share of vowels in the answer."""
    return lambda task, response: share_of_vowels(response)


def share_of_vowels(text: str) -> float:
    return sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text))


def questions(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice([*ascii_lowercase], 6)) for _ in range(count)]
    return [f"Spell this word backward, letter by letter: {word}" for word in words]


def processor_seconds() -> float:
    """Of this process and all that it started and that live."""
    import psutil

    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def run_rayrft(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, by the clock and of processors, and the mean length of answers."""
    import ray

    import rayrft
    from rayrft.monitor.records import StepRecord
    from tests.bench.lessons.lessons import base

    start_ray(16, dashboard=True)  # Ray Train asks its state API whether the trainer's controller lives
    prompts, group, new = options.batch
    source = {"source": "file", "path": str(folder / "tasks.jsonl")}
    stage = {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": SKIPPED + options.steps}
    optimizer = {"lr": LR, "betas": OPTIMIZER.betas, "clip_norm": OPTIMIZER.clip_norm}
    explorer = {"engine": {"count": options.engines}, "drop_zero_variance": False, "over_sampling": 1.0}
    config = {
        **base("bench", folder, 0, new, 128, **explorer),
        "max_staleness": options.staleness,
        "model": {"path": str(folder / "model"), "max_length": 128 + new},
        "tasks": {"sources": [source], "eval_size": 1, "sampler": "sequential"},
        "reward": {"name": "tests.bench.bench_trl:vowels", "truncated": "score"},
        "trainer": {"ranks": options.ranks},
        "stages": [{**stage, "batch_size": prompts * group, "group_size": group, "optimizer": optimizer}],
        "evaluation": {"enabled": False},
        "checkpoint": {"every": None},
    }
    run = rayrft.start(config, say=lambda _: None)
    processor = [processor_seconds() for record in run.records() if isinstance(record, StepRecord)]
    run.result()
    metrics = run.metrics()
    ray.shutdown()
    parts = metrics.iloc[SKIPPED:][["wait_s", "train_s", "sync_s"]].median().round(3).to_dict()
    return {
        "seconds": metrics["time"].diff().iloc[SKIPPED:].tolist(),
        "processor": np.diff(processor)[SKIPPED - 1 :].tolist(),
        "tokens": float((metrics["policy_tokens"] / metrics["usual_rows"]).mean()),
        "parts": parts,
    }


def run_trl(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, by the clock and of processors, and the mean length of answers."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    prompts, group, new = options.batch
    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.perf_counter(), processor_seconds()))

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [share_of_vowels(completion[0]["content"]) for completion in completions]

    # A cache that holds the whole batch, in pages of 256 tokens; by default it takes most of the machine's memory.
    cache = {"num_blocks": prompts * group * -(-(128 + new) // 256), "max_batch_tokens": 4096}
    rows = [json.loads(line)["question"] for line in (folder / "tasks.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row}]} for row in rows]),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=new,
            use_transformers_continuous_batching=bool(options.continuous),
            transformers_continuous_batching_config=cache,
            max_steps=SKIPPED + options.steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=OPTIMIZER.betas[0],
            adam_beta2=OPTIMIZER.betas[1],
            max_grad_norm=OPTIMIZER.clip_norm,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    seconds, processor = np.diff(ends, axis=0)[SKIPPED - 1 :].T.tolist()
    return {"seconds": seconds, "processor": processor, "tokens": float(np.mean(lengths)), "parts": {}}


def measure(kind: str, folder: Path, batch: str, options: argparse.Namespace, **more: int) -> dict[str, Any]:
    """One run in a process of its own."""
    given = argparse.Namespace(**{**vars(options), **more, "batch": _batch(batch)})
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(run, kind, folder, given).result()


def run(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run in this process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    return (run_rayrft if kind == "rayrft" else run_trl)(folder, options)


def _batch(text: str) -> tuple[int, int, int]:
    prompts, group, new = map(int, text.split("x"))
    return prompts, group, new


def make_inputs(folder: Path, options: argparse.Namespace, longest: int) -> None:
    """The model and the tasks of all runs."""
    from rayrft.config.model import TinyModelConfig
    from rayrft.trainer.tiny import make_tiny_model

    asked = questions(4096)
    hidden, heads = options.hidden, max(1, options.hidden // 64)
    shape = TinyModelConfig(layers=options.layers, hidden_size=hidden, heads=heads, intermediate_size=3 * hidden)
    fresh = folder / ("fresh" if options.ends else "model")
    make_tiny_model(shape, asked, [], fresh, max_length=2048, seed=0)
    if options.ends:
        teach_lengths(fresh, folder / "model", asked, longest)
    lines = [json.dumps({"question": each, "answer": each[-6:][::-1]}) for each in asked]
    (folder / "tasks.jsonl").write_text("\n".join(lines))


def teach_lengths(fresh: Path, taught: Path, asked: list[str], longest: int, steps: int = 60, rows: int = 16) -> None:
    """SFT on answers of random letters, of log-normal lengths up to ``longest``."""
    import torch

    from rayrft.algorithms import build
    from rayrft.config.trainer import OptimizerConfig
    from rayrft.data.tokenizer import ChatTokenizer
    from rayrft.trainer.loading import load_policy
    from rayrft.trainer.model import save_hf
    from tests.bench.workload import join_alone, log_normal_lengths, make_learner
    from tests.trainer.learning import row

    cpu, chance, tokenizer = torch.device("cpu"), np.random.default_rng(0), ChatTokenizer(fresh)
    lengths = iter(log_normal_lengths(steps * rows, longest // 10, longest))
    join_alone(cpu)
    policy = load_policy(str(fresh))
    learner = make_learner(policy, "sft", tokens=8192, device=cpu, compute=torch.float32)
    learner.open_stage(build("sft"), OptimizerConfig(lr=2e-3), steps)
    for _ in range(steps):
        batch = []
        for question in chance.choice(asked, rows):
            prompt = tokenizer.prompt([{"role": "user", "content": question}])
            answer = tokenizer.response("".join(chance.choice([*ascii_lowercase], next(lengths) - 1)))
            batch.append(row(prompt, answer, expert=True))
        learner.step([batch])
    save_hf(policy, tokenizer, taught, dtype=torch.float32)()
    torch.distributed.destroy_process_group()


def report(batch: str, name: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    seconds, processor = (np.concatenate([run[name] for run in runs]) for name in ("seconds", "processor"))
    ratio = np.median([np.median(a["seconds"]) / np.median(b["seconds"]) for a, b in zip(runs, ours, strict=True)])
    low, middle, high = np.percentile(seconds, [10, 50, 90])
    tokens = np.mean([run["tokens"] for run in runs])
    parts = ", ".join(f"{key} {value:.2f}" for key, value in runs[-1]["parts"].items())
    print(
        f"{batch:>10} {name:23} {middle:>7.2f} {low:>7.2f}-{high:<7.2f} {ratio:>7.2f} "
        f"{np.median(processor):>7.2f} {tokens:>7.1f}  {parts}",
        flush=True,
    )


def main() -> None:
    options = parse(
        __doc__,
        batches=(["16x8x64"], "prompts x group x longest answer"),
        ends=(False, "answers end by themselves, in lengths that differ"),
        hidden=256,
        layers=4,
        steps=10,
        rounds=3,
        cores=2,
        threads=([1, 2], "of TRL: the quickest one counts"),
        engines=2,
        ranks=2,
        staleness=0,
        continuous=([0], "of TRL: 0, 1 or both"),
    )
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", HF_HUB_OFFLINE="1", WANDB_MODE="offline")
    print(
        f"hidden {options.hidden}, {options.layers} layers; {options.cores} cores, {options.engines} engines,", end=" "
    )
    print(f"{options.ranks} ranks, max_staleness {options.staleness}; {options.rounds} rounds of {options.steps} steps")
    print(
        f"{'batch':>10} {'':23} {'s':>7} {'10-90 %':^15} {'of ours':>7} {'proc. s':>7} {'tokens':>7}  parts of ours, s"
    )
    for batch in options.batches:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_inputs(folder, options, _batch(batch)[2])
            runs: dict[str, list[dict[str, Any]]] = {}
            for _ in range(options.rounds):
                runs.setdefault("rayrft", []).append(measure("rayrft", folder, batch, options))
                for threads, continuous in itertools.product(options.threads, options.continuous):
                    key = f"TRL, {threads} threads{', contin.' * continuous}"
                    given = {"threads": threads, "continuous": continuous}
                    runs.setdefault(key, []).append(measure("trl", folder, batch, options, **given))
            for key, found in runs.items():
                report(batch, key, found, runs["rayrft"])


if __name__ == "__main__":
    main()
