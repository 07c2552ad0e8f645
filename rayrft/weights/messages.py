"""Messages that prepare a broadcast: the group's rendezvous, and the tensors to send.

Without torch, which takes seconds to load: the actor that coordinates broadcasts needs only this module.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 16


@dataclass(frozen=True)
class GroupPlan:
    """Rendezvous of a weight group. Rank 0 is the trainer, which hosts the store."""

    backend: Literal["gloo", "nccl"]
    host: str
    port: int
    world_size: int
    generation: int
    timeout_s: float


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


@dataclass(frozen=True)
class Parcel:
    """The contents of one broadcast, in this order: all weights, or the factors of an ``adapter``."""

    metas: list[TensorMeta]
    adapter: Adapter | None = None

    @property
    def nbytes(self) -> int:
        return sum(meta.nbytes for meta in self.metas)


def to_wire(metas: list[TensorMeta]) -> list[dict[str, Any]]:
    """Convert to plain values, for vLLM's control messages."""
    return [asdict(meta) for meta in metas]


def from_wire(values: list[dict[str, Any]]) -> list[TensorMeta]:
    return [TensorMeta(value["name"], value["dtype"], tuple(value["shape"])) for value in values]
