"""Every transport carries the same bytes to every receiver, transfer after transfer; and fits where it says."""

from __future__ import annotations

import itertools
import json
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore
from torch.multiprocessing import reductions

from rayrft.config import RunConfig, load_config
from rayrft.errors import ConfigError, WeightSyncError
from rayrft.weights import Endpoint, ipc, transports
from rayrft.weights.broadcast import Gloo, Nccl
from rayrft.weights.buckets import allocate, plan_buckets
from rayrft.weights.channel import open_store
from rayrft.weights.messages import PARCELS, Adapter, Link, Parcel
from rayrft.weights.transport import SignedStore
from tests.config.given import base
from tests.conftest import ROOT
from tests.errors import about
from tests.weights.ends import CPU, HOST, Ends, parcel, weights

SHARED_FILE = ROOT / "tests" / "samples" / "shared_file.py"


@pytest.fixture(autouse=True)
def only_built_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What plugins and examples register is not there before and after a test."""
    monkeypatch.setattr(
        transports, "_pieces", {name: transports.get(name) for name in ("gloo", "nccl", "ipc", "files")}
    )
    yield
    for name in [name for name in sys.modules if name.startswith("rayrft_plugin_shared_file")]:
        del sys.modules[name]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """CPU memory in the place of GPUs': the handle to a buffer leads to the buffer."""
    exported: dict[str, Tensor] = {}

    def export(buffer: Tensor) -> str:
        handle = str(len(exported))
        exported[handle] = buffer
        return handle

    monkeypatch.setattr(ipc, "gpu_uuid", lambda device: f"gpu-{device.index}")
    monkeypatch.setattr(ipc, "export_buffer", export)
    monkeypatch.setattr(ipc, "open_buffer", lambda handle, device: exported[handle])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("rayrft.weights.buckets.allocate", lambda planned, device, count: allocate(planned, CPU, count))
    return exported


