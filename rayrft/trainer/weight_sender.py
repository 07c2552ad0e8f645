"""Sending a rank's weights to the engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rayrft.trainer.model import full_weights, named_weights
from rayrft.trainer.policy import Policy
from rayrft.weights.buckets import empty_bucket, fill_bucket, plan_buckets
from rayrft.weights.channel import WeightChannel, open_store
from rayrft.weights.messages import Adapter, Link, Parcel, Sent, TensorMeta


class WeightSender:
    """Sends a policy's trained weights in the compute ``dtype``, on the rank of this ``index``. Gathering the shards is
    a collective over all ranks."""

    def __init__(self, policy: Policy, dtype: torch.dtype, *, index: int, device: torch.device) -> None:
        self._policy = policy
        # An adapter is small and engines merge it in float32, so it is not rounded.
        self._dtype = dtype if policy.lora is None else torch.float32
        self._index = index
        self._device = device
        self._channel: WeightChannel | None = None
        self._store: TCPStore | None = None

    def locate(self, timeout_s: float) -> tuple[str, int] | None:
        """Open the store of a future link on the first rank; return its host and port."""
        if self._index:
            return None
        self._store = open_store(timeout_s)
        return self._store.host, self._store.port

    def connect(self, link: Link) -> None:
        """Connect to the engines of a link, and close the link before."""
        if self._channel is not None:
            self._channel.close()
        self._channel = WeightChannel(link, sends=True, index=self._index, device=self._device, store=self._store)

    def send(self, number: int, bucket_bytes: int) -> Sent:
        """Send the weights to all engines of the link, as its transfer ``number``."""
        if self._channel is None:
            raise RuntimeError("no link to the engines: connect comes first")
        lora = self._policy.lora
        metas = [TensorMeta.of(name, tensor, self._dtype) for name, tensor in named_weights(self._policy)]
        parcel = Parcel(metas, bucket_bytes, Adapter(lora.base, lora.scale) if lora is not None else None)
        return Sent(self._channel.send(number, parcel, self._buckets(parcel)), parcel.nbytes)

    def _buckets(self, parcel: Parcel) -> Iterator[Tensor]:
        """Iterate over the buckets, filled with the gathered weights."""
        parameters = full_weights(self._policy)
        for bucket in plan_buckets(parcel.metas, parcel.bucket_bytes):
            buffer = empty_bucket(bucket, self._device)
            tensors = []
            for meta, (name, tensor) in zip(bucket, parameters, strict=False):
                if name != meta.name:
                    raise ValueError(f"parameter {name!r} came where {meta.name!r} was announced")
                tensors.append(tensor)
            fill_bucket(buffer, bucket, tensors)
            yield buffer
