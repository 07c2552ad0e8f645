"""The reference: the policy as it was, for KL and preference losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from rayrft.trainer.policy import Policy


class Reference:
    """A copy of the policy's weights (each rank's shards), which takes their place while it is asked.

    So there is one model, whatever its architecture and sharding; the exchange costs a copy of the shards. Of a policy
    with an adapter nothing is copied: the reference is the model without it, the policy as the stage began.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.weights = self._present() if policy.lora is None else {}
        """By parameter; what is copied into these tensors becomes the reference."""

    def refresh(self) -> None:
        """Take the present weights; not those of an adapter, without which the reference is what it is."""
        assert self._policy.lora is None, "refused by the configuration"
        _copy(self._present(), self.weights)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy is the reference in here. Without gradients: its own weights come back as they were."""
        if self._policy.lora is not None:
            with self._policy.lora.off():
                yield
            return
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
