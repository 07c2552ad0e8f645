"""Host time of an optimiser step over many sharded parameters: rayrft's beside torch's AdamW with its defaults.

The parameters are small, on a fake process group: what is measured is the dispatch, which a GPU would have to wait for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rayrft.config.trainer import OptimizerConfig
from rayrft.trainer.optimizer import Optimizer
from tests.bench.helpers import parse, race, spread

RANKS = 8


def main() -> None:
    options = parse(__doc__, parameters=(396, "as a model of 36 layers has"), rounds=15)
    torch.set_num_threads(1)  # threads that wait for each other would be counted
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    parameters = [
        nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])) for _ in range(options.parameters)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    config = OptimizerConfig()
    ours = Optimizer(parameters, config, steps=1000)
    default = torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)

    def step_ours() -> None:
        ours.clip()
        ours.adam.step()

    def step_default() -> None:
        float(nn.utils.clip_grad_norm_(parameters, config.clip_norm).full_tensor())
        default.step()

    times = race({"rayrft": step_ours, "defaults": step_default}, options.rounds, warm_up=1)
    ours_ms, default_ms = (1000 * times[name][:, 1] for name in ("rayrft", "defaults"))
    print(f"processor ms a step: rayrft {spread(ours_ms, '.1f')}, defaults {spread(default_ms, '.1f')}")
    print(f"ratio {spread(default_ms / ours_ms, '.1f')}")


if __name__ == "__main__":
    main()