@pytest.mark.parametrize(
    ("transport", "senders", "receivers"),
    [("gloo", 1, 2), ("gloo", 2, 1), ("ipc", 2, 2), ("ipc", 2, 1), ("shared_file", 2, 2)],
)
def test_every_receiver_gets_the_same_bytes_transfer_after_transfer(
    transport: str,
    senders: int,
    receivers: int,
    exported: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARED_FOLDER", str(tmp_path))
    ends = Ends(transport, senders, receivers, (str(SHARED_FILE),))
    for number in (1, 2):
        tensors = weights(number)
        sent, got = ends.transfer(number, tensors)
        assert len(got) == receivers
        for digest, received in got:
            assert digest == sent
            assert list(received) == list(tensors)
            assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
    ends.close()
    assert not list(tmp_path.iterdir())
    if transport == "ipc":  # what nobody maps would never be freed
        assert len(exported) == 2 * receivers * len(plan_buckets(parcel(weights(1)).metas, 1200))


class RecordedGroup:
    """A process group whose broadcasts end when they are waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._begun = itertools.count()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        number = next(self._begun)
        self.events.append(f"begin {number}")
        return SimpleNamespace(wait=lambda: self.events.append(f"end {number}"))


class RecordedGloo(Gloo):
    """One end of a link over a group that records."""

    def __init__(self, *, sends: bool) -> None:
        self.group = RecordedGroup()
        self.connect(Endpoint(sends, 0, 1, 1, CPU, None, 1.0, "s"))

    def _form(self, *_: Any) -> Any:
        return self.group


def test_buckets_travel_while_the_next_is_filled_and_the_one_before_is_loaded() -> None:
    of_gpus = ["fill 0", "begin 0", "fill 1", "end 0", "begin 1", "fill 2", "end 1", "begin 2", "end 2"]
    of_cpus = ["fill 0", "begin 0", "fill 1", "begin 1", "fill 2", "end 0", "begin 2", "end 1", "end 2"]
    for in_flight, expected in ((None, of_cpus), (1, of_gpus)):
        transport = RecordedGloo(sends=True)
        transport.in_flight = in_flight or transport.in_flight
        events = transport.group.events

        def filled(events: list[str] = events) -> Iterator[Tensor]:
            for number in range(3):
                events.append(f"fill {number}")
                yield torch.zeros(8, dtype=torch.uint8)

        transport.send(parcel({}), filled())
        assert events == expected
    transport = RecordedGloo(sends=False)
    group = transport.group
    for number, buffer in enumerate(transport.receive(parcel({}), [8, 16, 24])):
        group.events.append(f"load {number}")
        assert buffer.numel() == 8 * (number + 1)
    assert group.events == [
        *("begin 0", "begin 1", "end 0", "load 0"),
        *("begin 2", "end 1", "load 1", "end 2", "load 2"),
    ]


def test_a_buffer_is_taken_again_once_no_tensor_of_it_is_held() -> None:
    transport = RecordedGloo(sends=False)
    with mock.patch.object(np, "empty", wraps=np.empty) as made:
        for buffer in transport.receive(parcel({}), [64] * 9):
            del buffer
        assert made.call_count <= 3
        held = [buffer[8:] for buffer in transport.receive(parcel({}), [64] * 9)]
        assert len({each.data_ptr() for each in held}) == 9


def test_only_ends_that_send_read_their_buckets(exported: dict[str, Tensor]) -> None:
    for transport, receivers, reading in (
        ("gloo", 1, [True, False]),
        ("ipc", 1, [True, False]),
        ("ipc", 2, [True] * 2),
    ):
        ends = Ends(transport, 2, receivers)
        assert [end.reads for end in ends.senders] == reading
        ends.close()


@pytest.mark.usefixtures("exported")
def test_an_engine_on_the_gpu_of_no_rank_is_refused_when_it_connects() -> None:
    store = open_store(30, HOST)
    SignedStore(store, "s").set("sender/0", "gpu-0")
    with pytest.raises(RuntimeError, match="gpu-1"):
        ipc.CudaIpc().connect(Endpoint(False, 0, 1, 1, torch.device("cuda", 1), store, 30, "s"))


def test_nccl_forms_its_group_of_the_first_rank_and_the_workers_on_their_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formed: list[tuple[Any, ...]] = []

    class Group:
        class Options:
            _timeout: Any = None

        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            formed.append((store, rank, size, options._timeout.total_seconds()))

    devices: list[torch.device] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    for sends, index in ((True, 0), (True, 1), (False, 0), (False, 1)):
        end = Endpoint(sends, index, 2, 2, torch.device("cuda", index), "store", 7.0, "s")
        transport = Nccl()
        transport.connect(end)
        if (sends, index) == (True, 1):  # gathers with the first, and sends nothing
            taken: list[Tensor] = []
            buffers = (taken.append(buffer) or buffer for buffer in [torch.zeros(4)])  # type: ignore[func-returns-value]
            transport.send(parcel({}), buffers)
            assert len(taken) == 1
    assert formed == [("store", 0, 3, 7.0), ("store", 1, 3, 7.0), ("store", 2, 3, 7.0)]
    assert [device.index for device in devices] == [0, 0, 1]


def test_a_port_that_was_given_out_cannot_be_taken_before_the_ends_meet() -> None:
    store = open_store(30, HOST)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, store.port))


def test_a_store_listens_at_its_host_and_at_no_other_address_of_the_machine() -> None:
    store = open_store(30, HOST)
    members = [
        TCPStore(HOST, store.port, wait_for_workers=False, multi_tenant=True, is_master=first)
        for first in (True, False)
    ]
    members[0].set("met", "yes")
    assert members[1].get("met") == b"yes"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))


class Forged:
    """A pickle that runs code where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code from the store has run",)


@pytest.mark.usefixtures("exported")
def test_a_value_that_another_process_writes_into_the_store_is_refused_unread() -> None:
    store = open_store(30, HOST)
    own, guessed, other = (SignedStore(store, secret) for secret in ("s", "guess", "s"))
    for forged in (pickle.dumps(Forged()), b"{}", b""):
        store.set("parcel/1", forged)
        with pytest.raises(WeightSyncError) as refused:
            own.get("parcel/1")
        assert refused.value.field == "parcel/1"
    guessed.set("parcel/1", "mine")
    with pytest.raises(WeightSyncError):
        own.get("parcel/1")
    other.set("parcel/1", "mine")
    assert own.get("parcel/1") == "mine"
    store.set("parcel/2", store.get("parcel/1"))  # a signed value under another key
    with pytest.raises(WeightSyncError):
        own.get("parcel/2")
    link = Link("ipc", HOST, store.port, 1, 1, 1, 30, "s")
    assert "'s'" not in repr(link)


def test_a_handle_to_gpu_memory_travels_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = (b"\x00handle", 4096, 512, False, b"counter", 3, b"event", True)
    given = (torch.Tensor, torch.Size([7]), (1,), 2, torch.storage.TypedStorage, torch.uint8, 5, *memory)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda buffer: (reductions.rebuild_cuda_tensor, given))
    rebuilt: list[tuple[Any, ...]] = []
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: rebuilt.append(arguments))
    handle = ipc.export_buffer(torch.zeros(7, dtype=torch.uint8))
    json.loads(handle)
    ipc.open_buffer(handle, torch.device("cuda", 1))
    assert rebuilt == [(*given[:6], 1, *memory)]


