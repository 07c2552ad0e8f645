"""Loss and gradient do not depend on how a batch is split: micro-batches, row order, padding, ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rayrft.algorithms import build
from rayrft.config.trainer import OptimizerConfig, TrainerConfig
from rayrft.errors import RayrftError, RowsFailed
from rayrft.trainer.batches import TrainRow, micro_batches
from rayrft.trainer.blame import device_failed, is_device_fault
from rayrft.trainer.learner import Learner
from rayrft.trainer.model import shard
from rayrft.trainer.optimizer import learning_rate
from rayrft.trainer.policy import Policy
from tests.errors import about
from tests.trainer.ranks import on_ranks

CPU = torch.device("cpu")


def make_model(*, pack: bool = True) -> Policy:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    policy = Policy(Qwen3ForCausalLM(config).double())
    assert policy.enable_fast_paths(pack=pack) is None
    return policy


def make_rows(count: int = 12) -> list[TrainRow]:
    """Rows of very different lengths, a third of them expert rows."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(count):
        length = int(rng.integers(4, 24))
        mask = np.zeros(length, dtype=np.uint8)
        mask[int(rng.integers(1, length - 1)) :] = 1
        expert = index % 3 == 0
        rows.append(
            TrainRow(
                rng.integers(0, 50, length).astype(np.int32),
                mask,
                (mask * rng.normal(-4, 0.3, length)).astype(np.float32),
                (mask * (0.0 if expert else rng.normal())).astype(np.float32),
                expert,
                weight=1.0 + index % 2,
            )
        )
    return rows


def make_learner(model: Policy, micro_batch_tokens: int) -> Learner:
    learner = Learner(model, micro_batch_tokens=micro_batch_tokens, temperature=0.7, device=CPU)
    pieces = {"mu": 0.3, "normalise_advantages": True, "aggregation": "sequence_mean_token_mean", "entropy": "bonus"}
    learner.open_stage(build("mix", pieces), OptimizerConfig(), steps=10)
    return learner


def gradient(learner: Learner, rows: list[TrainRow]) -> tuple[float, torch.Tensor]:
    """Loss and whole gradient, summed over ranks."""
    parts, _ = learner.gradient(rows)
    gradients = []
    for parameter in learner.policy.parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        gradients.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten())
    return parts.loss.item(), torch.cat(gradients)


@pytest.fixture(scope="module")
def reference() -> tuple[float, torch.Tensor]:
    return gradient(make_learner(make_model(), 100_000), make_rows())


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 90, 200])
@pytest.mark.parametrize("pack", [True, False])
def test_micro_batch_split_packing_and_padding_change_nothing(
    reference: tuple[float, torch.Tensor], micro_batch_tokens: int, pack: bool
) -> None:
    loss, grad = gradient(make_learner(make_model(pack=pack), micro_batch_tokens), make_rows())
    assert loss == pytest.approx(reference[0], abs=1e-6)
    torch.testing.assert_close(grad, reference[1], atol=1e-6, rtol=0)


def test_row_order_changes_nothing(reference: tuple[float, torch.Tensor]) -> None:
    loss, grad = gradient(make_learner(make_model(), 60), make_rows()[::-1])
    assert loss == pytest.approx(reference[0], abs=1e-6)
    torch.testing.assert_close(grad, reference[1], atol=1e-6, rtol=0)


def _on_rank() -> tuple[float, torch.Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    learner = make_learner(shard(make_model(), mesh, torch.float32), 60)
    # An uneven deal: the last rank has most rows, hence more micro-batches than the others; a rank may have none.
    rows = make_rows()
    share = rows[2 * (world_size - 1) :] if rank == world_size - 1 else rows[2 * rank : 2 * rank + 2] if rank else []
    share = share + (rows[:2] if rank == world_size - 1 and world_size > 1 else [])
    return gradient(learner, share)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_number_of_fsdp_ranks_changes_nothing(
    reference: tuple[float, torch.Tensor], world_size: int, tmp_path: Path
) -> None:
    loss, grad = on_ranks(world_size, tmp_path, _on_rank)
    assert loss == pytest.approx(reference[0], abs=1e-6)
    torch.testing.assert_close(grad, reference[1], atol=1e-6, rtol=0)


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    rows = make_rows()
    batches = micro_batches(rows, 60, CPU)
    assert sum(len(batch.lengths) for batch in batches) == len(rows)
    assert all(len(batch.token_ids) == sum(batch.lengths) <= 60 for batch in batches)
    assert sum(int(batch.tokens.mask.sum()) for batch in batches) == sum(int(row.mask.sum()) for row in rows)


def test_a_step_that_is_not_finite_stops_before_it_spoils_the_model() -> None:
    learner = make_learner(make_model(), 1000)
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    row = make_rows()[1]
    poisoned = TrainRow(row.token_ids, row.mask, row.logprobs, row.advantages * np.float32(np.inf), False)
    with pytest.raises(RayrftError, check=about("trainer")):
        learner.step([[poisoned]])
    for old, parameter in zip(before, learner.policy.parameters(), strict=True):
        assert torch.equal(old, parameter)


def test_a_step_lowers_the_loss_it_descends() -> None:
    learner = make_learner(make_model(), 1000)
    rows = make_rows()
    first = learner.step([rows])
    for _ in range(5):
        last = learner.step([rows])
    assert last.metrics.loss < first.metrics.loss
    assert first.metrics.policy_tokens == sum(int(r.mask.sum()) for r in rows if not r.expert)
    assert first.metrics.expert_tokens == sum(int(r.mask.sum()) for r in rows if r.expert)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [("constant", 9, 1.0), ("linear", 2, 1.0), ("linear", 6, 0.5), ("cosine", 6, 0.5), ("linear", 0, 0.5)],
)
def test_learning_rate_warms_up_then_follows_its_schedule(schedule: str, step: int, rate: float) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2)  # type: ignore[arg-type]
    assert learning_rate(config, step, 10) == pytest.approx(rate)


