"""What FSDP2 is trusted with: precision, layers that are computed again, clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayrft.algorithms import build
from rayrft.config.trainer import OptimizerConfig
from rayrft.trainer.learner import Learner
from rayrft.trainer.model import shard
from tests.trainer.ranks import on_ranks
from tests.trainer.test_learner import CPU, make_model
from tests.trainer.test_updates import own_rows, weights

ROW = [own_rows()[0].token_ids.tolist()]


def learner_in(compute: torch.dtype, master: torch.dtype, *, lr: float = 1e-6, recompute: bool = False) -> Learner:
    policy = make_model().to(master)
    if recompute:
        policy.checkpoint_layers()
    shard(policy, dist.device_mesh.init_device_mesh("cpu", (1,)), compute)
    learner = Learner(policy, micro_batch_tokens=60, temperature=1.0, device=CPU)
    learner.open_stage(build("grpo"), OptimizerConfig(lr=lr, clip_norm=0.01), 10)
    return learner


def gradient(learner: Learner) -> torch.Tensor:
    learner.gradient(own_rows())
    return gradient_of(learner)


def gradient_of(learner: Learner) -> torch.Tensor:
    grads = [parameter.grad for parameter in learner.policy.parameters()]
    return torch.cat([grad.full_tensor().flatten() for grad in grads if grad is not None])  # type: ignore[attr-defined]


def _measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    half, full = (learner_in(compute, torch.float32) for compute in (torch.bfloat16, torch.float32))
    found["scores"] = half.score(ROW), full.score(ROW)
    found["start"] = weights(half)
    found["gradient"] = gradient(half)
    found["norm"] = half.optimizer.clip()
    found["clipped"] = gradient_of(half)
    half.optimizer.step()
    found["end"] = weights(half)
    found["recomputed"] = [gradient(learner_in(torch.float32, torch.float64, recompute=each)) for each in (False, True)]
    return found


def test_in_half_precision_weights_and_sums_of_gradients_are_in_float32_and_gradients_are_clipped(
    tmp_path: Path,
) -> None:
    found = on_ranks(1, tmp_path, _measure)
    half, full = (torch.tensor(each) for each in found["scores"])
    assert 1e-4 < (half - full).abs().max() < 0.1, "the compute is not in bfloat16"

    start, end, grad = found["start"], found["end"], found["gradient"]
    assert start.dtype == grad.dtype == torch.float32
    assert not torch.equal(grad, grad.bfloat16().float()), "the micro-batches' gradients were summed in bfloat16"
    # A step of 1e-6 is less than bfloat16 tells from none.
    moved = start != end
    assert moved.float().mean() > 0.5 and (start.bfloat16() == end.bfloat16())[moved].float().mean() > 0.9

    assert found["norm"] > 0.02
    torch.testing.assert_close(found["clipped"], grad * 0.01 / found["norm"], rtol=1e-3, atol=0)

    torch.testing.assert_close(*found["recomputed"], rtol=1e-9, atol=1e-12)
    assert found["recomputed"][0].any()
