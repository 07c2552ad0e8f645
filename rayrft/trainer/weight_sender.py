"""Sending a rank's weights to the engines: by broadcast, or through shared GPU memory (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rayrft.trainer import commands as c
from rayrft.trainer.model import full_weights, named_weights
from rayrft.trainer.policy import Policy
from rayrft.weights.buckets import Digest, empty_bucket, fill_bucket, plan_buckets
from rayrft.weights.group import WeightGroup, open_store
from rayrft.weights.ipc import export_buffer, gpu_uuid
from rayrft.weights.messages import Adapter, GroupPlan, Parcel, TensorMeta


class WeightSender:
    """Sends a policy's trained weights in the compute ``dtype``. Gathering the shards is a collective over all ranks;
    only the rank with ``sends`` (rank 0) talks to the engines."""

    def __init__(self, policy: Policy, dtype: torch.dtype, *, sends: bool, device: torch.device) -> None:
        self._policy = policy
        # An adapter is small and engines merge it in float32, so it is not rounded.
        self._dtype = dtype if policy.lora is None else torch.float32
        self._sends = sends
        self._device = device
        self._group: WeightGroup | None = None
        self._store: TCPStore | None = None
        self._exported: list[Tensor] = []

    def locate(self) -> tuple[str, int]:
        """Open the store of a weight group; return its host and port."""
        import ray.util

        host = ray.util.get_node_ip_address()
        self._store = open_store(host)
        return host, self._store.port

    def join(self, plan: GroupPlan) -> None:
        """Join the engines' weight group; returns when all members have joined."""
        self._group = WeightGroup(plan, rank=0, device=self._device) if self._sends else None

    def describe(self) -> Parcel:
        """Describe the tensors that will be sent."""
        lora = self._policy.lora
        metas = [TensorMeta.of(name, tensor, self._dtype) for name, tensor in named_weights(self._policy)]
        return Parcel(metas, Adapter(lora.base, lora.scale) if lora is not None else None)

    def publish(self, metas: list[TensorMeta], bucket_bytes: int) -> str:
        """Broadcast the weights, bucket by bucket; return their digest."""
        digest = Digest()
        for buffer in self._buckets(metas, bucket_bytes):
            if self._group is not None:
                digest.update(buffer)
                self._group.broadcast(buffer)
        return digest.value

    def export(self, metas: list[TensorMeta], bucket_bytes: int) -> c.Exported:
        """Copy the weights into buffers on this GPU, for engines on it to read until `release`."""
        self._exported = list(self._buckets(metas, bucket_bytes))
        digest = Digest()
        for buffer in self._exported:
            digest.update(buffer)
        torch.cuda.synchronize()
        handles = [export_buffer(buffer) for buffer in self._exported]
        return c.Exported(gpu_uuid(self._device), handles, digest.value)

    def release(self) -> None:
        """Free the exported buffers."""
        self._exported = []

    def _buckets(self, metas: list[TensorMeta], bucket_bytes: int) -> Iterator[Tensor]:
        """Iterate over the buckets, filled with the gathered weights."""
        parameters = full_weights(self._policy)
        for bucket in plan_buckets(metas, bucket_bytes):
            buffer = empty_bucket(bucket, self._device)
            tensors = []
            for meta, (name, tensor) in zip(bucket, parameters, strict=False):
                if name != meta.name:
                    raise ValueError(f"parameter {name!r} came where {meta.name!r} was announced")
                tensors.append(tensor)
            fill_bucket(buffer, bucket, tensors)
            yield buffer