@pytest.mark.parametrize(("update", "rate"), [(0, 1 / 16), (8, 9 / 16), (15, 1.0), (16, 1.0), (24, 0.5)])
def test_steps_of_a_schedule_are_steps_whatever_the_updates_in_each(update: int, rate: float) -> None:
    # Two epochs of four mini-batches are 8 updates a step: 2 steps of warm-up, then 2 of decay.
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2)
    assert learning_rate(config, update, 4, updates_per_step=8) == pytest.approx(rate)


def named(rows: list[TrainRow], place: int, **changes: Any) -> list[TrainRow]:
    """Rows with ids, one of which is changed."""
    rows = [replace(row, experience=str(number)) for number, row in enumerate(rows)]
    return [*rows[:place], replace(rows[place], **changes), *rows[place + 1 :]]


@pytest.mark.parametrize("changes", [{"token_ids": np.full(9, 50, np.int32)}, {"images": ("no-such.png",)}])
def test_what_a_step_fails_on_is_named_by_its_rows(changes: dict[str, Any]) -> None:
    short = [
        TrainRow(*(array[-9:] for array in (row.token_ids, row.mask, row.logprobs, row.advantages)), row.expert)
        for row in make_rows(40)
        if len(row.token_ids) >= 9
    ]
    learner, rows = make_learner(make_model(), 30), named(short, 3, **changes)
    with pytest.raises(RowsFailed) as raised:
        learner.step([rows])
    assert "3" in raised.value.value and len(raised.value.value) == 3 and raised.value.field == "trainer rank 0"
    with pytest.raises(RowsFailed) as raised:
        learner.step([named(rows, 3, alone=True)])
    assert raised.value.value == ["3"]
    learner.step([rows[:3] + rows[4:]])  # it goes on without


ASSERTED = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "micro_batch_tokens"),
        (MemoryError(), "gradient_checkpointing"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), "ranks"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "nvidia-smi"),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), "nvidia-smi"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "nvidia-smi"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "nvidia-smi"),
        (torch.AcceleratorError(ASSERTED), None),
        (RuntimeError("the size of tensor a must match"), None),
    ],
)
def test_no_row_is_blamed_for_a_device(fault: Exception, remedy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, rows = make_learner(make_model(), 30), named(make_rows(), 0)

    def fails(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(learner.policy.model.model, "forward", fails)
    with pytest.raises(type(fault) if remedy else RowsFailed) as raised:
        learner.step([rows])
    failed = device_failed(raised.value, 3, "node-1, GPU-7", TrainerConfig(ranks=4))
    assert (failed is None) == (remedy is None)
    if failed is not None:
        assert (failed.field, failed.value) == ("trainer rank 3", "node-1, GPU-7") and str(remedy) in failed.remedy


def test_an_assertion_that_cublas_reports_is_the_fault_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise torch.AcceleratorError(ASSERTED)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not is_device_fault(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"))


def test_no_row_is_blamed_for_a_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, rows = make_learner(make_model(), 30), named(make_rows(), 0)

    def raises_lost_peer(*_: Any, **__: Any) -> None:
        dist.get_rank(group="gone")  # type: ignore[arg-type]

    monkeypatch.setattr(learner.policy.model.model, "forward", raises_lost_peer)
    with pytest.raises(Exception, match="group") as raised:
        learner.step([rows])
    assert not isinstance(raised.value, RowsFailed)
