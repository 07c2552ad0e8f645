"""A network link that delays and loses frames, for `several_nodes.sh`: the kernel needs no netem.

``python slow_link.py NEAR FAR DELAY_MS LOSS_PERCENT`` makes two tap devices of these names in its network namespace. It
copies the frames that one sends to the other, until it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_SET_INTERFACE, _TAP, _NO_PACKET_INFORMATION = 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
_FRAME_BYTES = 1 << 16
_BURST = 64
"""Frames that are read from a device before the other has its turn."""


def make_tap(name: str) -> int:
    """Make a tap device, which exists as long as this process; return its file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_PACKET_INFORMATION))
    return file


def carry(near: int, far: int, delay_s: float, loss: float) -> None:
    """Copy frames between two devices without end."""
    other = {near: far, far: near}
    late = deque[tuple[float, int, bytes]]()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable, _, _ = select.select([near, far], [], [], wait_s)
        now = time.monotonic()
        for end in readable:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_BURST):
                    frame = os.read(end, _FRAME_BYTES)
                    if random.random() >= loss:
                        late.append((now + delay_s, other[end], frame))
        while late and late[0][0] <= now:
            _, end, frame = late.popleft()
            with contextlib.suppress(OSError):  # a device that is down loses the frame
                os.write(end, frame)


if __name__ == "__main__":
    carry(make_tap(sys.argv[1]), make_tap(sys.argv[2]), float(sys.argv[3]) / 1000, float(sys.argv[4]) / 100)
