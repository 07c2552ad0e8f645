"""How long a prioritised draw of 256 takes, beside cpprb, in one run.

    pip install 'rayrft[bench]'
    python -m tests.bench.bench_priority [--rounds 200]

Every round lets each contender draw in turn, so a disturbance of the machine meets all alike. Both answer with slots
and importance weights. Ours is drawn from the columns of the group table: it keeps nothing that a change of a score
would have to update, draws without repetition, and minds age, uses and rest. cpprb keeps a tree, whose update of 256
priorities is listed, too; its ``sample`` has no way around gathering the rows, here one int64 each.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from rayrft.buffer.groups import GroupStatus, GroupTable
from rayrft.buffer.samplers import draw, samplers
from rayrft.config.buffer import SamplerConfig
from tests.buffer.rows import stored_group

BATCH = 256
ENTRIES = (10_000, 125_000, 1_000_000)
ALPHA, BETA = 0.6, 0.4
WARM_UP = 20

Contender = tuple[str, Callable[[], object]]


def ours(priorities: np.ndarray) -> list[Contender]:
    config = SamplerConfig(name="priority", alpha=ALPHA, beta=BETA, tau=20, max_uses=4, cooldown=1, use_decay=0.7)
    groups, sampler, numbers = GroupTable(), samplers.get("priority"), itertools.count()
    for number, priority in enumerate(priorities.tolist()):
        groups.add(stored_group(number, score=priority, version=number * 64 // len(priorities)), 0, number)
    assert (groups.status[: len(priorities)] == GroupStatus.READY).all()
    return [("rayrft", lambda: draw(sampler, groups, config, BATCH, 64, np.random.default_rng([0, next(numbers)])))]


def cpprb(priorities: np.ndarray) -> list[Contender]:
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(len(priorities), {"slot": {"dtype": np.int64}}, alpha=ALPHA)
    buffer.add(slot=np.arange(len(priorities)), priorities=priorities)
    rng = np.random.default_rng(1)

    def update() -> None:
        buffer.update_priorities(rng.integers(0, len(priorities), BATCH), rng.random(BATCH))

    return [("cpprb", lambda: buffer.sample(BATCH, BETA)), ("cpprb, update", update)]


def race(contenders: list[Contender], rounds: int) -> list[str]:
    """Time every contender once a round, beginning with another one each time; one line each, in milliseconds of the
    processor."""
    seconds: dict[str, list[float]] = {name: [] for name, _ in contenders}
    for number in range(WARM_UP + rounds):
        first = number % len(contenders)
        for name, call in contenders[first:] + contenders[:first]:
            started = time.process_time()
            call()
            seconds[name].append(time.process_time() - started)
    percentiles = {name: np.percentile(times[WARM_UP:], [50, 99]) * 1e3 for name, times in seconds.items()}
    return [f"{name:16}|{median:9.3f}{p99:9.3f}" for name, (median, p99) in percentiles.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    makers = [ours]
    try:
        print(f"cpprb {version('cpprb')}")
        makers.append(cpprb)
    except PackageNotFoundError:
        print("cpprb is not installed: pip install 'rayrft[bench]'")
    print(f"a draw of {BATCH}: median and p99 in ms of the processor")
    for entries in ENTRIES:
        priorities = np.random.default_rng(0).random(entries)
        for line in race([contender for maker in makers for contender in maker(priorities)], rounds):
            print(f"{entries:>9,}  {line}")


if __name__ == "__main__":
    main()
