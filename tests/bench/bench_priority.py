"""How long a prioritised draw of 256 takes, beside cpprb, in one run.

The contenders draw in turn; both answer with slots and importance weights. Ours is drawn from the columns of the group
table: it keeps nothing that a change of a score would update, draws without repetition, and minds age, uses and rest.
cpprb keeps a tree, whose update of 256 priorities is listed, too; its ``sample`` gathers rows, here one int64 each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from rayrft.buffer.groups import GroupStatus, GroupTable
from rayrft.buffer.samplers import draw, samplers
from rayrft.config.buffer import SamplerConfig
from tests.bench.helpers import parse, percentiles, race
from tests.buffer.rows import stored_group

BATCH = 256
ENTRIES = (10_000, 125_000, 1_000_000)
ALPHA, BETA = 0.6, 0.4
WARM_UP = 20

Contenders = dict[str, Callable[[], object]]


def ours(priorities: np.ndarray) -> Contenders:
    config = SamplerConfig(name="priority", alpha=ALPHA, beta=BETA, tau=20, max_uses=4, cooldown=1, use_decay=0.7)
    groups, sampler, numbers = GroupTable(), samplers.get("priority"), itertools.count()
    for number, priority in enumerate(priorities.tolist()):
        groups.add(stored_group(number, score=priority, version=number * 64 // len(priorities)), 0, number)
    assert (groups.status[: len(priorities)] == GroupStatus.READY).all()
    return {"rayrft": lambda: draw(sampler, groups, config, BATCH, 64, np.random.default_rng([0, next(numbers)]))}


def cpprb(priorities: np.ndarray) -> Contenders:
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(len(priorities), {"slot": {"dtype": np.int64}}, alpha=ALPHA)
    buffer.add(slot=np.arange(len(priorities)), priorities=priorities)
    rng = np.random.default_rng(1)

    def update() -> None:
        buffer.update_priorities(rng.integers(0, len(priorities), BATCH), rng.random(BATCH))

    return {"cpprb": lambda: buffer.sample(BATCH, BETA), "cpprb, update": update}


def main() -> None:
    rounds = parse(__doc__, rounds=200).rounds
    makers = [ours]
    try:
        print(f"cpprb {version('cpprb')}")
        makers.append(cpprb)
    except PackageNotFoundError:
        print("cpprb is not installed: pip install 'rayrft[bench]'")
    print(f"a draw of {BATCH}, by the processor")
    for entries in ENTRIES:
        priorities = np.random.default_rng(0).random(entries)
        contenders = {name: call for maker in makers for name, call in maker(priorities).items()}
        for name, times in race(contenders, rounds, WARM_UP).items():
            print(f"{entries:>9,}  {name:16} {percentiles(times[:, 1], '.3f')}", flush=True)


if __name__ == "__main__":
    main()
