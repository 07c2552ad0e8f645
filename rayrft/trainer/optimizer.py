"""AdamW and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from rayrft.config.trainer import OptimizerConfig


class Optimizer:
    """AdamW over the ``steps`` of a stage. ``updates`` counts the updates made, which determines the learning rate."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, steps: int, updates_per_step: int = 1
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.config = config
        self.steps = steps
        self._updates_per_step = updates_per_step
        self.updates = 0
        self.reset()

    def reset(self) -> None:
        """Discard the moments; the learning-rate schedule continues."""
        config = self.config
        # Fused: otherwise the host dispatches a dozen operations for each sharded parameter.
        self.adam = torch.optim.AdamW(
            self._parameters, lr=self.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next update: linear warm-up, then constant or decayed to 0."""
        config, each = self.config, self._updates_per_step
        warmup = config.warmup_steps * each
        if self.updates < warmup:
            return config.lr * (self.updates + 1) / warmup
        done = (self.updates - warmup) / max(1, self.steps * each - warmup)
        if config.schedule == "linear":
            return config.lr * (1 - done)
        if config.schedule == "cosine":
            return config.lr * 0.5 * (1 + math.cos(math.pi * done))
        return config.lr

    def clip(self) -> float:
        """Clip the gradient norm; return the norm before clipping. A collective."""
        norm = nn.utils.clip_grad_norm_(self._parameters, self.config.clip_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self) -> None:
        """Apply the accumulated gradient and zero it."""
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        self.adam.step()
        self.adam.zero_grad()
        self.updates += 1
