"""How long a prioritised draw of 256 and an update of 256 take, beside cpprb, in one run.

    pip install 'rayrft[bench]'
    python -m tests.bench.bench_priority [--rounds 1000]

Every round gives each contender in turn the same slots and fresh priorities, so a disturbance of the machine meets all
alike and none is favoured by values that are written already.

* ``sampler``: what a user calls. Both answer with slots and importance weights and take raw priorities. Ours also draws
  without repetition and minds age, uses and rest. cpprb's ``sample`` has no way around gathering the rows, here one
  int64 each. It keeps float32, ours float64.
* ``tree``: our bare structure; cpprb's has no Python interface.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from rayrft.buffer.samplers import samplers
from rayrft.buffer.sum_tree import SumTree
from rayrft.config.buffer import SamplerConfig

BATCH = 256
ENTRIES = (10_000, 100_000, 1_000_000)
ALPHA, BETA = 0.6, 0.4
WARM_UP = 20


@dataclass
class Contender:
    """``update`` takes slots and priorities."""

    family: str
    name: str
    draw: Callable[[], object]
    update: Callable[..., object]
    draws: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)


def ours(priorities: np.ndarray) -> list[Contender]:
    entries = len(priorities)
    config = SamplerConfig(name="priority", alpha=ALPHA, beta=BETA, tau=20, max_uses=4, cooldown=1, use_decay=0.7)
    sampler = samplers.get("priority")(config, 0)
    sampler.add(np.arange(entries), priorities, np.arange(entries) * 64 // entries)
    tree = SumTree()
    tree.set(np.arange(entries), priorities**ALPHA)
    rng = np.random.default_rng(0)
    numbers = itertools.count()
    return [
        Contender("sampler", "rayrft priority", lambda: sampler.draw(BATCH, 64, next(numbers)), sampler.update),
        Contender("tree", "rayrft SumTree", lambda: tree.draw(BATCH, rng), tree.set),
    ]


def cpprb(priorities: np.ndarray) -> list[Contender]:
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(len(priorities), {"slot": {"dtype": np.int64}}, alpha=ALPHA)
    buffer.add(slot=np.arange(len(priorities)), priorities=priorities)
    return [Contender("sampler", "cpprb", lambda: buffer.sample(BATCH, BETA), buffer.update_priorities)]


def race(contenders: list[Contender], entries: int, rounds: int) -> None:
    """Time every contender once a round, beginning with another one each time."""
    rng = np.random.default_rng(1)
    for number in range(WARM_UP + rounds):
        slots, priorities = rng.integers(0, entries, BATCH), rng.random(BATCH)
        first = number % len(contenders)
        for each in contenders[first:] + contenders[:first]:
            started = time.perf_counter()
            each.draw()
            drawn = time.perf_counter()
            each.update(slots, priorities)
            updated = time.perf_counter()
            if number >= WARM_UP:
                each.draws.append(drawn - started)
                each.updates.append(updated - drawn)


def report(contenders: list[Contender], entries: int) -> None:
    """One line each: median and p99 in microseconds, and how many times the family's first median it takes."""
    firsts: dict[str, Contender] = {}
    for each in sorted(contenders, key=lambda contender: contender.family):
        first = firsts.setdefault(each.family, each)
        cells = [f"{entries:>9,}  {each.family:8}{each.name:24}"]
        for times, base in ((each.draws, first.draws), (each.updates, first.updates)):
            median, p99 = np.percentile(times, [50, 99]) * 1e6
            cells.append(f"{median:8.1f}{p99:8.1f}{median / np.median(base) / 1e6:7.2f}")
        print(" |".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    rounds = parser.parse_args().rounds
    makers = [ours]
    try:
        print(f"cpprb {version('cpprb')}")
        makers.append(cpprb)
    except PackageNotFoundError:
        print("cpprb is not installed: pip install 'rayrft[bench]'")
    print(f"{BATCH} at a time: median and p99 in us, x = multiple of the family's first median")
    print(f"{'entries':>9}  {'':32} | {'draw':>7}{'p99':>8}{'x':>7} |{'update':>8}{'p99':>8}{'x':>7}")
    for entries in ENTRIES:
        priorities = np.random.default_rng(0).random(entries)
        contenders = [contender for maker in makers for contender in maker(priorities)]
        race(contenders, entries, rounds)
        report(contenders, entries)


if __name__ == "__main__":
    main()
