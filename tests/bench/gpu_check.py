"""Everything that only a GPU shows, from the cheapest fact to the dearest, as one report in Markdown.

Each section is a process of its own, whose failure is a line of the report and stops no other. What needs more GPUs or
models than there are says so. `--dry` takes the same path on CPUs with small models: its figures say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.helpers import parse, percentiles
from tests.conftest import ROOT

SECTIONS: dict[str, tuple[str, Callable[[argparse.Namespace], Iterator[str]]]] = {}
"""Title and function, in the order of the report."""

MAIN = """import sys
from tests.bench.gpu_check import main
main()"""
"""A section's process: Ray's workers import what it runs by this name, not as ``__main__``."""


def section(
    title: str,
) -> Callable[[Callable[[argparse.Namespace], Iterator[str]]], Callable[[argparse.Namespace], Iterator[str]]]:
    def add(function: Callable[[argparse.Namespace], Iterator[str]]) -> Callable[..., Iterator[str]]:
        SECTIONS[function.__name__] = title, function
        return function

    return add


def table(head: str, rows: Iterable[str]) -> Iterator[str]:
    """A table, of cells that are separated by bars."""
    yield f"| {head} |"
    yield "|" + "---|" * (head.count("|") + 1)
    for row in rows:
        yield f"| {row} |"


def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of(options: argparse.Namespace) -> Any:
    import torch

    return torch.device("cpu") if options.dry else torch.device("cuda", 0)


@section("Machine")
def machine(options: argparse.Namespace) -> Iterator[str]:
    """What `rayrft doctor` finds."""
    from rayrft.core.doctor import doctor

    yield "```"
    yield from map(str, doctor())
    yield "```"


@section("Kernels: packed rows beside padded ones")
def kernels(options: argparse.Namespace) -> Iterator[str]:
    """Rows of groups that share their prompts, in the precision of training."""
    import torch

    from rayrft.trainer.policy import Policy, scored_batch
    from tests.bench.gpu import SHAPES, synchronize

    device, shape = device_of(options), SHAPES["tiny" if options.dry else "0.6B"]
    compute, length = (torch.float32, 32) if options.dry else (torch.bfloat16, 1024)
    with torch.device(device):
        policy = Policy(shape.model())
    remark = policy.enable_fast_paths(pack=True, compute=compute)
    yield f"{'Packs rows.' if policy.packs else 'Does not pack rows.'} {remark or ''}"
    with torch.no_grad():
        for parameter in policy.parameters():  # fresh weights are so small that attention hardly shows
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    policy.to(compute)
    chance = np.random.default_rng(0)
    prompts = [chance.integers(0, shape.vocabulary, length // 4) for _ in range(2)]
    rows = [
        torch.tensor(np.concatenate([prompt, chance.integers(0, shape.vocabulary, length - len(prompt) - 7 * number)]))
        for prompt in prompts
        for number in range(4)
    ]
    found: dict[bool, tuple[Any, float]] = {}
    for packs in (True, False):
        policy.packs = packs
        policy.model.set_attn_implementation("rayrft_packed" if packs else "sdpa")
        batch, seconds = scored_batch([row.to(device) for row in rows]), []
        for _ in range(3):
            synchronize(device)
            started = time.perf_counter()
            with torch.no_grad():
                logprobs = policy.output(batch, temperature=1.0).logprobs
            synchronize(device)
            seconds.append(time.perf_counter() - started)
        found[packs] = logprobs.float().cpu(), min(seconds)
    gaps = (found[True][0] - found[False][0]).abs().numpy()
    yield ""
    yield from table("| packed | padded", [f"forward, ms | {found[True][1] * 1e3:.1f} | {found[False][1] * 1e3:.1f}"])
    yield ""
    yield f"Log-probs differ by {quantiles(gaps)}."


@section("Head: log-probs without all logits")
def head(options: argparse.Namespace) -> Iterator[str]:
    size = ["--tokens", "64", "--hidden", "32", "--vocabulary", "512", "--rounds", "1"] if options.dry else []
    yield from bench("bench_head", *size, "--device", str(device_of(options)))


@section("Training: tokens a second, MFU, memory beside the plan")
def training(options: argparse.Namespace) -> Iterator[str]:
    """MFU and memory are measured; the plan's figure is what `rayrft plan` says of such a rank."""
    import torch

    from rayrft.config.trainer import TrainerConfig
    from rayrft.trainer.memory import activation_bytes, rank_memory, shape_of
    from tests.bench.gpu import SHAPES

    size = ["--device", "cpu", "--tiny", "--steps", "1"] if options.dry else ["--sizes", *options.sizes]
    yield from bench("gpu", *size)
    yield ""
    rows = []
    for name in ["tiny"] if options.dry else options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            with torch.device("meta"):
                SHAPES[name].model().config.save_pretrained(folder)
            for checkpointing in (False, True):
                settings = TrainerConfig(ranks=1, micro_batch_tokens=16384, gradient_checkpointing=checkpointing)
                shape, activation = shape_of(folder), activation_bytes(folder)
                total = rank_memory(shape, settings, half=True, activation=activation).total / 2**30
                rows.append(f"{name} | {'on' if checkpointing else 'off'} | {total:.1f}")
    yield from table("size | checkpointing | GiB by the plan (an estimate)", rows)


