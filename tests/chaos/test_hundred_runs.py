"""A hundred runs in a row on one cluster, each cancelled at another moment, leave nothing behind."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import rayrft
from rayrft.monitor.records import StepRecord
from tests.chaos.processes import at_work, own_raylet, until_ended
from tests.core.leftovers import alive, free, groups, until_free
from tests.e2e.conftest import WITHOUT_VLLM, small_config

RUNS, WARM = 100, 20


def at_once(run: rayrft.Run) -> None:
    run.kill()


def while_it_starts(run: rayrft.Run) -> None:
    next(run.records())
    run.kill()


def after_a_step(run: rayrft.Run) -> None:
    next(record for record in run.records() if isinstance(record, StepRecord))
    run.kill()


def with_its_weights(run: rayrft.Run) -> None:
    next(record for record in run.records() if isinstance(record, StepRecord))
    run.stop()
    assert run.result().status == "stopped"


def daemons() -> Iterator[psutil.Process]:
    """What lives as long as the cluster: this process and Ray's own."""
    raylet = own_raylet()
    yield from (psutil.Process(), raylet)
    yield from (each for each in raylet.parent().children() if each.name() == "gcs_server")  # type: ignore[union-attr]


def held() -> dict[str, int]:
    """Files that the daemons have open, ports on which they listen, bytes in the object store, and pieces of other
    shared memory."""
    store = round(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])
    files = {each.name(): each.num_fds() for each in daemons()}
    sockets = [socket for each in daemons() for socket in each.net_connections("tcp")]
    ports = sum(socket.status == psutil.CONN_LISTEN for socket in sockets)
    return {**files, "ports": ports, "objects": store, "shared": len(os.listdir("/dev/shm"))}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_hundred_cancelled_runs_leave_no_process_file_port_or_shared_memory(tmp_path: Path) -> None:
    config = small_config(tmp_path, "cancelled", evaluation={"enabled": False})
    config["stages"][1]["steps"] = 10_000
    living, room, reserved, working = alive(), free(), groups(), at_work(own_raylet())
    counted = list[dict[str, int]]()
    ways = islice(cycle([at_once, while_it_starts, after_a_step, with_its_weights]), RUNS)
    for number, cancel in enumerate(ways):
        faulthandler.dump_traceback_later(600, exit=True, file=sys.__stderr__)  # a limit for each run, and not for all
        scripted: dict[str, Any] = {} if number % 10 == 7 else WITHOUT_VLLM
        cancel(rayrft.start({**config, **scripted}, say=lambda _: None))
        until_free(living, room)
        until_ended(lambda: at_work(own_raylet()) - working)
        assert groups() <= reserved, number
        counted.append(held())
        print(number, cancel.__name__, counted[-1], flush=True)
    for name in counted[0]:
        # The fewest: Ray reports a moment longer what a run has held, and its GCS keeps for a while the connections on
        # which dead processes waited for news.
        early, late = (min(each[name] for each in part) for part in (counted[WARM : 2 * WARM], counted[-WARM:]))
        assert late <= early * 1.1 + 2, (name, [each[name] for each in counted])
