"""What FSDP2 is trusted with: precision, layers that are computed again, clipping."""

from __future__ import annotations

from typing import Any

import torch

from rayrft.config.trainer import OptimizerConfig
from rayrft.trainer.learner import Learner
from tests.trainer.learners import gradient, gradient_of, make_learner, make_model, own_rows, weights
from tests.trainer.ranks import on_ranks

ROW = [own_rows()[0].token_ids.tolist()]


def learner_in(compute: torch.dtype, master: torch.dtype, *, recompute: bool = False) -> Learner:
    policy = make_model().to(master)
    if recompute:
        policy.checkpoint_layers()
    optimizer = OptimizerConfig(lr=1e-6, clip_norm=0.01)
    return make_learner("grpo", policy=policy, optimizer=optimizer, sharded=True, compute=compute)


def _measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    half, full = (learner_in(compute, torch.float32) for compute in (torch.bfloat16, torch.float32))
    found["scores"] = half.score(ROW), full.score(ROW)
    found["start"] = weights(half)
    found["gradient"] = gradient(half, own_rows())[1]
    found["norm"] = half.optimizer.clip()
    found["clipped"] = gradient_of(half)
    half.optimizer.step()
    found["end"] = weights(half)
    again = [learner_in(torch.float32, torch.float64, recompute=each) for each in (False, True)]
    found["recomputed"] = [gradient(each, own_rows())[1] for each in again]
    return found


def test_in_half_precision_weights_and_sums_of_gradients_are_in_float32_and_gradients_are_clipped() -> None:
    found = on_ranks(1, _measure)
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