@section("Profile of a training step")
def profile(options: argparse.Namespace) -> Iterator[str]:
    """The operators that take most of a step; the trace, for Perfetto, lies beside the report."""
    import torch
    from torch.profiler import ProfilerActivity

    from rayrft.trainer.policy import Policy
    from tests.bench.gpu import SHAPES
    from tests.bench.workload import join_alone, make_learner, make_rows

    device, shape = device_of(options), SHAPES["tiny" if options.dry else options.sizes[0]]
    count, length, prompt, tokens = (4, 64, 8, 512) if options.dry else (32, 2048, 128, 16384)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_alone(device)
    with torch.device(device):
        policy = Policy(shape.model())
    compute = torch.float32 if options.dry else torch.bfloat16
    learner = make_learner(policy, "grpo", tokens=tokens, device=device, compute=compute)
    rows = make_rows([length] * count, prompt, shape.vocabulary)
    learner.step([rows])
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profiled:
        learner.step([rows])
    trace = beside_report(options) / "gpu_check.trace.json"
    profiled.export_chrome_trace(str(trace))
    kind = "device" if device.type == "cuda" else "cpu"
    events = sorted(profiled.key_averages(), key=lambda event: -getattr(event, f"self_{kind}_time_total"))[:12]
    rows_of = [
        f"`{event.key[:60]}` | {event.count} | {getattr(event, f'self_{kind}_time_total') / 1e3:.2f}"
        for event in events
    ]
    yield from table("operator | calls | ms of its own", rows_of)
    yield ""
    yield f"Trace: {trace}"
    torch.distributed.destroy_process_group()


@section("Engine: tokens a second, and its log-probs beside the trainer's")
def engine(options: argparse.Namespace) -> Iterator[str]:
    """Eager and with CUDA graphs. Log-probs are those of sampled answers, scored by the trainer's model."""
    from rayrft.runtime.ray_api import ray
    from tests.bench.gpu import SHAPES
    from tests.bench.helpers import start_ray

    name = "tiny" if options.dry else options.sizes[0]
    folder = options.model or tempfile.mkdtemp()
    if not options.model:
        SHAPES[name].model().save_pretrained(folder)
    start_ray(4)
    rows, answers = [], []
    for eager in [True] if options.dry else [True, False]:
        speed, answers = asyncio.run(_sample(folder, options, eager=eager))
        rows.append(f"{'eager' if eager else 'with graphs'} | {speed:,.0f}")
    ray.shutdown()
    yield from table("engine | tokens/s", rows)
    gaps = _gaps(folder, options, answers)
    yield ""
    yield f"{options.model or 'Random weights'}: log-probs of {len(gaps)} sampled tokens differ by {quantiles(gaps)}."


