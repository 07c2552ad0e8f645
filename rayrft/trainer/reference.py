"""The reference: the policy as it was, for KL and preference losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from rayrft.trainer.policy import Policy


class Reference:
    """A copy of the policy's weights (each rank's shards), which takes their place while it is asked.

    So there is one model, whatever its architecture and sharding; the exchange costs a copy of the shards.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.weights = self._present()
        """By parameter; what is copied into these tensors becomes the reference."""

    def refresh(self) -> None:
        """Take the present weights."""
        _copy(self._present(), self.weights)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy is the reference in here. Without gradients: its own weights come back as they were."""
        present = self._present()
        parameters = dict(self._policy.named_parameters())
        _copy(self.weights, parameters)
        try:
            yield
        finally:
            _copy(present, parameters)

    def _present(self) -> dict[str, Tensor]:
        named = self._policy.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named if parameter.requires_grad}


@torch.no_grad()
def _copy(values: dict[str, Tensor], into: dict[str, Tensor] | dict[str, torch.nn.Parameter]) -> None:
    for name, value in values.items():
        into[name].copy_(value)
