"""A plugin: the loss of imitation, for whose micro-batches a rank soon has memory for 40 tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

from rayrft.algorithms import sft_losses
from rayrft.algorithms.batch import TokenBatch

_calls: list[int] = []


@sft_losses.register("crowded")
def crowded(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    _calls.append(len(logprobs))
    if len(logprobs) > 40 and len(_calls) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return -logprobs
