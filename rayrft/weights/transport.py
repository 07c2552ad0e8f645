"""WeightTransport: how buckets of weights get from trainer ranks to engine workers, and the registry of ways.

Without torch at import: the config asks a transport whether it fits the run before anything starts.
"""

from __future__ import annotations

import hmac
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rayrft.errors import ConfigError, WeightSyncError
from rayrft.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rayrft.weights.messages import Parcel

FIELD = "weight_sync.backend"


@dataclass(frozen=True)
class Layout:
    """What a transport has to connect: workers of engines and trainer ranks, and the GPUs of one of either."""

    workers: int
    worker_gpus: float
    ranks: int
    rank_gpus: float


@dataclass(frozen=True)
class Endpoint:
    """One end of a link. Senders are the trainer's ranks, receivers the engines' workers."""

    sends: bool
    index: int
    """Among the senders, or among the receivers."""
    senders: int
    receivers: int
    device: torch.device
    store: Any
    """A key-value store that all ends share (`torch.distributed.Store`): ``get`` and ``wait`` end when a key is set, or
    with an error after ``timeout_s``. Other processes that reach its port can read and write it: see `SignedStore`."""
    timeout_s: float
    secret: str = field(repr=False)
    """The link's secret, which only its ends have."""
    address: str = "127.0.0.1"
    """This end's address in the network of the first sender."""
    options: dict[str, Any] = field(default_factory=dict)
    """Those of `Link.options`."""


class SignedStore:
    """A store whose values are signed with the secret of a link, so that only the link's ends can write them."""

    def __init__(self, store: Any, secret: str) -> None:
        self._store, self._secret = store, secret.encode()
        self.wait, self.delete_key = store.wait, store.delete_key

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._signature(key, value) + value)

    def get(self, key: str) -> str:
        """Wait for a value and return it. Raises WeightSyncError if another process wrote it."""
        signed: str = self._store.get(key).decode(errors="replace")
        signature, value = signed[:64], signed[64:]
        if not hmac.compare_digest(signature.encode(), self._signature(key, value).encode()):
            problem = "a process outside the run wrote to the store of the link between trainer and engines"
            remedy = "let only the cluster's nodes reach each other's ports, then resume the run"
            raise WeightSyncError(problem, remedy, field=key)
        return value

    def _signature(self, key: str, value: str) -> str:
        return hmac.digest(self._secret, f"{key}\0{value}".encode(), "sha256").hex()


class WeightTransport(ABC):
    """One end of a way to transfer buckets. All ends send or receive the same buckets, in the same order.

    A way of your own is a subclass in one file, registered by a name that ``weight_sync.backend`` gives:
    ``@register_transport("name")``, in a file that the config's ``plugins`` name.
    """

    automatic: ClassVar[bool] = True
    """Whether ``auto`` may choose it."""
    colocated: ClassVar[bool] = False
    """Whether each engine shares a GPU, and so a placement bundle, with a trainer rank."""
    reads: bool = True
    """Whether `send` reads the buckets at this end, since `connect`; else they are not filled."""
    in_flight: int = 1
    """Buckets that may be on their way while the next one is filled, since `connect`."""

    @classmethod  # noqa: B027 - files fit each
    def check(cls, layout: Layout) -> None:
        """Raise ConfigError if the transport does not fit the layout; by default it fits each."""

    @abstractmethod
    def connect(self, end: Endpoint) -> None:
        """Connect this end; return when the others have connected, too, if a transfer needs that."""

    @abstractmethod
    def send(self, parcel: Parcel, buckets: Iterable[Tensor]) -> None:
        """Send the buckets of a parcel, flat buffers of bytes (uint8, on the endpoint's device); return when all have
        arrived.

        Runs on every sender, which must take all buckets: making one is a collective of the senders. A bucket stays as
        it is until `in_flight` others and one more are taken: by default, until the next but one.
        """

    @abstractmethod
    def receive(self, parcel: Parcel, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Iterate over the buckets of a parcel, of so many bytes. What is yielded belongs to the receiver."""

    def published(self, number: int) -> Parcel:
        """Return the parcel that senders elsewhere have published as ``number``, which is received next. Only for
        transports whose receivers meet no sender, and then have no store."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most leave nothing behind
        """Free what `connect` made, if it stays."""


transports: Registry[type[WeightTransport]] = Registry("weight transport")
register_transport = transports.register


def choose_transport(name: str, layout: Layout) -> str:
    """Return the name of the transport to use: ``name``, or if that is ``auto`` the first automatic one that fits.

    Raises ConfigError, on ``weight_sync.backend``, if it is unknown or does not fit, or if none does.
    """
    if name != "auto":
        transports.get(name, FIELD).check(layout)
        return name
    problems = []
    for candidate in transports:
        if not transports.get(candidate).automatic:
            continue
        try:
            transports.get(candidate).check(layout)
        except ConfigError as error:
            problems.append(f"{candidate} {error.problem}")
        else:
            return candidate
    remedy = "change explorer.engine.gpus, trainer.gpus, explorer.engine.count or trainer.ranks"
    raise ConfigError(f"no weight transport fits: {'; '.join(problems)}", remedy, field=FIELD, value=name)
