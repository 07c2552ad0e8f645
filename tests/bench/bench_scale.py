"""What the control plane of a run costs a step, by the number of GPUs: calls, bytes, processor time and memory.

`rayrft.start` starts the run: driver, Master, Explorers, Buffer, engine pool and Trainer actor are real, with step
loop, supervision, leases and log. Engines (one per GPU, 64 answers in flight in each) and ranks (one per four GPUs) are
scripted; eight host actors stand for all of them. Engines answer with random tokens of the right number once all
requests of a step have come, or, with steps ahead, the oldest ones. Ranks fetch their rows, and return at once.

The run is held in the training call of three steps: before and after the measured steps, and after one more, in which
every call is pickled again to know its size. Processor seconds are those of the processes: at rest, while the run is
held, and beyond that per step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import psutil
import ray

from rayrft.config import load_config
from rayrft.core import launch
from rayrft.core.run import Run
from rayrft.errors import ActorDied
from rayrft.monitor.records import StepRecord, read_records
from rayrft.monitor.report import format_table
from rayrft.runtime.handle import NAMESPACE
from rayrft.trainer.api import Mailbox
from tests.bench.helpers import parse, start_ray
from tests.bench.hosts import HOSTS, Host, ScriptedMaster, hosts
from tests.conftest import ROOT

ENGINES_PER_RANK, ANSWERS = 4, 64
_WARM_UP, _SETTLE_S = 2, 8.0
"""Steps before the measured ones; seconds until all answers have come of requests that a step has let in."""
_SMALL = {"cpus": 0.001, "memory_gib": 1 / 1024}

EXPLORER_CALLS = {"exchange", "capacity", "admit", "leased", "put", "drop", "fail", "added_tasks"}
RANK_CALLS = {name for name in vars(Mailbox) if not name.startswith("_")}
CONTROL = {"master": "Master", "explorer": "Explorer", "buffer": "Buffer", "trainer": "Trainer actor"}
CONTROL |= {"engine_pool": "engine pool"}
ACTORS = CONTROL | {"driver": "driver", "ray": "Ray: GCS, raylet"}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Processor seconds and resident bytes by kind of actor, at a time."""

    at: float
    seconds: Counter[str]
    memory: Counter[str]

    @classmethod
    def of(cls, processes: dict[str, list[psutil.Process]]) -> Snapshot:
        seconds, memory = Counter[str](), Counter[str]()
        for kind, several in processes.items():
            times = [process.cpu_times() for process in several]
            seconds[kind] = sum(each.user + each.system for each in times)  # type: ignore[assignment]
            memory[kind] = sum(process.memory_info().rss for process in several)
        return cls(time.monotonic(), seconds, memory)


