"""The benches' learner is built as a rank builds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayrft.trainer import packing
from rayrft.trainer.policy import Policy
from tests.bench.gpu import SHAPES
from tests.bench.workload import make_learner


def test_a_kernel_that_fails_in_the_benchs_precision_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_kernel(*_: Any) -> None:
        raise TypeError("no such kernel")

    monkeypatch.setattr(packing, "uses_kernel", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(packing, "_kernel", no_kernel)
    policy = Policy(SHAPES["tiny"].model())
    with pytest.raises(RuntimeError, match="no such kernel"):
        make_learner(policy, "grpo", micro_batch_tokens=64, device=torch.device("cpu"), compute=torch.bfloat16)
