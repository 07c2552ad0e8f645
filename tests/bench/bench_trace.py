"""What a trace costs the actor that records it: processor time, its writing thread included, beside no trace.

A round is the groups of some steps: every group has an activity, and a request and a reward for each of its answers.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

from rayrft.runtime.trace import WRITE_S, Trace
from tests.bench.helpers import parse, race, spread

_PARTS = {"rollout": 1.0, "reward": 0.1, "operators": 0.0, "store": 0.01}


def record(trace: Trace, groups: int, answers: int) -> None:
    for number in range(groups):
        began = time.perf_counter()
        with trace.on("workflow 'single_turn'", "groups"), trace.on("engine-0", "generate", answers):
            for _ in range(answers):
                with trace.on("reward of domain 'math'", "score"):
                    pass
        with trace.on("buffer", "put"):
            pass
        trace.add("groups", f"run/stage/{number}/0123456789abcdef", began, _PARTS)


def traced(trace: Trace, groups: int, answers: int) -> None:
    record(trace, groups, answers)
    time.sleep(2 * WRITE_S)  # no processor time, in which the thread writes


def main() -> None:
    options = parse(__doc__, groups=2000, answers=8, rounds=7)
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    trace, calls = Trace(folder, "explorer-0"), (options.groups, options.answers)
    contenders = {"traced": partial(traced, trace, *calls), "not traced": partial(traced, Trace(), *calls)}
    times = race(contenders, options.rounds, warm_up=1)
    cost = (times["traced"][:, 1] - times["not traced"][:, 1]) / options.groups * 1e6
    size = sum(file.stat().st_size for file in (folder / "trace").iterdir()) / options.groups / (options.rounds + 1)
    print(f"a group of {options.answers} answers: {spread(cost, '.0f')} microseconds of a core, {size:.0f} bytes")


if __name__ == "__main__":
    main()