@section("Options of the engine that alter log-probs")
def altered(options: argparse.Namespace) -> Iterator[str]:
    """Log-probs of sampled answers beside the trainer's; the file is for `engine.proven`."""
    import torch

    from rayrft.data.models import find_model
    from rayrft.explorer.engines.arguments import OptionGap, vllm_release
    from rayrft.runtime.ray_api import ray
    from tests.bench.gpu import SHAPES
    from tests.bench.helpers import start_ray

    size, model = "tiny" if options.dry else options.sizes[0], options.model
    folder = model or tempfile.mkdtemp()
    if not model:
        SHAPES[size].model().save_pretrained(folder)
    model = find_model(model, "--model") if model else f"random weights, {size}"
    gpu = "none" if options.dry else torch.cuda.get_device_name(0)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    asked: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8", "speculative_config": ngram}
    start_ray(4)
    gaps, rows = list[OptionGap](), list[str]()
    for name, value in list(asked.items())[-1:] if options.dry else asked.items():
        try:
            speed, answers = asyncio.run(_sample(folder, options, eager=options.dry, **{name: value}))
        except Exception as error:  # such as of a GPU that has no such arithmetic: the others are measured
            rows.append(f"{name} | {json.dumps(value)} | {last_line(str(error))} | | ")
            continue
        found = _gaps(folder, options, answers)
        mean, most = float(np.mean(found)), float(np.quantile(found, 0.99))
        gap = OptionGap(model, name, value, vllm_release(), gpu, mean, most)
        gaps.append(gap)
        rows.append(f"{name} | {json.dumps(value)} | {speed:,.0f} | {gap.mean:.2g} | {gap.most:.2g}")
    ray.shutdown()
    yield from table("option | value | tokens/s | gap, mean | 99 %", rows)
    proven = beside_report(options) / "gpu_check.proven.json"
    proven.write_text(json.dumps([asdict(gap) for gap in gaps], indent=1))
    yield ""
    yield f"For `engine.proven`: {proven}"


def beside_report(options: argparse.Namespace) -> Path:
    return Path(options.report).parent if options.report else Path(tempfile.mkdtemp())


def _gaps(folder: str, options: argparse.Namespace, answers: list[Any]) -> list[float]:
    """Differences of an engine's log-probs from the trainer's, of the tokens of the first answers."""
    import torch

    from rayrft.config.trainer import TrainerConfig
    from rayrft.trainer.learner import Learner
    from rayrft.trainer.loading import load_policy

    device, compute = device_of(options), torch.float32 if options.dry else torch.bfloat16
    policy = load_policy(folder).to(device)
    policy.enable_fast_paths(pack=True, compute=compute)
    learner = Learner(policy.to(compute), TrainerConfig(micro_batch_tokens=16384), temperature=1.0, device=device)
    scores = learner.score([[*prompt, *answer.token_ids] for prompt, answer in answers[:64]])
    return [
        abs(ours - theirs)
        for (_, answer), score in zip(answers, scores, strict=False)
        for ours, theirs in zip(score[-len(answer.token_ids) :], answer.logprobs, strict=True)
    ]


async def _sample(folder: str, options: argparse.Namespace, *, eager: bool, **altering: Any) -> tuple[float, list[Any]]:
    """Tokens a second, and prompts with their answers, of an engine with further options."""
    from rayrft.config.explorer import EngineConfig
    from rayrft.explorer.engines.engine import RolloutEngine
    from rayrft.explorer.engines.exchange import Request, Sampling
    from rayrft.runtime.handle import Handle
    from rayrft.runtime.ray_api import ray

    settings: dict[str, Any] = {} if options.dry else {"gpus": 1, "enforce_eager": eager, "gpu_memory_utilization": 0.4}
    count, length, vocabulary = (8, 16, 400) if options.dry else (256, 512, 30000)
    actor = ray.remote(RolloutEngine).options(num_cpus=1, num_gpus=settings.get("gpus", 0), max_concurrency=1000)
    running: Handle[Any] = Handle("engine", actor.remote())
    dtype = "float32" if options.dry else "bfloat16"
    config = EngineConfig(**settings, options=altering)
    await running.call(RolloutEngine.start, folder, config, max_length=32 + length, dtype=dtype, seed=0)
    chance = np.random.default_rng(0)
    prompts = [chance.integers(3, vocabulary, 24).tolist() for _ in range(count)]
    sampling = Sampling(temperature=1.0, max_tokens=length, stop_token_ids=())
    for _ in range(2):  # the first round warms up
        started = time.perf_counter()
        requests = (running.call(RolloutEngine.generate, Request(prompt, 1, sampling)) for prompt in prompts)
        answers = [found[0] for found in await asyncio.gather(*requests)]
        seconds = time.perf_counter() - started
    running.kill()
    sampled = sum(len(answer.token_ids) for answer in answers)
    return sampled / seconds, list(zip(prompts, answers, strict=True))


