"""Runs a function on several ranks of this machine and gives what rank 0 returned."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.runtime.forks import FORKS


def _enter(rank: int, world_size: int, port: int, out: str, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    result = function(*arguments)
    if rank == 0:
        torch.save(result, out)
    dist.destroy_process_group()


def on_ranks(world_size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / "result.pt"
    ranks = (world_size, port, str(out), function, arguments)
    mp.start_processes(_enter, ranks, world_size, start_method=FORKS.get_start_method())
    return torch.load(out, weights_only=False)
