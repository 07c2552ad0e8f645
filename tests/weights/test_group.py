"""The process group that carries weights meets where it said it would."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rayrft.weights.group import WeightGroup, open_store
from rayrft.weights.messages import GroupPlan

HOST = "127.0.0.1"


def test_a_port_that_was_given_out_cannot_be_taken_before_the_group_meets() -> None:
    store = open_store(HOST)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, store.port))
    plan = GroupPlan("gloo", HOST, store.port, world_size=2, generation=1, timeout_s=30)
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(WeightGroup, plan, rank, torch.device("cpu")) for rank in range(2)]
        groups = [each.result() for each in joining]
        buffers = [torch.arange(4.0), torch.zeros(4)]
        list(pool.map(lambda group, buffer: group.broadcast(buffer), groups, buffers))
    assert torch.equal(*buffers)
