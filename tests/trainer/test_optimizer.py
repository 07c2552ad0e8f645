"""The optimiser on shards equals torch's AdamW and clipping on whole parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rayrft.config.trainer import OptimizerConfig
from rayrft.trainer.optimizer import Optimizer
from tests.trainer.ranks import on_ranks

SHAPES = [(4, 3), (3, 2), (1, 5), (6,)]
"""Of two ranks, both hold as much, one holds more, or one holds nothing of the second and third shape."""

CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.1, clip_norm=2.0)


def _values(seed: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=drawn) for shape in SHAPES]


class _Model(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, plain: int) -> None:
        super().__init__()
        self.mesh, self.plain = mesh, plain
        self.weights = nn.ParameterList([nn.Parameter(each) for each in self.laid_out(_values(0))])

    def laid_out(self, values: list[Tensor]) -> list[Tensor]:
        """The last ``plain`` are not sharded."""
        if self.mesh is None:
            return values
        placements = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        sharded = len(values) - self.plain
        return [distribute_tensor(each, self.mesh, placements) for each in values[:sharded]] + values[sharded:]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _steps(replicas: int | None, plain: int) -> tuple[list[Tensor], list[float]]:
    """Weights and norms of four steps, of which the last two follow from the state dict of the first two."""
    mesh = None
    if replicas is not None:
        mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas)[replicas == 1 :])
    model, norms = _Model(mesh, plain), list[float]()
    optimizer = Optimizer(model.parameters(), CONFIG, steps=10)
    for step in range(4):
        if step == 2:
            state = get_optimizer_state_dict(model, optimizer.adam)
            sharded = [isinstance(each["exp_avg"], DTensor) for each in state["state"].values()]
            assert sharded.count(False) == (plain if mesh else len(SHAPES)), "checkpoints hold moments as shards"
            optimizer.reset()
            set_optimizer_state_dict(model, optimizer.adam, state)
        for weight, gradient in zip(model.weights, model.laid_out(_values(step + 1)), strict=True):
            weight.grad = gradient / 10**step
        norms.append(optimizer.clip())
        optimizer.step()
    return [_whole(each.detach()) for each in model.weights], norms


@pytest.mark.parametrize(
    ("ranks", "replicas", "plain"),
    [(1, None, 0), (2, 1, 0), (2, 1, 2), (2, 2, 0), (4, 2, 1)],
    ids=["plain tensors", "shards", "shards and plain tensors", "replicas", "replicas of shards"],
)
def test_steps_on_shards_equal_those_of_torch_on_whole_parameters(ranks: int, replicas: int | None, plain: int) -> None:
    weights = [nn.Parameter(each) for each in _values(0)]
    adam = torch.optim.AdamW(weights, lr=CONFIG.lr, betas=CONFIG.betas, weight_decay=CONFIG.weight_decay)
    norms = []
    for step in range(4):
        for weight, gradient in zip(weights, _values(step + 1), strict=True):
            weight.grad = gradient / 10**step
        norms.append(nn.utils.clip_grad_norm_(weights, CONFIG.clip_norm).item())
        adam.step()
    assert max(norms) > CONFIG.clip_norm > min(norms)
    found, told = on_ranks(ranks, _steps, replicas, plain)
    assert told == pytest.approx(norms)
    torch.testing.assert_close(found, [each.detach() for each in weights])
