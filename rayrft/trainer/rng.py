"""The state of torch's random number generators on a rank, for stochastic parts of an algorithm."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class RngState:
    """torch's generators of the CPU and the rank's GPU, seeded differently on every rank."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._rank = rank
        self.name = f"{rank} of {ranks}"
        """Key of this rank's state; not restorable under another world size."""

    def reseed(self, step: int) -> None:
        """Seed the generators from the run's seed, the step of the stage and the rank."""
        [number] = np.random.SeedSequence([self._seed, step, self._rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(number))  # of all devices

    def state(self) -> dict[str, Tensor]:
        """Return the generators' states (uint8) by device."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def restore(self, states: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        torch.set_rng_state(states["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._device)
