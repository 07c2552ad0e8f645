"""CUDA IPC: trainer rank and engine on one GPU, where no collective can run (nccl refuses two ranks on a device)."""

from __future__ import annotations

import base64
import pickle

import torch
from torch import Tensor


def gpu_uuid(device: torch.device) -> str:
    """What a GPU is called in every process, however each numbers the devices it sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_buffer(buffer: Tensor) -> str:
    """A handle to a CUDA buffer, as text. The buffer must stay alive until the receiver is done with it."""
    from torch.multiprocessing.reductions import reduce_tensor

    handle = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    return base64.b64encode(pickle.dumps(handle)).decode()


def open_buffer(handle: str, device: torch.device) -> Tensor:
    """The exported buffer, mapped into this process: the same memory, no copy."""
    rebuild, arguments = pickle.loads(base64.b64decode(handle))
    # Argument 6 is the exporter's device index; each process numbers its visible devices by itself.
    tensor: Tensor = rebuild(*arguments[:6], device.index or 0, *arguments[7:])
    return tensor
