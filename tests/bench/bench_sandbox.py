"""What a sandbox costs: runs of a trivial Python program, per second, and the time that one takes.

A start is the time from the call until the program's first word arrives; a run ends when everything of it is gone.
``bare`` is the same program without a sandbox. CPU time is that of all processes, per run.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor

from rayrft.errors import ConfigError
from rayrft.rewards.sandbox import Sandbox, SandboxLimits
from tests.bench.helpers import parse, percentiles

WORD = "print('a word')"


def runs(isolation: str, seconds: float) -> tuple[list[float], list[float], float]:
    """Seconds until the first word and until the end, for each run that fits the time, and the CPU seconds of all."""
    starts, wholes = [], []
    sandbox = None if isolation == "bare" else Sandbox(isolation)
    python = Sandbox("none_i_trust_the_code").python
    before, end = os.times(), time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        if sandbox is None:
            subprocess.run([*python, "-c", WORD], stdin=subprocess.DEVNULL, capture_output=True, check=True)
            starts.append(time.monotonic() - began)
        else:
            with sandbox.start({"word.py": WORD}, [*sandbox.python, "word.py"], SandboxLimits()) as process:
                assert process.line(10) == b"a word"
                starts.append(time.monotonic() - began)
                process.wait()
        wholes.append(time.monotonic() - began)
    after = os.times()
    return starts, wholes, sum(after[:4]) - sum(before[:4])


def main() -> None:
    options = parse(__doc__, seconds=10.0, workers=2, rounds=3)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
        for isolation in ("bare", "bwrap", "unshare"):
            try:
                list(pool.map(runs, [isolation] * options.workers, [0.2] * options.workers))
            except ConfigError as error:
                print(f"{isolation:>8} {error}")
                continue
            for _ in range(options.rounds):
                results = list(pool.map(runs, [isolation] * options.workers, [options.seconds] * options.workers))
                starts, wholes = ([each for result in results for each in result[i]] for i in (0, 1))
                cpu = 1000 * sum(result[2] for result in results) / len(wholes)
                print(
                    f"{isolation:>8} {len(wholes) / options.seconds:>6.1f} runs/s, start {percentiles(starts)}, "
                    f"run {percentiles(wholes)}, CPU {cpu:.1f} ms a run",
                    flush=True,
                )


if __name__ == "__main__":
    main()