@section("A GPU that engine and rank share: transfer by IPC, with sleep, and a death")
def shared(options: argparse.Namespace) -> Iterator[str]:
    sharing = {"explorer.engine.gpus": 0.45, "trainer.gpus": 0.5, "explorer.engine.sleep": True}
    yield from small_run("shared", options, {} if options.dry else sharing, kill=True)


@section("GSM8K, ten steps, of which one loses an engine")
def gsm8k(options: argparse.Namespace) -> Iterator[str]:
    from tests.e2e.configs import gsm8k_on_cpu

    job = str(ROOT / "jobs" / "gsm8k_grpo.yaml")
    if options.dry:
        yield "Two steps on a few of the rows, without a death."
        yield ""
        rows = gsm8k_on_cpu(ROOT / "tests" / "samples" / "gsm8k")
        yield from measured(job, {**rows, "tasks.sources.gsm8k.config": "default"})
        return
    if gpus() < 2:
        yield "Needs two GPUs."
        return
    count = min(2, gpus() // 2)
    sizes = {"stages.grpo.steps": 10, "explorer.engine.count": count, "trainer.ranks": count}
    yield from measured(job, sizes, kill=True)


@section("An adapter")
def lora(options: argparse.Namespace) -> Iterator[str]:
    yield from small_run("lora", options, {"trainer.lora": {"rank": 8}})


@section("A mixture of experts, which ranks share")
def moe(options: argparse.Namespace) -> Iterator[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    from rayrft.config.model import TinyModelConfig
    from rayrft.trainer.tiny import make_tiny_model

    folder = Path(tempfile.mkdtemp())
    prompts = [f"Spell this word backward (example: sun -> nus): {word}" for word in map(chr, range(97, 123))]
    make_tiny_model(TinyModelConfig(layers=2, hidden_size=64, heads=2), prompts, [], folder, max_length=64, seed=0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": len(AutoTokenizer.from_pretrained(folder))}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    changes = {"model": {"path": str(folder), "max_length": 64}, "trainer.expert_parallel": True}
    yield from small_run("moe", options, changes)


@section("A model with eyes")
def vision(options: argparse.Namespace) -> Iterator[str]:
    from tests.e2e.configs import vision_config

    storage = Path(tempfile.mkdtemp())
    yield from measured(vision_config(storage, "vision"), on_gpu(options))


def on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """Where engines and ranks are, unless they share a GPU."""
    if options.dry:
        return {}
    apart = {"explorer.engine.gpus": 1, "trainer.gpus": 1}
    together = {"explorer.engine.gpus": 0.45, "trainer.gpus": 0.5}
    return {"model.dtype": "bfloat16", **(apart if gpus() > 1 else together)}


def small_run(name: str, options: argparse.Namespace, changes: dict[str, Any], *, kill: bool = False) -> Iterator[str]:
    from tests.e2e.conftest import small_config

    config = small_config(Path(tempfile.mkdtemp()), name)
    warmup, mix = config["stages"]
    config["stages"] = [{**warmup, "steps": 1}, {**mix, "steps": 4 if kill else 2}]
    yield from measured(config, on_gpu(options) | changes, kill=kill)


def measured(config: Any, changes: dict[str, Any], *, kill: bool = False) -> Iterator[str]:
    """A run's steps; with ``kill`` an engine dies after the first step that sampled."""
    import rayrft
    from rayrft.core.placement import actor_name
    from rayrft.monitor.records import StepRecord
    from rayrft.runtime.ray_api import ray
    from tests.bench.helpers import start_ray

    start_ray(4)
    folder = tempfile.mkdtemp()
    run = rayrft.start(config, **{"storage": folder, "weight_sync.probe_every": 1, **changes}, say=lambda _: None)
    steps, killed = [], not kill
    for record in run.records():
        if isinstance(record, StepRecord) and record.usual_rows:
            steps.append(record)
            if not killed:
                ray.kill(ray.get_actor(actor_name(run.name, "engine-0"), namespace="rayrft"))
                killed = True
    summary = run.result()
    gaps = ", ".join(f"{step.probe_gap:.2g}" for step in steps if step.probe_gap is not None)
    sync, took = ([getattr(step, key) or 0.0 for step in steps] for key in ("sync_s", "step_s"))
    restarts = json.dumps({part: found.count for part, found in summary.restarts.items()})
    yield f"{summary.status} after {summary.steps} steps; restarts: {restarts}."
    yield ""
    yield f"Steps: {percentiles(took)}; weight sync: {percentiles(sync)}; largest gap of each probe: {gaps}."
    ray.shutdown()


def quantiles(gaps: Any) -> str:
    p50, p99 = np.quantile(gaps, [0.5, 0.99])
    return f"{np.mean(gaps):.2g} in the mean, {p50:.2g} (median), {p99:.2g} (99 %), {np.max(gaps):.2g} at most"


def bench(name: str, *arguments: str) -> Iterator[str]:
    """What a bench prints."""
    command = [sys.executable, "-m", f"tests.bench.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(last_line(done.stderr))
    yield "```"
    yield from done.stdout.rstrip().splitlines()
    yield "```"


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:500]


def main() -> None:
    options = parse(
        __doc__,
        report=("", "file that the report is written to, too"),
        dry=(False, "on CPUs, with small models"),
        only=([""], f"sections: {', '.join(SECTIONS)}"),
        sizes=(["0.6B", "1.7B"], "of the models that are trained"),
        model=("", "folder or hub id of the model whose engine is measured; by default random weights"),
        limit_s=(1800, "seconds that a section may take"),
        section=("", "print this section, and nothing else"),
    )
    if options.section:
        for line in SECTIONS[options.section][1](options):
            print(line, flush=True)
        return
    if not options.dry and not gpus():
        raise SystemExit("no CUDA device that torch can use; --dry takes the same path on CPUs")
    wanted = [name for name in SECTIONS if not any(options.only) or name in options.only]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "ray"))
    dry = "A dry run on CPUs, whose figures say nothing. " if options.dry else ""
    report = [
        f"# GPU check of {platform.node()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"{packages}. {dry}Estimates are named; all else was measured here. Aim: 45 % MFU for 1 to 8 B parameters.",
    ]
    failed = 0
    for name in wanted:
        found, problem, seconds = measure(name, options.limit_s)
        failed += bool(problem)
        shown = len(report) if name != wanted[0] else 0
        report += [f"## {SECTIONS[name][0]}", found, *[f"**Failed**: {problem}"] * bool(problem), f"{seconds:.0f} s"]
        print("\n\n".join(report[shown:]) + "\n", flush=True)
        if options.report:  # after each: the next one may end the machine
            Path(options.report).write_text("\n\n".join(report) + "\n", encoding="utf-8")
    print(f"{len(wanted) - failed} of {len(wanted)} sections", file=sys.stderr)
    raise SystemExit(bool(failed))


def measure(name: str, limit_s: float) -> tuple[str, str, float]:
    """What a section prints, why it failed, if it did, and its seconds."""
    command, started = [sys.executable, "-c", MAIN, *sys.argv[1:], "--section", name], time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        found, problem = done.stdout, last_line(done.stderr) if done.returncode else ""
    except subprocess.TimeoutExpired as expired:
        found, problem = (expired.stdout or b"").decode(), f"it took more than {limit_s} s"
    return found.rstrip(), problem, time.perf_counter() - started


if __name__ == "__main__":
    main()
