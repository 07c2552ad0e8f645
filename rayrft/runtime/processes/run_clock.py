"""Resources of processes, and the time in which they could run."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """Resources of a process and its descendants."""

    processes: int = 0
    memory: int = 0
    """Resident bytes."""
    cpu_s: float = 0.0
    """Processor time, with that of descendants that ended."""
    waited_s: float = 0.0
    """Time in which threads could run and waited for a core."""

    @classmethod
    def of(cls, first: int, *, itself: bool = True) -> Usage:
        """Measure the descendants of a process, and ``itself``; processes that end meanwhile are left out."""
        todo, count, pages, ticks, waited = [first], 0, 0, 0, 0
        while todo:
            pid = todo.pop()
            try:
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                        todo += map(int, file.read().split())
                    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                        waited += int(file.read().split()[1])  # proc(5): nanoseconds on a core, and waiting for one
            except (FileNotFoundError, ProcessLookupError):
                continue
            if pid != first or itself:
                count += 1
                pages += int(fields[21])
                ticks += int(fields[11]) + int(fields[12])
            ticks += int(fields[13]) + int(fields[14])  # of its dead children
        return cls(count, pages * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK"), waited / 1e9)


class RunClock:
    """Seconds in which a process and its descendants could run: wall time without their waits for a core. Processor
    time always counts, so that many processes that compete with each other run out of time, too."""

    def __init__(self, pid: int, *, itself: bool = True, seconds: float = 0.0) -> None:
        self._pid, self._itself = pid, itself
        self._seconds, self._looked_at = seconds, time.monotonic()
        self.usage = Usage.of(pid, itself=itself)
        """At the last look."""

    def look(self) -> float:
        """Measure, and return the seconds."""
        before, self.usage = self.usage, Usage.of(self._pid, itself=self._itself)
        elapsed = (now := time.monotonic()) - self._looked_at
        able = elapsed - max(0.0, self.usage.waited_s - before.waited_s)
        self._seconds += max(able, min(self.usage.cpu_s - before.cpu_s, elapsed), 0.0)
        self._looked_at = now
        return self._seconds

    def seconds(self) -> float:
        """Return the seconds, all of them counted since the last look."""
        return self._seconds + time.monotonic() - self._looked_at