def test_what_is_announced_is_what_arrives() -> None:
    sent = Parcel(parcel(weights(0)).metas, 77, Adapter("a/folder", 1.5), version=12)
    assert PARCELS.validate_json(PARCELS.dump_json(sent)) == sent
    assert PARCELS.validate_json(PARCELS.dump_json(parcel(weights(0)))).adapter is None


def config(backend: str, engine_gpus: float, rank_gpus: float, engines: int = 2, **overrides: Any) -> RunConfig:
    devices = {"explorer.engine.gpus": engine_gpus, "trainer.gpus": rank_gpus, "explorer.engine.count": engines}
    return load_config(base(), {"weight_sync.backend": backend, **devices, **overrides})


@pytest.mark.parametrize(
    ("backend", "engine_gpus", "rank_gpus", "engines"),
    [
        ("gloo", 1, 1, 2),
        ("nccl", 0, 0, 2),
        ("nccl", 1, 0.5, 2),  # two ranks on a GPU
        ("ipc", 0, 0, 2),
        ("ipc", 0.5, 0.6, 2),  # more than a GPU
        ("ipc", 0.4, 0.5, 3),  # three engines, two ranks
        ("ipc", 0.2, 0.3, 2),  # two pairs on a GPU
        ("auto", 0.5, 0.6, 2),
        ("ippc", 0, 0, 2),
    ],
)
def test_a_transport_that_does_not_fit_is_refused_with_its_rule(
    backend: str, engine_gpus: float, rank_gpus: float, engines: int
) -> None:
    with pytest.raises(ConfigError, check=about("weight_sync.backend", backend)):
        config(backend, engine_gpus, rank_gpus, engines)


def test_a_transport_of_ones_own_is_chosen_by_the_config() -> None:
    assert len(SHARED_FILE.read_text().splitlines()) < 60
    chosen = config("shared_file", 0.5, 0.6, plugins=[str(SHARED_FILE)])
    assert (chosen.sync_backend, chosen.colocated) == ("shared_file", False)
    assert config("auto", 0.5, 0.6).sync_backend == "shared_file", "the first that fits"
    assert config("auto", 0, 0).sync_backend == "gloo"


def test_all_that_is_registered_can_be_asked_without_torch() -> None:
    code = "import rayrft.weights, sys; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "False", result.stderr
