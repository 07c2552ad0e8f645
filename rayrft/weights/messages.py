"""Messages that prepare a transfer: how both ends meet, and the tensors to come.

Without torch, which takes seconds to load: the actor that coordinates transfers needs only this module.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 16


@dataclass(frozen=True)
class Link:
    """How trainer ranks (senders) and engine workers (receivers) meet: the name of their `WeightTransport`, registered
    by itself or by one of the ``plugins``, and the store of the first sender."""

    transport: str
    host: str
    port: int
    number: int
    """Part of the keys in the store, so that the ends of an older link never join a newer one."""
    senders: int
    """0 if receivers follow what is published elsewhere (`WeightTransport.published`); then there is no store."""
    receivers: int
    timeout_s: float
    secret: str = field(repr=False)
    """Signs what the ends write into the store, which other processes can reach. It travels by Ray alone."""
    plugins: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the transport."""


@dataclass(frozen=True)
class TensorMeta:
    """Name, dtype (such as ``float32``) and full shape of one parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> TensorMeta:
        return cls(name, str(dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        assert bits is not None  # names of numeric dtypes contain their size
        return math.prod(self.shape) * int(bits[0]) // 8

    @property
    def padded(self) -> int:
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Adapter:
    """The base weights of adapter factors (`rayrft.weights.adapter`), a model folder or hub id, and their scale."""

    base: str
    scale: float
    frozen: str = "dtype"
    """How the trainer holds the base weights that have factors: see `LoraConfig.frozen`."""


@dataclass(frozen=True)
class Parcel:
    """The contents of one transfer, in this order: all weights, or the factors of an ``adapter``."""

    metas: list[TensorMeta]
    bucket_bytes: int
    adapter: Adapter | None = None
    version: int = 0
    """That of the weights: see `WeightSync`."""

    @property
    def nbytes(self) -> int:
        return sum(meta.nbytes for meta in self.metas)


PARCELS: TypeAdapter[Parcel] = TypeAdapter(Parcel)
"""Parcels as JSON."""


@dataclass(frozen=True)
class SendReport:
    """Digest (first rank only) and size of the weights sent; ``problem`` is why they did not reach the engines."""

    digest: str
    nbytes: int
    problem: str | None = None


@dataclass(frozen=True)
class SyncReport:
    """Report of a round. ``digest`` is None without engines, ``probe_gap`` (largest, of log-probs) without a probe."""

    version: int
    seconds: float
    nbytes: int
    digest: str | None
    probe_gap: float | None
