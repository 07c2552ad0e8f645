"""Progress of a process that loads a model: the memory of the process and its children grows."""

from __future__ import annotations

import os
import time

from rayrft.runtime.processes.run_clock import Usage

_STEP = 16 << 20
"""Growth in bytes that counts as progress."""


class LoadProgress:
    """The present ``phase`` of a start, the memory used for it, and the time since either changed."""

    def __init__(self, phase: str) -> None:
        self._bytes = 0
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self.began = phase, time.strftime("%H:%M:%S")
        self._progressed = time.monotonic()

    @property
    def doing(self) -> str:
        """The phase, when it began, and the memory at the latest `measure`, for people."""
        return f"{self.phase} since {self.began}, {self._bytes / 1e9:.1f} GB in memory"

    def measure(self) -> float:
        """Measure the memory; return the seconds since the phase began or the memory last grew."""
        used = Usage.of(os.getpid()).memory
        if used >= self._bytes + _STEP:
            self._bytes, self._progressed = used, time.monotonic()
        return time.monotonic() - self._progressed
