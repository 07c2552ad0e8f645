"""Attribution of a failed step to the rows of the micro-batch that was being computed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from traceback import walk_tb
from types import TracebackType

import torch
import torch.distributed as dist

from rayrft.config.trainer import TrainerConfig
from rayrft.errors import DeviceFailed, ModelError, OutOfMemory, RowsFailed, first_line
from rayrft.trainer.batches import MicroBatch

_IDLE: tuple[str, ...] = ("states", "models", "gathered")
_UPDATE: tuple[str, ...] = ("states", "models", "gradients")
_PASS = (*_UPDATE, "gathered", "head", "activations")
"""The parts of `RankMemory` that are held between steps, in an optimiser's step, and in passes over a batch."""

_PHASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "rayrft.trainer.loading": ("loading a model", _IDLE),
    "rayrft.trainer.policy": ("the forward pass", _PASS),
    "rayrft.trainer.value_model": ("the forward pass", _PASS),
    "rayrft.trainer.head": ("the head", _PASS),
    "rayrft.algorithms": ("the loss", _PASS),
    "rayrft.trainer.optimizer": ("the optimiser's step", _UPDATE),
    "rayrft.trainer.model": ("gathering weights for the engines or an export", _IDLE),
    "rayrft.weights": ("sending weights", _IDLE),
    "rayrft.trainer.dcp": ("a checkpoint's copy", _IDLE),
    "torch.autograd": ("the backward pass", _PASS),
    "torch.distributed.fsdp": ("gathering weights or reducing gradients", _PASS),
}
"""What is done in a module, or in those below a package, and the parts of memory that are held meanwhile."""


@contextlib.contextmanager
def blaming(batch: MicroBatch) -> Iterator[None]:
    """Turn any error raised inside into RowsFailed, which names the rows of ``batch``.

    Device faults and failures of a peer rank pass unchanged: no row causes them. CUDA reports an index out of range
    asynchronously, so it may be attributed to later rows.
    """
    try:
        yield
    except RowsFailed:
        raise
    except Exception as error:  # a model, a loss or an image reader may raise anything
        if any(kind.__module__ == "torch._dynamo.exc" for kind in type(error).__mro__):  # whose import takes seconds
            problem = f"the layers of the model cannot be compiled: {type(error).__name__}: {first_line(error)}"
            remedy = "set it to off, or install a C compiler if that is what is missing (rayrft doctor)"
            raise ModelError(problem, remedy, field="trainer.compile") from error
        if not batch.experiences or is_device_fault(error) or _is_peer_failure(error.__traceback__):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        names = ", ".join(batch.experiences[:4]) + (", …" if len(batch.experiences) > 4 else "")
        raise RowsFailed(
            f"training failed on {'row' if len(batch.experiences) == 1 else 'one of the rows'} {names}: "
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "resume the run: the step is retried with every one of these rows in a micro-batch of its own; a "
            "row that fails twice is dropped with its group and counted as failed_twice",
            field=f"trainer rank {rank}",
            value=list(batch.experiences),
        ) from error


def is_device_fault(error: BaseException) -> bool:
    """Return whether a device failed or memory ran out. An assertion in device code is a row's fault, such as a token
    outside the vocabulary; a later call may report it, even one of cuBLAS."""
    if _is_out_of_memory(error):
        return True
    if isinstance(error, torch.AcceleratorError) or re.search("CUDA error|CU(?:BLAS|DNN)_STATUS_", str(error)):
        return "device-side assert" not in f"{error} {_pending()}"
    return False


def device_failed(
    error: BaseException,
    rank: int,
    where: str,
    config: TrainerConfig,
    savings: Callable[[Collection[str]], list[tuple[str, float]]] = lambda parts: [],
) -> DeviceFailed | None:
    """Return the typed error of a device fault on a rank; None for other errors. ``where`` is node and device, and
    ``savings`` returns changes of the config with the bytes of these parts of `RankMemory` that they save."""
    if not is_device_fault(error):
        return None
    problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if not _is_out_of_memory(error):
        remedy = "check the device (nvidia-smi; Xid lines in dmesg), then resume the run, if need be on another node"
        return DeviceFailed(f"the device failed: {problem}", remedy, field=f"trainer rank {rank}", value=where)
    phase, parts, bucket = _phase(error)
    problem = f"out of memory in {phase}: {problem}{_memory()}"
    tokens = f"lower trainer.micro_batch_tokens ({config.micro_batch_tokens}): half as many take half the activations"
    layers = "set trainer.gradient_checkpointing: true, which keeps one state a layer"
    buckets = [f"lower weight_sync.bucket_mib ({bucket / 2**20:g}): a rank holds two buckets"] if bucket else []
    remedies = [f"{text} ({saved / 2**30:.1f} GiB less)" for text, saved in savings(parts)] or [
        *[tokens] * ("activations" in parts),
        *[layers] * ("activations" in parts and not config.gradient_checkpointing),
        f"raise trainer.ranks ({config.ranks}), which share weights and moments",
    ]
    remedy = f"{'; '.join(buckets + remedies)}; then resume the run"
    return OutOfMemory(problem, remedy, field=f"trainer rank {rank}", value=where)


def _phase(error: BaseException) -> tuple[str, Collection[str], int]:
    """Return the phase in which an error was raised, by the innermost frame that belongs to one, with its tokens; the
    parts of memory that it holds; and the bytes of a bucket while weights are sent, else 0."""
    bucket, tokens, found = 0, 0, ("a call", _PASS)
    for frame, _ in walk_tb(error.__traceback__):
        module, batch = frame.f_globals.get("__name__", ""), frame.f_locals.get("batch")
        found = next((each for name, each in _PHASES.items() if module.startswith(name)), found)
        tokens = batch.token_ids.numel() if isinstance(batch, MicroBatch) else tokens
        bucket = frame.f_locals.get("bucket_bytes", bucket)
    doing, parts = found
    return f"{doing} of {tokens:,} tokens" if tokens else doing, parts, bucket


def _memory() -> str:
    """Return the use of this process' GPU, if it has one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    gib = 2**30
    _, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated() / gib, torch.cuda.memory_reserved() / gib
    return f" ({allocated:.1f} GiB allocated and {reserved:.1f} GiB reserved of {total / gib:.1f} GiB)"


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # PyTorch's allocator for the CPU; CUDA, of pinned memory and contexts; NCCL.
    said = r"DefaultCPUAllocator|CUDA error: out of memory|Cuda failure \d+ 'out of memory'"
    return re.search(said, str(error)) is not None


def _pending() -> str:
    """Return the error that CUDA still has to report, if any."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def _is_peer_failure(traceback: TracebackType | None) -> bool:
    """Return whether the error was raised by communication between ranks."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(traceback)]
    return bool(modules) and modules[-1].startswith("torch.distributed")
