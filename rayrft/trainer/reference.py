"""The reference policy: a frozen earlier state of the policy, for KL and preference losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from rayrft.trainer.policy import Policy


class Reference:
    """A copy of the policy's weights (this rank's shards), swapped in while the reference is evaluated.

    One model serves both, independent of architecture and sharding; a swap costs a copy of the shards. With an adapter
    nothing is copied: the reference is the model without it, which is the policy at the stage's start.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.weights = self._copied_weights() if policy.lora is None else {}
        """Reference weights by parameter; a checkpoint is loaded into these tensors in place."""

    def refresh(self) -> None:
        """Make the present policy the reference. Not available with an adapter, which has no copy."""
        assert self._policy.lora is None, "refused by the configuration"
        _copy_into(self.weights, self._copied_weights())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the policy compute as the reference. For use without gradients; its weights are restored afterwards."""
        if self._policy.lora is not None:
            with self._policy.lora.disabled():
                yield
            return
        present = self._copied_weights()
        parameters = dict(self._policy.named_parameters())
        _copy_into(parameters, self.weights)
        try:
            yield
        finally:
            _copy_into(parameters, present)

    def _copied_weights(self) -> dict[str, Tensor]:
        named = self._policy.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named if parameter.requires_grad}


@torch.no_grad()
def _copy_into(target: dict[str, Tensor] | dict[str, torch.nn.Parameter], source: dict[str, Tensor]) -> None:
    for name, value in source.items():
        target[name].copy_(value)
