"""The optimiser on shards equals torch's AdamW and clipping on whole parameters."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rayrft.config.trainer import AdamMoments, OptimizerConfig
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


WIDE = CONFIG.model_copy(update={"schedule": "linear"})


def _wide(moments: AdamMoments) -> tuple[Tensor, Optimizer]:
    """A sharded weight after four steps, of which the last two follow from the state dict of the first two."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), nn.Module()
    drawn = [torch.randn(512, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    model.weight = weight = nn.Parameter(distribute_tensor(drawn[0], mesh, [Shard(0)]))
    optimizer = Optimizer(model.parameters(), WIDE, steps=8, moments=moments)
    for step in range(4):
        if step == 2:
            state = get_optimizer_state_dict(model, optimizer.adam)
            optimizer.reset()
            set_optimizer_state_dict(model, optimizer.adam, state)
        weight.grad = distribute_tensor(drawn[step + 1], mesh, [Shard(0)])
        optimizer.step()
    return weight.detach().full_tensor(), optimizer


def _with_both() -> tuple[Tensor, Tensor, set[str]]:
    (plain, _), (found, optimizer) = _wide("float32"), _wide("8bit")
    moments = [state[name].to_local() for state in optimizer.adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return plain, found, {type(each).__name__ for each in moments}


def test_moments_of_8_bits_move_weights_as_those_of_32_do() -> None:
    pytest.importorskip("torchao", reason="an optional package, whose newest release is tried")
    plain, found, kinds = on_ranks(2, _with_both)
    assert kinds == {"OptimState8bit"}
    moved = (plain - torch.randn(512, 64, generator=torch.Generator().manual_seed(0))).abs().mean()
    assert 0 < (found - plain).abs().mean() < 0.05 * moved


def test_the_optimiser_of_torchao_gets_the_learning_rate_of_each_step_in_the_tensor_that_it_has_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = list[float]()

    class AdamW8bit(torch.optim.AdamW):
        def __init__(self, parameters: list[nn.Parameter], *, lr: float, **rest: Any) -> None:
            super().__init__(parameters, lr=torch.tensor(lr), **rest)
            self.lr = self.param_groups[0]["lr"]

        def step(self, closure: Any = None) -> Any:
            assert self.param_groups[0]["lr"] is self.lr, "another object would be compiled again"
            rates.append(float(self.lr))
            return super().step(closure)

    for name, module in {"torchao": ModuleType("torchao"), "torchao.optim": ModuleType("torchao.optim")}.items():
        module.AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    weight = nn.Parameter(torch.ones(2))
    optimizer = Optimizer([weight], WIDE, steps=4, moments="8bit")
    for _ in range(4):
        weight.grad = torch.ones(2)
        optimizer.step()
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
