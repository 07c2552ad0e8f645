"""What is said of a broadcast before it: who meets where, and what it carries.

Free of torch, which takes seconds to load: the actor that coordinates broadcasts needs no more than this.
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
    """Where and how a weight group meets. ``rank`` 0 is the trainer; it hosts the store."""

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
        assert bits is not None  # weights are numbers, and the names of their dtypes say how long
        return math.prod(self.shape) * int(bits[0]) // 8

    @property
    def padded(self) -> int:
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Adapter:
    """What factors on the wire (`rayrft.weights.adapter`) belong to: the weights W of the model ``base`` (folder or hub
    id), and the scale of their product."""

    base: str
    scale: float


@dataclass(frozen=True)
class Parcel:
    """What one broadcast carries, in this order: the whole weights, or the factors of an ``adapter``."""

    metas: list[TensorMeta]
    adapter: Adapter | None = None

    @property
    def nbytes(self) -> int:
        return sum(meta.nbytes for meta in self.metas)


def to_wire(metas: list[TensorMeta]) -> list[dict[str, Any]]:
    """As plain values, for vLLM's control messages."""
    return [asdict(meta) for meta in metas]


def from_wire(values: list[dict[str, Any]]) -> list[TensorMeta]:
    return [TensorMeta(value["name"], value["dtype"], tuple(value["shape"])) for value in values]
