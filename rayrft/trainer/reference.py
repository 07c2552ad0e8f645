"""The reference: the policy as it was, for KL and preference losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rayrft.trainer.policy import Policy


class Reference:
    """A copy of the policy's weights (each rank's shards), which takes their place while it is asked.

    So there is one model, whatever its architecture and sharding; the exchange costs a copy of the shards.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept = [weight.clone() for weight in self._weights()]

    def refresh(self) -> None:
        """Take the present weights."""
        for kept, weight in zip(self._kept, self._weights(), strict=True):
            kept.copy_(weight)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy is the reference in here. Without gradients: its own weights come back as they were."""
        present = [weight.clone() for weight in self._weights()]
        self._put(self._kept)
        try:
            yield
        finally:
            self._put(present)

    def state(self) -> list[Tensor]:
        """The weights, for a checkpoint; what is copied into these tensors becomes the reference."""
        return self._kept

    def _put(self, values: list[Tensor]) -> None:
        for weight, value in zip(self._weights(), values, strict=True):
            weight.copy_(value)

    def _weights(self) -> list[Tensor]:
        with torch.no_grad():
            return [_local(parameter.detach()) for parameter in self._policy.parameters() if parameter.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
