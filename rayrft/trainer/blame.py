"""Attribution of a failed step to the rows of the micro-batch that was being computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch
import torch.distributed as dist

from rayrft.errors import RowsFailed
from rayrft.trainer.batches import MicroBatch


@contextlib.contextmanager
def blaming(batch: MicroBatch) -> Iterator[None]:
    """Turn any error raised inside into RowsFailed, which names the rows of ``batch``.

    Out-of-memory errors and failures of a peer rank pass unchanged: no row causes them. CUDA reports an index out of
    range asynchronously, so it may be attributed to later rows.
    """
    try:
        yield
    except (RowsFailed, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model, a loss or an image reader may raise anything
        if not batch.experiences or _is_peer_failure(error.__traceback__):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        names = ", ".join(batch.experiences[:4]) + (", …" if len(batch.experiences) > 4 else "")
        raise RowsFailed(
            f"training failed on {'row' if len(batch.experiences) == 1 else 'one of the rows'} {names}: "
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            field=f"trainer rank {rank}",
            value=list(batch.experiences),
            remedy="resume the run: the step is retried with every one of these rows in a micro-batch of its own; a "
            "row that fails twice is dropped with its group and counted as failed_twice",
        ) from error


def _is_peer_failure(traceback: TracebackType | None) -> bool:
    """Return whether the error was raised by communication between ranks."""
    name = ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return name.startswith("torch.distributed")
