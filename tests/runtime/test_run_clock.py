"""The time in which processes could run, and what they use."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from rayrft.runtime.processes.run_clock import RunClock, Usage


def test_processes_that_share_a_core_wait_for_it_and_their_clock_stands_still_meanwhile() -> None:
    core = str(min(os.sched_getaffinity(0)))
    busy = [sys.executable, "-S", "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"]
    processes = [subprocess.Popen(busy) for _ in range(2)]
    try:
        clock, began = RunClock(processes[0].pid), time.monotonic()
        while (usage := Usage.of(processes[0].pid)).waited_s < 0.2 or not usage.cpu_s:
            processes[0].poll()
        assert clock.look() <= time.monotonic() - began - 0.1
        assert clock.usage.cpu_s > 0 and clock.usage.processes == 1 and clock.usage.memory > 0
        everything = Usage.of(os.getpid(), itself=False)
        assert everything.processes >= 2 and everything.waited_s >= 0.2
    finally:
        for process in processes:
            process.kill()
            process.wait()
