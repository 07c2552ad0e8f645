"""CUDA IPC for a trainer rank and an engine on one GPU, where NCCL does not support two ranks."""

from __future__ import annotations

import base64
import pickle

import torch
from torch import Tensor


def gpu_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, which is the same in all processes; device indices are not."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_buffer(buffer: Tensor) -> str:
    """Return a handle to a CUDA buffer, as text. The buffer must stay alive until the receiver is done with it."""
    from torch.multiprocessing.reductions import reduce_tensor

    handle = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    return base64.b64encode(pickle.dumps(handle)).decode()


def open_buffer(handle: str, device: torch.device) -> Tensor:
    """Map an exported buffer into this process: the same memory, no copy."""
    rebuild, arguments = pickle.loads(base64.b64decode(handle))
    # Argument 6 is the exporter's device index, which differs between processes.
    tensor: Tensor = rebuild(*arguments[:6], device.index or 0, *arguments[7:])
    return tensor
