"""Whose fault it is that a step fails: the rows of the micro-batch that was computed."""

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
    """Around what is computed of a micro-batch. Raises RowsFailed, which names its rows, for whatever is raised in it;
    but for memory that is short, and for a peer that is gone, which no row is to blame for.

    On a GPU an index that is out of range comes up later than where it was used, and may be laid on other rows.
    """
    try:
        yield
    except (RowsFailed, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model, a loss or an image reader may raise anything
        if not batch.experiences or _is_of_a_peer(error.__traceback__):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        names = ", ".join(batch.experiences[:4]) + (", …" if len(batch.experiences) > 4 else "")
        raise RowsFailed(
            f"training failed on {'row' if len(batch.experiences) == 1 else 'one of the rows'} {names}: "
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            field=f"trainer rank {rank}",
            value=list(batch.experiences),
            remedy="resume the run: the step is tried again with each of these rows by itself, and a row on which it "
            "fails twice is left out, with its group, and counted as failed_twice",
        ) from error


def _is_of_a_peer(traceback: TracebackType | None) -> bool:
    """Whether it was raised by what ranks say to each other."""
    name = ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return name.startswith("torch.distributed")
