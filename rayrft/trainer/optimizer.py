"""AdamW and its learning rate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from rayrft.config.trainer import AdamMoments, OptimizerConfig


class _LocalAdamW(torch.optim.AdamW):
    """AdamW on the shards of a rank, so that the host dispatches no sharded tensors. Its state is sharded."""

    def _init_group(self, group: dict[str, object], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return has_complex


class Optimizer:
    """AdamW over the ``steps`` of a stage. ``updates`` counts the updates made, which determines the learning rate."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimizerConfig,
        steps: int,
        updates_per_step: int = 1,
        moments: AdamMoments = "float32",
    ) -> None:
        self.moments = moments
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.config = config
        self.steps = steps
        self._updates_per_step = updates_per_step
        self.updates = 0
        self.reset()

    def reset(self) -> None:
        """Discard the moments; the learning-rate schedule continues."""
        config = self.config
        make: Callable[..., torch.optim.Optimizer] = partial(_LocalAdamW, fused=True)
        if self.moments == "8bit":
            from torchao.optim import AdamW8bit

            make = AdamW8bit
        self.adam = make(self._parameters, lr=self.lr, betas=config.betas, weight_decay=config.weight_decay)

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

    @torch.no_grad()
    def clip(self) -> float:
        """Clip the gradient norm; return the norm before clipping. A collective."""
        shards: dict[tuple[DeviceMesh | None, tuple[Placement, ...]], list[Tensor]] = defaultdict(list)
        for gradient in (each.grad for each in self._parameters if each.grad is not None):
            if isinstance(gradient, DTensor):
                shards[gradient.device_mesh, gradient.placements].append(gradient.to_local())
            else:
                shards[None, ()].append(gradient)
        norm = nn.utils.get_total_norm([_norm(tensors, *layout) for layout, tensors in shards.items()])
        if tensors := [each for tensors in shards.values() for each in tensors]:
            torch._foreach_mul_(tensors, (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def step(self) -> None:
        """Apply the accumulated gradient and zero it."""
        for group in self.adam.param_groups:
            # That of torchao is a tensor, so that its compiled step stays valid.
            group["lr"] = group["lr"].fill_(self.lr) if isinstance(group["lr"], Tensor) else self.lr
        self.adam.step()
        self.adam.zero_grad()
        self.updates += 1


def _norm(shards: list[Tensor], mesh: DeviceMesh | None, placements: tuple[Placement, ...]) -> Tensor:
    """Return the norm of tensors of which this rank has ``shards``. A collective."""
    norm = nn.utils.get_total_norm(shards)
    if mesh is None:
        return norm
    squared = norm.square()
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            dist.all_reduce(squared, group=mesh.get_group(dimension))
    return squared.sqrt()
