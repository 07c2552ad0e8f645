"""A Buffer and a shard whose processes say when they begin and when they are ready, to whoever wants to kill them."""

from __future__ import annotations

import os
import socket
from typing import Any

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.log import journal
from rayrft.buffer.log.shard import Shard


def tell(door: str, name: str, what: str) -> None:
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(door)
        there.sendall(f"{name} {what} {os.getpid()}".encode())


class MortalBuffer(Buffer):
    """Takes a snapshot every few steps, too."""

    def __init__(self, door: str, *arguments: Any) -> None:
        tell(door, "buffer", "begins")
        journal._SNAPSHOT_BYTES, journal._SNAPSHOT_RATIO = 20_000, 0
        super().__init__(*arguments)
        tell(door, "buffer", "is ready")


class MortalShard(Shard):
    def __init__(self, door: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        tell(door, "shard", "is ready")