class Tallies:
    """The calls of a run's actors, by kind of actor and by method."""

    def __init__(self, run: Run, explorers: int) -> None:
        names = ["master", "buffer", "trainer", "engine_pool", *(f"explorer-{index}" for index in range(explorers))]
        actors = [(name.partition("-")[0], ray.get_actor(f"{run.name}:{name}", NAMESPACE)) for name in names]
        self._actors = actors + [("engines", host) for host in hosts()]

    def take(self, sizing: bool = False) -> Counter[tuple[str, str]]:
        """Return the numbers of calls, and their bytes where asked for, since the last time: of every kind of actor
        those that it makes and answers, and of every caller, callee and method."""
        found, totals = [(kind, actor.tally.remote(sizing)) for kind, actor in self._actors], Counter[tuple[str, str]]()
        for callee, ref in found:
            for (method, what), count in ray.get(ref).items():
                caller = "driver" if callee == "master" else "master"
                if callee == "trainer" and method in RANK_CALLS:
                    caller = "ranks"
                elif callee != "explorer" and method in EXPLORER_CALLS:
                    caller = "explorer"
                for key in (caller, callee, f"{caller} to {callee}: {method}"):
                    totals[key, what] += count
        return totals


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured: calls of all measured steps, bytes of one, processor seconds of a step beyond those at rest,
    and of a second at rest."""

    calls: Counter[tuple[str, str]]
    sizes: Counter[tuple[str, str]]
    step_s: dict[str, float]
    rest_s: dict[str, float]
    memory: Counter[str]

    def table(self, processes: dict[str, list[psutil.Process]], steps: int) -> str:
        rows = [("per step", "calls", "MB", "processor s", "at rest, a minute", "MiB")]
        for kind, name in ACTORS.items():
            number = f" x {len(processes[kind])}" if kind == "explorer" and len(processes[kind]) > 1 else ""
            calls, size = f"{self.calls[kind, 'calls'] / steps:,.0f}", f"{self.sizes[kind, 'bytes'] / 1e6:,.2f}"
            seconds = f"{self.step_s[kind]:.3f}", f"{self.rest_s[kind] * 60:.2f}"
            rows.append((name + number, calls, size, *seconds, f"{self.memory[kind] / 2**20:.0f}"))
        sums = (sum(each[kind] for kind in CONTROL) for each in (self.step_s, self.rest_s))
        step_s, rest_s = sums
        rows.append(("Master to engine pool", "", "", f"{step_s:.3f}", f"{rest_s * 60:.2f}", ""))
        return format_table(rows)

    def listed(self, count: int, steps: int) -> list[str]:
        """Return lines of the most frequent calls."""
        who = sorted({who for who, _ in self.calls if ":" in who}, key=lambda each: -self.calls[each, "calls"])[:count]
        sizes = (f"{self.sizes[each, 'bytes'] / 1e6:,.2f} MB" for each in who)
        calls = (f"{self.calls[each, 'calls'] / steps:,.1f} calls" for each in who)
        return [f"  {name}: {number}, {size}" for name, number, size in zip(who, calls, sizes, strict=True)]


def config_of(gpus: int, options: Any, steps: int) -> Any:
    rows = gpus * ANSWERS if options.rows is None else options.rows * gpus // 512
    batch = {"batch_size": rows, "group_size": options.group}
    settings = {
        "name": f"scale-{gpus}",
        "storage": tempfile.mkdtemp(prefix="bench-"),
        "demonstrations": {},
        "evaluation.enabled": False,
        "checkpoint.every": None,
        "model.max_length": 48 + options.tokens,
        "max_staleness": options.ahead,
        "explorer.count": options.explorers,
        "explorer.over_sampling": 1.0,
        "explorer.drop_zero_variance": False,
        "explorer.sampling.max_tokens": options.tokens,
        "explorer.engine": {"count": gpus, **_SMALL},
        "trainer": {"ranks": max(1, gpus // ENGINES_PER_RANK), **_SMALL},
        "stages": [{"name": "scale", "algorithm": {"name": "grpo"}, "steps": steps, **batch}],
    }
    return load_config(ROOT / "jobs" / "quickstart.yaml", settings)


def processes_of(run: Run) -> dict[str, list[psutil.Process]]:
    """Return the processes by kind of actor."""
    found: dict[str, list[psutil.Process]] = {"driver": [psutil.Process()]}
    for name, pid in run.pids().items():
        found.setdefault(name.partition("-")[0], []).append(psutil.Process(pid))
    children = psutil.Process().children(recursive=True)
    found["ray"] = [each for each in children if each.name() in ("gcs_server", "raylet")]
    return {kind: found[kind] for kind in ACTORS}


def watch(run: Run) -> None:
    with contextlib.suppress(ActorDied):  # it is killed at the end
        run.watch(lambda line: None)


def measure(gpus: int, options: Any) -> None:
    """Run it, and print a table."""
    began, last = time.monotonic(), _WARM_UP + options.steps
    how = {"namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": 100_000}
    held = [[_WARM_UP, last, last + 1]] + [[]] * (HOSTS - 1)
    config = config_of(gpus, options, last + 1 + options.ahead)  # groups are asked for as steps need them
    made = [ray.remote(Host).options(name=f"host-{index}", **how) for index in range(HOSTS)]
    ahead = options.ahead * config.stages[0].groups
    kept = [host.remote(held[index], (ahead + index) // HOSTS) for index, host in enumerate(made)]
    with mock.patch.object(launch, "Master", ScriptedMaster):
        run = launch.start(config, say=lambda line: None)
    watching = threading.Thread(target=watch, args=(run,), daemon=True)
    watching.start()

    def until_held() -> None:
        reached = kept[0].held.remote()
        while not ray.wait([reached], timeout=1.0)[0]:
            if not watching.is_alive():
                run.result()  # raises why the run ended
        time.sleep(_SETTLE_S)

    until_held()
    up_s, processes, tallies = time.monotonic() - began, processes_of(run), Tallies(run, options.explorers)
    at_rest = Snapshot.of(processes)
    time.sleep(options.rest)
    first = Snapshot.of(processes)
    tallies.take()
    kept[0].go.remote()
    until_held()
    end, calls = Snapshot.of(processes), tallies.take(sizing=True)
    kept[0].go.remote()
    until_held()
    sizes, most = tallies.take(), max(ray.get([host.most.remote() for host in kept]))
    if options.ahead:  # its last requests are never answered
        run.kill()
    else:
        kept[0].go.remote()
        run.result()

    rest_s = {kind: (first.seconds[kind] - at_rest.seconds[kind]) / (first.at - at_rest.at) for kind in ACTORS}
    busy_s = {kind: end.seconds[kind] - first.seconds[kind] - rest_s[kind] * (end.at - first.at) for kind in ACTORS}
    step_s = {kind: seconds / options.steps for kind, seconds in busy_s.items()}
    figures, stage = Figures(calls, sizes, step_s, rest_s, end.memory), config.stages[0]
    print(
        f"\n{gpus} GPUs: {gpus} engines with up to {most} answers in flight, {config.trainer.ranks} ranks, batches of "
        f"{stage.groups} groups of {stage.group_size}, {stage.batch_size * options.tokens:,} tokens; up in {up_s:.0f} s"
    )
    print(figures.table(processes, options.steps), *figures.listed(options.calls, options.steps), sep="\n")
    steps = [record.seconds for record in read_records(run.folder) if isinstance(record, StepRecord)]
    walls = {name: np.median([each[name] for each in steps[_WARM_UP : last - 1]]) for name in ("wait", "train", "sync")}
    print("by the clock: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in walls.items()), flush=True)
    for host in kept:
        ray.kill(host)
    hosts.cache_clear()


def main() -> None:
    options = parse(
        __doc__,
        gpus=[8, 64, 512],
        steps=(5, "measured steps"),
        explorers=1,
        tokens=(32, "tokens of an answer"),
        rows=(int, "answers of a step with 512 GPUs; by default 64 of each engine"),
        ahead=(0, "steps whose requests are in flight beyond the present one: `max_staleness`"),
        group=16,
        rest=(20.0, "seconds at rest that are measured"),
        calls=(0, "number of kinds of calls that are listed"),
    )
    start_ray(16)
    for gpus in options.gpus:
        measure(gpus, options)
    ray.shutdown()


if __name__ == "__main__":
    main()
