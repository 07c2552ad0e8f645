"""Functions on several ranks of this machine, which are started once and kept: that takes longer than most tests."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.runtime.forks import FORKS

_FOLDER = tempfile.TemporaryDirectory(prefix="ranks-")
_groups: dict[int, list[tuple[Any, Connection]]] = {}
"""Processes with their connections, by number of ranks."""


def _serve(rank: int, world_size: int, store: str, calls: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        function, arguments = pickle.loads(calls.recv_bytes())
        try:
            answer = function(*arguments), None
        except BaseException:  # pytest's own failures, too
            answer = None, traceback.format_exc()
        calls.send_bytes(pickle.dumps(answer))


def _started(world_size: int) -> list[tuple[Any, Connection]]:
    ranks, store = [], tempfile.mktemp(dir=_FOLDER.name)
    for rank in range(world_size):
        here, there = FORKS.Pipe()
        process = FORKS.Process(target=_serve, args=(rank, world_size, store, there), daemon=True)
        process.start()
        ranks.append((process, here))
    return ranks


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on every rank; return what that of rank 0 returned. A failure ends the ranks."""
    ranks = _groups.pop(world_size, None) or _started(world_size)
    answers: dict[Connection, Any] = {}
    try:
        for _, calls in ranks:
            calls.send_bytes(pickle.dumps((function, arguments)))
        while left := [calls for _, calls in ranks if calls not in answers]:
            for calls in wait(left, timeout=600) or [left[0]]:
                answers[calls], failure = pickle.loads(calls.recv_bytes()) if calls.poll() else (None, "no answer")
                assert failure is None, failure
        _groups[world_size] = ranks
    finally:
        if world_size not in _groups:
            for process, _ in ranks:
                process.kill()
    return answers[ranks[0][1]]


def _alone(rank: int, world_size: int, function: Callable[..., Any], arguments: Any, answers: Connection) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        answers.send((function(*arguments), None))
    except BaseException:
        answers.send((None, traceback.format_exc()))


def as_rank(rank: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a process that takes itself for one of many ranks: its collectives return at once, with what
    was given or with nothing."""
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=_alone, args=(rank, world_size, function, arguments, there), daemon=True)
    process.start()
    there.close()
    answer, failure = here.recv()
    process.join()
    assert failure is None, failure
    return answer
