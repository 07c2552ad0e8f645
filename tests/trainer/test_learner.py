"""Loss and gradient do not depend on how a batch is split: micro-batches, row order, padding, ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rayrft.config.trainer import OptimizerConfig, TrainerConfig
from rayrft.errors import RayrftError, RowsFailed
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.blame import device_failed, is_device_fault
from rayrft.trainer.learner import Learner
from rayrft.trainer.optimizer import Optimizer
from tests.errors import about
from tests.trainer.learners import gradient, labelled, make_learner, make_model, make_rows, move, pairs, weights
from tests.trainer.ranks import on_ranks

MIX = {"mu": 0.3, "normalise_advantages": True, "aggregation": "sequence_mean_token_mean", "entropy": "bonus"}
KINDS: dict[str, tuple[dict[str, Any], list[TrainRow]]] = {
    "mix": (MIX, make_rows()),
    "kto": ({"beta": 1.0, "undesirable_weight": 1.5}, labelled()),
    "dpo": ({}, pairs()),
    "reward_model": ({"center": 0.01}, [replace(row, margin=0.1 * n) for n, row in enumerate(pairs())]),
}


def learner_of(kind: str, tokens: int, *, pack: bool = True, sharded: bool = False) -> Learner:
    """A learner whose model has moved: a new one of a reward model has no gradient, and the KL of KTO is 0."""
    models = {"policy": make_model(pack=pack), "valued": make_model(pack=pack)}
    learner = make_learner(kind, KINDS[kind][0], tokens=tokens, temperature=0.7, sharded=sharded, **models)
    move(learner.trained, 0.05)
    return learner


def measure(learner: Learner, rows: list[TrainRow]) -> tuple[Tensor, Tensor]:
    found = gradient(learner, rows)
    assert learner.trained is learner.policy or all(each.grad is None for each in learner.policy.parameters())
    return found


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[Tensor, Tensor]]:
    return {kind: measure(learner_of(kind, 100_000), rows) for kind, (_, rows) in KINDS.items()}


def assert_alike(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert found[0][0] != 0 and found[1].abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "pack"), [(1, True), (40, True), (40, False), (90, True), (200, False)])
def test_split_order_packing_and_padding_change_nothing(
    reference: dict[str, tuple[Tensor, Tensor]], kind: str, tokens: int, pack: bool
) -> None:
    assert_alike(measure(learner_of(kind, tokens, pack=pack), KINDS[kind][1][::-1]), reference[kind])


def _on_rank(kind: str) -> tuple[Tensor, Tensor]:
    # An uneven deal, of pairs where there are any: one rank has most rows, and of four one has none.
    rows, rank, ranks = KINDS[kind][1], dist.get_rank(), dist.get_world_size()
    dealt = {1: [rows], 2: [rows[:2], rows[2:]], 4: [rows[:2], [], rows[2:4], rows[4:]]}
    return measure(learner_of(kind, 60, sharded=True), dealt[ranks][rank])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_number_of_ranks_changes_nothing(
    reference: dict[str, tuple[Tensor, Tensor]], kind: str, ranks: int
) -> None:
    assert_alike(on_ranks(ranks, _on_rank, kind), reference[kind])


def test_a_step_that_is_not_finite_stops_before_it_spoils_the_model() -> None:
    learner, row = make_learner("mix", MIX), make_rows()[1]
    before = weights(learner)
    with pytest.raises(RayrftError, check=about("trainer")):
        learner.step([[replace(row, advantages=row.advantages * np.float32(np.inf))]])
    assert torch.equal(before, weights(learner))


def test_a_step_lowers_the_loss_it_descends() -> None:
    learner = make_learner("mix", MIX, tokens=1000)
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
    optimizer = Optimizer([torch.nn.Parameter(torch.zeros(1))], config, 10)
    optimizer.updates = step
    assert optimizer.lr == pytest.approx(rate)


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
    learner, rows = make_learner("mix", MIX, tokens=30), named(short, 3, **changes)
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
    learner, rows = make_learner("mix", MIX, tokens=30), named(make_rows(), 0)

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
    learner, rows = make_learner("mix", MIX, tokens=30), named(make_rows(), 0)

    def raises_lost_peer(*_: Any, **__: Any) -> None:
        dist.get_rank(group="gone")  # type: ignore[arg-type]

    monkeypatch.setattr(learner.policy.model.model, "forward", raises_lost_peer)
    with pytest.raises(Exception, match="group") as raised:
        learner.step([rows])
    assert not isinstance(raised.value, RowsFailed)
