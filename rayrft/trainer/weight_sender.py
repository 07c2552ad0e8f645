"""The weights of a rank on their way to the engines: described, then broadcast or handed over in GPU memory."""

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


class Sender:
    """Sends what is trained of a policy, in the ``dtype`` of the compute. Rank 0 speaks to the engines; gathering the
    shards is a collective over all ranks."""

    def __init__(self, policy: Policy, dtype: torch.dtype, *, speaks: bool, device: torch.device) -> None:
        self._policy = policy
        # An adapter is small, and engines merge it in float32: it is sent as it is.
        self._dtype = dtype if policy.lora is None else torch.float32
        self._speaks = speaks
        self._device = device
        self._group: WeightGroup | None = None
        self._store: TCPStore | None = None
        self._exported: list[Tensor] = []

    def locate(self) -> tuple[str, int]:
        """Host and port at which a weight group can meet."""
        import ray.util

        host = ray.util.get_node_ip_address()
        self._store = open_store(host)
        return host, self._store.port

    def join(self, plan: GroupPlan) -> None:
        """Meet the engines; returns when all are there."""
        self._group = WeightGroup(plan, rank=0, device=self._device) if self._speaks else None

    def describe(self) -> Parcel:
        """What will be sent."""
        lora = self._policy.lora
        metas = [TensorMeta.of(name, tensor, self._dtype) for name, tensor in named_weights(self._policy)]
        return Parcel(metas, Adapter(lora.base, lora.scale) if lora is not None else None)

    def publish(self, metas: list[TensorMeta], bucket_bytes: int) -> str:
        """Broadcast the weights, bucket by bucket; gives their digest."""
        digest = Digest()
        for buffer in self._buckets(metas, bucket_bytes):
            if self._group is not None:
                digest.update(buffer)
                self._group.broadcast(buffer)
        return digest.value

    def export(self, metas: list[TensorMeta], bucket_bytes: int) -> c.Exported:
        """Keep the weights in this GPU's memory, for engines on it to read, until `release`."""
        self._exported = list(self._buckets(metas, bucket_bytes))
        digest = Digest()
        for buffer in self._exported:
            digest.update(buffer)
        torch.cuda.synchronize()
        handles = [export_buffer(buffer) for buffer in self._exported]
        return c.Exported(gpu_uuid(self._device), handles, digest.value)

    def release(self) -> None:
        """Free what was exported."""
        self._exported = []

    def _buckets(self, metas: list[TensorMeta], bucket_bytes: int) -> Iterator[Tensor]:
        """Each bucket, filled with this rank's gathered weights."""
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
