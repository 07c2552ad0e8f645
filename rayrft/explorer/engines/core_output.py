"""The root cause of a start that failed in vLLM's core or its workers, processes of their own: vLLM only prints it."""

from __future__ import annotations

import re
from pathlib import Path

from rayrft.errors import ActorDied

OUTPUTS = Path("/proc/self/fd/1"), Path("/proc/self/fd/2")
"""Standard output, to which workers log, and error, which the core's traceback ends; in an actor both are files."""

_ERROR = re.compile(
    r"(?:^|ERROR .*\] )((?:\w+\.)*\w+(?:Error|Exception): (?!.*initialization failed).+)$", re.MULTILINE
)
"""The last line of a traceback, as it is or as vLLM logs it, unless another process is the cause."""

_REMEDIES = {
    "Free memory on device": "lower engine.gpu_memory_utilization, or end what else uses the GPU (rayrft doctor)",
    "memory for the cache": "raise engine.gpu_memory_utilization, or engine.tensor_parallel with engine.gpus",
    "KV cache is needed": "lower max_length, or raise engine.gpu_memory_utilization (on CPUs engine.kv_cache_mib)",
    "out of memory": "raise engine.tensor_parallel with engine.gpus, or lower engine.max_running",
}
"""Remedies by a part of vLLM's message."""


def printed_bytes() -> list[int]:
    """Return how much is in the files to which this process and its children print."""
    return [file.stat().st_size if file.is_file() else 0 for file in OUTPUTS]


def start_failure(engine: str, before: list[int]) -> ActorDied:
    """Return the first error that was printed after so many bytes; a killed process prints none. Another start may
    succeed, once the memory of an engine that died is free."""
    for file, size in zip(OUTPUTS, before, strict=True):
        text = file.read_bytes()[size:].decode(errors="replace") if file.is_file() else ""
        if found := _ERROR.search(text):
            remedy = next((remedy for part, remedy in _REMEDIES.items() if part in found[1]), "see the engine's log")
            return ActorDied(f"vLLM does not start: {found[1][:1000].rstrip('.')}", remedy, field=engine)
    remedy = "if the node's memory was full (dmesg), lower max_length or engine.max_running; else see the engine's log"
    return ActorDied("vLLM's core process ended while it started, and printed no error", remedy, field=engine)
