"""vLLM's side of the weight broadcast: a weight-transfer backend named ``rayrft``.

Importing this module registers the backend; vLLM's workers import it through ``worker_extension_cls``. It runs inside
the engine's worker process. This module and the engine are the only ones that import vLLM.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rayrft.weights.adapter import merge
from rayrft.weights.buckets import Digest, empty_bucket, plan_buckets, read_bucket
from rayrft.weights.group import WeightGroup
from rayrft.weights.ipc import gpu_uuid, open_buffer
from rayrft.weights.messages import Adapter, GroupPlan, from_wire

BACKEND = "rayrft"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """``plan``: the fields of a `GroupPlan`, empty for ipc. ``first_rank`` is that of the engine's first worker."""

    plan: dict[str, Any] = field(default_factory=dict)
    first_rank: int = 1


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The tensors to come, in order, and the bucket size; for ipc, by UUID of the GPU, one handle per bucket."""

    metas: list[dict[str, Any]]
    bucket_bytes: int
    handles: dict[str, list[str]] | None = None
    adapter: dict[str, Any] | None = None
    """The fields of an `Adapter`, where the tensors are its factors."""


class BucketReceiver(WeightTransferEngine[JoinInfo, UpdateInfo]):
    """Receives buckets, digests them, and loads them in checkpoint format through vLLM's layerwise reload.

    For an adapter only the factors are sent; the base weights are read again from the model's folder, which needs no
    memory between updates and is fast while its files are in the page cache.
    """

    init_info_cls = JoinInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.digest = ""
        self._group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self.shutdown()
        if init_info.plan:
            rank = init_info.first_rank + self.parallel_config.rank
            self._group = WeightGroup(GroupPlan(**init_info.plan), rank, self.device)

    def start_weight_update(self) -> None:
        self.digest = ""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        digest = Digest()
        factors: dict[str, Tensor] = {}
        handles = self._own_handles(update_info.handles)
        buckets = plan_buckets(from_wire(update_info.metas), update_info.bucket_bytes)
        for index, metas in enumerate(buckets):
            if handles is not None:
                buffer = open_buffer(handles[index], self.device)
            elif self._group is not None:
                buffer = empty_bucket(metas, self.device)
                self._group.broadcast(buffer)
            else:
                raise RuntimeError("no weight group: init_transfer_engine comes first")
            digest.update(buffer)
            if update_info.adapter is None:
                self.model.load_weights(read_bucket(buffer, metas))
            else:
                factors.update(read_bucket(buffer, metas))
        if update_info.adapter is not None:
            adapter = Adapter(**update_info.adapter)
            self.model.load_weights(merge(self._weights_of(adapter.base), factors, adapter.scale))
        self.digest = digest.value

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_head()

    def shutdown(self) -> None:
        self._group = None

    def _weights_of(self, model: str) -> Iterable[tuple[str, Tensor]]:
        """Iterate over the names and tensors in a model's files."""
        config = copy.copy(self.model_config)
        config.model = model
        loader = get_model_loader(replace(self.vllm_config.load_config, use_tqdm_on_load=False))
        return loader.get_all_weights(config, self.model)

    def _own_handles(self, handles: dict[str, list[str]] | None) -> list[str] | None:
        """Return the handles of the trainer rank on this worker's GPU; None if weights are broadcast."""
        if handles is None:
            return None
        uuid = gpu_uuid(self.device)
        if uuid not in handles:
            raise RuntimeError(f"no trainer rank shares GPU {uuid} with this engine; ranks are on {sorted(handles)}")
        return handles[uuid]

    def _repack_tied_head(self) -> None:
        # On CPU vLLM packs lm_head at load time and, when it is tied to the embedding, keeps the old packing after a
        # reload: the engine would keep answering with stale output weights.
        for name, head in self.model.named_modules():
            method: Any = getattr(head, "quant_method", None) if name.endswith("lm_head") else None
            if self.device.type == "cpu" and hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(head)


class WorkerExtension:
    """Methods added to every vLLM worker, called by name through ``collective_rpc``."""

    def receive_weights(self, update_info: dict[str, Any]) -> str:
        """Make one whole weight update; return the digest of the weights received."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights(update_info)
        worker.finish_weight_update()
        receiver: BucketReceiver = worker.weight_transfer_engine
        return receiver.digest


# vLLM refuses a second registration, and this module is imported by the engine's process and by its workers.
with contextlib.suppress(ValueError):
    WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)

# vLLM's progress bar while loading a model would otherwise create a multiprocessing semaphore, whose file remains when
# the engine is killed. No other process writes to that bar.
tqdm.set_lock(threading.RLock())
