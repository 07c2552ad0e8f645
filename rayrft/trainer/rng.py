"""A rank's random numbers, for pieces of an algorithm that draw some: those of torch's own generators."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class Chance:
    """torch's generators, of the CPU and of the rank's GPU, each rank's with numbers of its own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._rank = rank
        self.name = f"{rank} of {ranks}"
        """Whose the state is: on another number of ranks it is nobody's."""

    def begin(self, step: int) -> None:
        """Draw from now on what follows from seed, step of the stage and rank."""
        [number] = np.random.SeedSequence([self._seed, step, self._rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(number))  # of all devices

    def state(self) -> dict[str, Tensor]:
        """By device, where the generators stand; uint8."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def restore(self, states: dict[str, Tensor]) -> None:
        """Go on from where `state` was taken."""
        torch.set_rng_state(states["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._device)
