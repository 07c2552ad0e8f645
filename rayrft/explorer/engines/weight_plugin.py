"""vLLM's side of the weight transfer: a backend named ``rayrft``.

Importing this module registers the backend; vLLM's workers import it through ``worker_extension_cls``. It runs inside
the engine's worker process. This module and the engine are the only ones that import vLLM.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rayrft.weights.adapter import merge
from rayrft.weights.buckets import Digest
from rayrft.weights.channel import WeightChannel
from rayrft.weights.messages import Link

BACKEND = "rayrft"


@dataclass
class LinkInfo(WeightTransferInitInfo):
    """``link``: the fields of a `Link`. ``first`` is the index of the engine's first worker among the receivers."""

    link: dict[str, Any]
    first: int


@dataclass
class TransferInfo(WeightTransferUpdateInfo):
    """Which transfer of the link to receive; the sender announces its contents."""

    number: int


class BucketReceiver(WeightTransferEngine[LinkInfo, TransferInfo]):
    """Receives buckets, digests them, and loads them in checkpoint format through vLLM's layerwise reload.

    For an adapter only the factors are sent. The base weights stay mapped from the model's files: the kernel may drop
    their pages and read them again, so that they need no memory of their own.
    """

    init_info_cls = LinkInfo
    update_info_cls = TransferInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()
        self.digest = ""
        self._channel: WeightChannel | None = None
        self._base: tuple[Any, list[tuple[str, Tensor]]] | None = None
        """Files and tensors of the base weights of an adapter."""

    def init_transfer_engine(self, init_info: LinkInfo) -> None:
        self.shutdown()
        link, index = Link(**init_info.link), init_info.first + self.parallel_config.rank
        self._channel = WeightChannel(link, sends=False, index=index, device=self.device)

    def start_weight_update(self) -> None:
        self.digest = ""
        initialize_layerwise_reload(self.model)
        self._forget_packed_experts()

    def receive_weights(self, update_info: TransferInfo) -> None:
        if self._channel is None:
            raise RuntimeError("no link to the trainer: init_transfer_engine comes first")
        digest = Digest()
        try:
            parcel = self._channel.announced(update_info.number)
            tensors: Iterable[tuple[str, Tensor]] = self._channel.receive(parcel, digest)
            if parcel.adapter is not None:
                tensors = merge(self._weights_of(parcel.adapter.base), dict(tensors), parcel.adapter)
            self.model.load_weights(tensors)
        except Exception:
            self._abandon_update()
            raise
        self.digest = digest.value

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_head()

    def _abandon_update(self) -> None:
        """Put the old weights of the layers that were not received completely back, so that another update may follow;
        until then the model has weights of two versions."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = info.load_numel_total = 0
        self.finish_weight_update()

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _weights_of(self, model: str) -> Iterable[tuple[str, Tensor]]:
        """Return the names and tensors in a model's files, which are mapped once, until they are replaced."""
        found = [(file.name, file.stat()) for file in sorted(Path(model).glob("*.safetensors"))]
        files = model, [(name, status.st_ino, status.st_mtime_ns, status.st_size) for name, status in found]
        if self._base is None or self._base[0] != files:
            config = copy.copy(self.model_config)
            config.model = model
            loader = get_model_loader(replace(self.vllm_config.load_config, use_tqdm_on_load=False))
            self._base = files, list(loader.get_all_weights(config, self.model))
        return self._base[1]

    def _forget_packed_experts(self) -> None:
        # On CPU vLLM packs experts when it builds their kernel, and otherwise hands it weights that are not packed: the
        # engine would compute with other experts. Without a kernel, it builds one once the layer is loaded.
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _repack_tied_head(self) -> None:
        # On CPU vLLM packs lm_head at load time and, when it is tied to the embedding, keeps the old packing after a
        # reload: the engine would keep answering with stale output weights.
        for name, head in self.model.named_modules():
            method: Any = getattr(head, "quant_method", None) if name.endswith("lm_head") else None
            if self.device.type == "cpu" and hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(head)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, on Linux.

    Otherwise an engine's core whose actor is killed together with Ray's daemons would never end and
    would keep its memory.
    """
    if sys.platform == "linux":
        parent, set_parent_death_signal = os.getppid(), 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died meanwhile
            os.kill(os.getpid(), signal.SIGKILL)


class WorkerExtension:
    """Methods added to every vLLM worker, called by name through ``collective_rpc``."""

    def receive_weights(self, number: int) -> str:
        """Make one whole weight update from transfer ``number``; return the digest of the weights received."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({"number": number})
        worker.finish_weight_update()
        receiver: BucketReceiver = worker.weight_transfer_engine
        return receiver.digest


# vLLM refuses a second registration, and this module is imported by the engine's process and by its workers.
with contextlib.suppress(ValueError):
    WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)

# vLLM's progress bar while loading a model would otherwise create a multiprocessing semaphore, whose file remains when
# the engine is killed. No other process writes to that bar.
tqdm.set_lock(threading.RLock())
