"""One end of a link between trainer and engines: the part of a transfer that all transports share.

The first sender announces the parcel in the link's store; then its buckets go through the transport. Both ends digest
the buckets: equal digests show that every byte arrived in order.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import rayrft.weights.buckets as wire
from rayrft.registry import load_plugins
from rayrft.runtime.ray_api import ray
from rayrft.weights.messages import PARCELS, Link, Parcel
from rayrft.weights.transport import Endpoint, SignedStore, transports


def open_store(timeout_s: float = 300.0, host: str | None = None) -> TCPStore:
    """Open the store of a future link or group at a free port (`TCPStore.port`), in the process of its first member.

    It listens at once, because another process may take a port that is only found to be free, and at ``host`` alone,
    where torch's own listener takes all interfaces. The default is this node's address, or the loopback address while
    the cluster has no other node. A later store of this process at the same port with ``multi_tenant`` shares the
    listener; keep this one until then.
    """
    host = host or node_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        port, listening_fd = listening.getsockname()[1], listening.detach()
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening_fd,
    )


def node_address() -> str:
    """Return this node's address, or the loopback address while the cluster has no other node."""
    alone = sum(node["Alive"] for node in ray.nodes()) == 1
    return "127.0.0.1" if alone else ray.util.get_node_ip_address()


def address_towards(host: str, port: int) -> str:
    """Return this process' address in the network in which it reaches ``host``; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class WeightChannel:
    """An end of a link: ``sends`` on a trainer rank, receives on an engine worker; ``index`` among those.

    The first sender gives the ``store`` that it opened.
    """

    def __init__(
        self, link: Link, *, sends: bool, index: int, device: torch.device, store: TCPStore | None = None
    ) -> None:
        load_plugins(Path(path) for path in link.plugins)
        self._announces, self._device = sends and index == 0, device
        self._announced: list[str] = []
        self._transport = transports.get(link.transport)()
        self._store: SignedStore | None = None
        own, address = None, ""
        if link.senders:
            timeout = timedelta(seconds=link.timeout_s)
            tcp = store or TCPStore(link.host, link.port, is_master=False, wait_for_workers=False, timeout=timeout)
            shared = PrefixStore(f"rayrft/{link.number}", tcp)
            self._store, own = SignedStore(shared, link.secret), PrefixStore("transport", shared)
            address = address_towards(link.host, link.port)
        ends = link.senders, link.receivers
        end = Endpoint(sends, index, *ends, device, own, link.timeout_s, link.secret, address, link.options)
        self._transport.connect(end)
        self.reads = self._announces or self._transport.reads
        """Whether this end reads the buckets that it sends; else they are not filled."""

    def send(self, number: int, parcel: Parcel, tensors: Iterator[Tensor]) -> str:
        """Send a parcel as transfer ``number``; return its digest, on the first sender.

        All senders take all the tensors, in the parcel's order: making one is a collective.
        """
        digest = wire.Digest()
        if self._announces:
            assert self._store is not None  # a sender has one
            for read in self._announced:  # by all receivers: the transfer before has ended everywhere
                self._store.delete_key(read)
            self._announced = [f"parcel/{number}"]
            self._store.set(self._announced[0], PARCELS.dump_json(parcel).decode())
        try:
            self._transport.send(parcel, self._filled(parcel, tensors, digest))
        except Exception:
            deque(tensors, maxlen=0)  # the other ranks take part in gathering each
            raise
        return digest.value

    def _filled(self, parcel: Parcel, tensors: Iterator[Tensor], digest: wire.Digest) -> Iterator[Tensor]:
        """Iterate over the buckets, filled if this end reads them, and digested if it is the first sender."""
        planned = wire.plan_buckets(parcel.metas, parcel.bucket_bytes)
        memory = cycle(wire.allocate(planned if self.reads else [], self._device, 1 + self._transport.in_flight))
        for metas in planned:
            buffer, own = wire.empty_bucket(metas if self.reads else [], next(memory)), islice(tensors, len(metas))
            if self.reads:
                wire.fill_bucket(buffer, metas, own, digest if self._announces else None)
            else:
                deque(own, maxlen=0)
            yield buffer

    def announced(self, number: int) -> Parcel:
        """Wait for the announcement of transfer ``number``."""
        if self._store is None:
            return self._transport.published(number)
        return PARCELS.validate_json(self._store.get(f"parcel/{number}"))

    def receive(self, parcel: Parcel, digest: wire.Digest) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the names and tensors, and add them to the digest."""
        buckets = wire.plan_buckets(parcel.metas, parcel.bucket_bytes)
        arriving = self._transport.receive(parcel, [wire.bucket_bytes(metas) for metas in buckets])
        for metas, buffer in zip(buckets, arriving, strict=True):
            yield from wire.read_bucket(buffer, metas, digest)

    def close(self) -> None:
        self._transport.close()
