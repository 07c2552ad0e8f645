"""Loss and gradient: on any split of a batch into micro-batches and ranks, of every term, and in half precision."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rayrft.config.stage import UpdateConfig
from rayrft.config.trainer import OptimizerConfig, TrainerConfig
from rayrft.errors import ModelError, NotFinite, OutOfMemory, RowsFailed
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.blame import device_failed, is_device_fault
from rayrft.trainer.learner import Learner
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy
from tests.errors import about
from tests.trainer.families import FAMILIES
from tests.trainer.learners import (
    gradient,
    gradient_of,
    labelled,
    make_learner,
    make_model,
    make_rows,
    make_teacher,
    move,
    own_rows,
    pairs,
    weights,
)
from tests.trainer.ranks import on_ranks

MIX = {"mu": 0.3, "normalise_advantages": True, "aggregation": "sequence_mean_token_mean", "entropy": "bonus"}
ADAPTS = MIX | {"kl": "k3", "kl_coef": 0.1, "kl_target": 0.01}
Measured = tuple[Tensor, Tensor]
Reference = dict[str, Measured]
KINDS: dict[str, tuple[dict[str, Any], list[TrainRow]]] = {
    "mix": (MIX, make_rows()),
    "kto": ({"beta": 1.0, "undesirable_weight": 1.5}, labelled()),
    "dpo": ({}, pairs()),
    "reward_model": ({"center": 0.01}, [replace(row, margin=0.1 * n) for n, row in enumerate(pairs())]),
}


def learner_of(
    kind: str, tokens: int, *, pack: bool = True, prepare: Callable[[Policy], None] = lambda policy: None, **how: Any
) -> Learner:
    """A learner whose model has moved: a new one of a reward model has no gradient, and the KL of KTO is 0."""
    models = {"policy": make_model(pack=pack), "valued": make_model(pack=pack)}
    prepare(models["policy"])
    learner = make_learner(kind, KINDS[kind][0], tokens=tokens, temperature=0.7, **how, **models)
    move(learner.trained, 0.05)
    return learner


def measure(learner: Learner, rows: list[TrainRow]) -> Measured:
    found = gradient(learner, rows)
    assert learner.trained is learner.policy or all(each.grad is None for each in learner.policy.parameters())
    return found


@pytest.fixture(scope="module")
def reference() -> Reference:
    return {kind: measure(learner_of(kind, 100_000), rows) for kind, (_, rows) in KINDS.items()}


def assert_alike(found: Measured, expected: Measured) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert found[0][0] != 0 and found[1].abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "pack"), [(1, True), (40, True), (40, False), (200, False)])
def test_split_order_and_padding_change_nothing(reference: Reference, kind: str, tokens: int, pack: bool) -> None:
    assert_alike(measure(learner_of(kind, tokens, pack=pack), KINDS[kind][1][::-1]), reference[kind])


def _on_rank(kind: str, accumulate: Any, replicas: int) -> Measured:
    # An uneven deal, of pairs where there are any: one rank has most rows, and of four one has none.
    rows, ranks = KINDS[kind][1], dist.get_world_size()
    dealt = [rows] if ranks == 1 else [rows[:2], [], rows[2:4], rows[4:]]
    own = dealt[dist.get_rank()]
    learner = learner_of(kind, 60, sharded=True, replicas=replicas)
    learner.config = learner.config.model_copy(update={"accumulate": accumulate})
    with counted_reductions() as reductions:
        found = measure(learner, own)
    batches = len(learner.make_micro_batches([own])[0])
    each = batches if accumulate == "sharded" else 1
    assert ranks == 1 or (batches > 1 and set(reductions.values()) == {each}), "of every unit of the model"
    return found


@contextlib.contextmanager
def counted_reductions() -> Iterator[Counter[int]]:
    """The number of times that the gradients of each unit of FSDP are reduced inside."""
    counts, reduce = Counter[int](), _fsdp_param_group.foreach_reduce

    def counting(parameters: Any, *given: Any, **how: Any) -> Any:
        counts[id(parameters[0])] += 1
        return reduce(parameters, *given, **how)

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", counting):
        yield counts


@pytest.mark.parametrize("accumulate", ["sharded", "unsharded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (4, 1), (4, 2)])
def test_the_number_of_ranks_and_of_replicas_changes_nothing(
    reference: Reference, kind: str, ranks: int, replicas: int, accumulate: str
) -> None:
    assert_alike(on_ranks(ranks, _on_rank, kind, accumulate, replicas), reference[kind])


def _compiled(kind: str) -> Measured:
    import torch._dynamo

    learner = learner_of(kind, 60, sharded=True, prepare=Policy.compile_layers)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return measure(learner, KINDS[kind][1])


@pytest.mark.slow  # the C compiler takes minutes
def test_compiled_layers_change_nothing_and_are_compiled_once_for_micro_batches_of_any_size(
    reference: Reference,
) -> None:
    assert_alike(on_ranks(1, _compiled, "mix"), reference["mix"])


def test_no_row_is_blamed_for_a_layer_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    fault = InternalTorchDynamoError("no C compiler was found")
    monkeypatch.setattr("rayrft.trainer.policy.run_model", mock.Mock(side_effect=fault))
    with pytest.raises(ModelError, check=about("trainer.compile")) as error:
        make_learner("grpo").step([[replace(row, experience="row") for row in own_rows()]])
    assert "no C compiler was found" in str(error.value) and "set it to off" in error.value.remedy


def test_a_step_that_is_not_finite_stops_before_it_spoils_the_model() -> None:
    learner, row = make_learner("mix", MIX), make_rows()[1]
    before = weights(learner)
    with pytest.raises(NotFinite, check=about("trainer")):
        learner.step([[without_bound(row)]])
    assert torch.equal(before, weights(learner))


def without_bound(row: TrainRow) -> TrainRow:
    return replace(row, advantages=np.where(row.mask, np.float32(np.inf), np.float32(0)))


def _after_skipping() -> tuple[Tensor, dict[str, float], int]:
    """The weights after a step that has such a row on one rank, and another step."""
    learner, rank, ranks = make_learner("mix", ADAPTS, sharded=True, skips=True), dist.get_rank(), dist.get_world_size()
    rows = make_rows()
    skipped = learner.step([[rows[0], without_bound(rows[1])] if rank == 0 else rows[2:4]]).metrics
    assert skipped.skipped_updates == 1 and not np.isfinite(skipped.loss)
    coefficients = learner.state()["coefficients"]
    assert learner.step([rows[rank::ranks]]).metrics.skipped_updates == 0
    return weights(learner), coefficients, learner.optimizer.updates


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_that_is_not_finite_is_skipped_on_all_ranks_and_counts(ranks: int) -> None:
    learner = make_learner("mix", ADAPTS)
    before = learner.state()["coefficients"]
    learner.step([make_rows()])
    found, coefficients, updates = on_ranks(ranks, _after_skipping)
    torch.testing.assert_close(found, weights(learner), atol=1e-6, rtol=1e-6)
    assert coefficients == before != learner.state()["coefficients"], "they do not adapt to a step that is skipped"
    assert updates == 2


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
    others = rows[:3] + rows[4:]
    result = learner.step([others]).metrics
    tokens = [sum(int(row.mask.sum()) for row in others if row.expert == expert) for expert in (False, True)]
    assert [result.policy_tokens, result.expert_tokens] == tokens, "it trains the others"


ASSERTED = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "micro_batch_tokens"),
        (MemoryError(), "gradient_checkpointing"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), "ranks"),
        (
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            "micro_batch",
        ),
        (dist.DistBackendError("NCCL error\nLast error:\nCuda failure 2 'out of memory'"), "micro_batch_tokens"),
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

    monkeypatch.setattr(learner.policy.model.model, "forward", mock.Mock(side_effect=fault))
    with pytest.raises(type(fault) if remedy else RowsFailed) as raised:
        learner.step([rows])
    failed = device_failed(raised.value, 3, "node-1, GPU-7", TrainerConfig(ranks=4))
    assert (failed is None) == (remedy is None)
    if failed is not None:
        assert (failed.field, failed.value) == ("trainer rank 3", "node-1, GPU-7") and str(remedy) in failed.remedy
        assert ("in the forward pass" in failed.problem) == isinstance(failed, OutOfMemory)


@pytest.mark.parametrize(
    ("place", "phase"),
    [
        ("rayrft.trainer.policy.head_logprobs", "the forward pass of 54 tokens"),
        ("rayrft.trainer.head.head_logits", "the head of 54 tokens"),
        ("rayrft.algorithms.loss.LossParts.zero", "the loss"),
        ("torch.autograd._engine_run_backward", "the backward pass"),
        ("rayrft.trainer.optimizer._LocalAdamW.step", "the optimiser's step"),
    ],
)
def test_what_memory_ran_out_for_and_what_is_used_are_said(
    place: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner("mix", MIX)
    monkeypatch.setattr(place, mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 70 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 78 * 2**30)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        learner.step([make_rows()])
    failed = device_failed(raised.value, 3, "node-1", TrainerConfig(ranks=4))
    assert isinstance(failed, OutOfMemory)
    assert f"out of memory in {phase}: " in failed.problem
    assert "(70.0 GiB allocated and 78.0 GiB reserved of 80.0 GiB)" in failed.problem


def test_an_assertion_that_cublas_reports_is_the_fault_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=torch.AcceleratorError(ASSERTED)))
    assert not is_device_fault(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"))


def test_no_row_is_blamed_for_a_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, rows = make_learner("mix", MIX, tokens=30), named(make_rows(), 0)

    def raises_lost_peer(*_: Any, **__: Any) -> None:
        dist.get_rank(group="gone")  # type: ignore[arg-type]

    monkeypatch.setattr(learner.policy.model.model, "forward", raises_lost_peer)
    with pytest.raises(Exception, match="group") as raised:
        learner.step([rows])
    assert not isinstance(raised.value, RowsFailed)


TEMPERATURE = 0.7


def plain_logprobs(policy: Policy, rows: list[TrainRow], temperature: float) -> list[torch.Tensor]:
    """Log-probs of each row's action tokens."""
    found, own = [], policy.model.config._attn_implementation
    policy.model.set_attn_implementation("sdpa")
    for row in rows:
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        with torch.no_grad():
            logprobs = (policy.model(ids[None, :-1]).logits[0] / temperature).log_softmax(-1)
        found.append(logprobs.gather(1, ids[1:, None])[:, 0][torch.tensor(row.mask[1:]).bool()])
    policy.model.set_attn_implementation(own)
    return found


def on_mask(rows: list[TrainRow], name: str) -> list[torch.Tensor]:
    return [torch.tensor(getattr(row, name)[row.mask.astype(bool)], dtype=torch.float64) for row in rows]


def moved(name: str, pieces: dict[str, Any], update: UpdateConfig | None = None) -> tuple[Learner, Policy]:
    """A learner whose policy has moved since the stage began, and the reference that it had then."""
    learner = make_learner(name, pieces, update=update, temperature=TEMPERATURE)
    move(learner.policy, 0.05)
    return learner, make_model()


def test_own_rows_are_seen_at_the_samplers_temperature_and_expert_rows_at_1() -> None:
    pieces = {"mu": 0.25, "kl": "k2", "kl_coef": 0.5, "correction": "decoupled", "distillation": "reverse_kl"}
    learner, reference = moved("mix", pieces, UpdateConfig(epochs=2))
    learner.teacher = make_teacher()
    rows = [replace(row, weight=1.0) for row in make_rows()]
    own, expert = [row for row in rows if not row.expert], [row for row in rows if row.expert]
    parts, _ = learner.gradient(rows)

    now, behaviour = torch.cat(plain_logprobs(learner.policy, own, TEMPERATURE)), torch.cat(on_mask(own, "logprobs"))
    then, teacher = (torch.cat(plain_logprobs(model, own, TEMPERATURE)) for model in (reference, learner.teacher))
    imitated = torch.cat(plain_logprobs(learner.policy, expert, 1.0))
    weight = (now - behaviour).exp()
    expected = {
        "policy": -(weight * torch.cat(on_mask(own, "advantages"))).mean(),
        "kl": ((now - then).square() / 2).mean(),
        "distillation": (weight.clamp(max=2.0) * (now - teacher)).mean(),
        "sft": -imitated.mean(),
    }
    assert then.sub(now).abs().mean() > 0.05 and weight.min() < 0.8, "the policies differ"
    for name, value in expected.items():
        assert getattr(parts, name).item() == pytest.approx(value.item(), abs=1e-5), name
    total = 0.75 * (expected["policy"] + 0.5 * expected["kl"] + expected["distillation"]) + 0.25 * expected["sft"]
    assert parts.loss.item() == pytest.approx(total.item(), abs=1e-5)
    assert (parts.ratio / len(now)).item() == pytest.approx(1.0), "to the proximal policy, at the same temperature"


@pytest.mark.parametrize("update", [UpdateConfig(), UpdateConfig(epochs=2, mini_batches=2)])
def test_the_row_with_the_widest_gap_is_told_with_its_tokens(update: UpdateConfig) -> None:
    learner, rows = make_learner("mix", update=update, temperature=TEMPERATURE), make_rows()
    rows = [replace(row, experience=f"row {number}") for number, row in enumerate(rows)]
    first = rows[:6] if update.mini_batches == 2 else rows
    own = [row for row in first if not row.expert]
    now = [each.numpy() for each in plain_logprobs(learner.policy, own, TEMPERATURE)]
    gaps = [here - row.logprobs[row.mask > 0] for row, here in zip(own, now, strict=True)]
    widest = max(range(len(own)), key=lambda place: np.abs(gaps[place]).mean())
    found = learner.step([first] if update.mini_batches == 1 else [first, rows[6:]]).widest_gap
    assert found is not None and found.row == own[widest].experience
    assert found.mean == pytest.approx(np.abs(gaps[widest]).mean(), abs=1e-5)
    tokens = dict(zip(np.flatnonzero(own[widest].mask), gaps[widest], strict=True))
    assert dict(found.tokens) == {token: pytest.approx(gap, rel=1e-3) for token, gap in tokens.items()}
    assert [abs(gap) for _, gap in found.tokens] == sorted((abs(gap) for _, gap in found.tokens), reverse=True)


def test_a_gap_of_rounding_alone_has_its_tokens_too() -> None:
    learner, [row] = make_learner("grpo", temperature=TEMPERATURE), [replace(make_rows(2)[1], experience="row")]
    exact = np.zeros(len(row.token_ids), np.float32)
    exact[row.mask > 0] = plain_logprobs(learner.policy, [row], TEMPERATURE)[0].numpy()
    found = learner.step([[replace(row, logprobs=exact)]]).widest_gap
    assert found is not None and 0 < found.mean < 1e-6 and found.tokens


def test_without_sampled_rows_there_is_no_widest_gap() -> None:
    rows = [replace(row, experience="expert", expert=True) for row in make_rows()]
    assert make_learner("sft").step([rows]).widest_gap is None


def test_a_penalty_in_the_reward_is_of_the_proximal_policy_also_where_a_batch_has_one_update() -> None:
    learner, reference = moved("rloo", {"kl": "k1", "kl_in": "reward", "kl_coef": 0.5, "correction": "decoupled"})
    rows = [replace(row, expert=False, weight=1.0) for row in make_rows()]
    parts, over = learner.gradient(rows)
    now, then = (plain_logprobs(model, rows, TEMPERATURE) for model in (learner.policy, reference))
    loss = torch.zeros((), dtype=torch.float64)
    behaviour, gains = on_mask(rows, "logprobs"), on_mask(rows, "advantages")
    for ours, theirs, sampled, advantages in zip(now, then, behaviour, gains, strict=True):
        to_go = (ours - theirs).flip(0).cumsum(0).flip(0)
        loss -= ((ours - sampled).exp() * (advantages - 0.5 * to_go)).sum() / over.policy_tokens
    assert parts.policy.item() == pytest.approx(loss.item(), abs=1e-5)
    assert parts.loss.item() == pytest.approx(parts.policy.item()), "it is in the reward alone"


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


def _router_gradients(weight: float, pack: bool) -> list[Tensor]:
    """Gradients of the routers from an update on all rows, which every rank has."""
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["qwen3 moe"])))
    assert policy.enable_fast_paths(pack=pack) is None
    policy.balance_experts(weight)
    learner = make_learner("grpo", policy=policy, sharded=dist.is_initialized())
    learner.gradient(own_rows())
    routers = [each for name, each in policy.named_parameters() if name.endswith("mlp.gate.weight")]
    assert routers
    gradients = (each.grad for each in routers)
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients if each is not None]


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_the_gradient_of_the_balance_of_experts_is_its_mean_over_micro_batches_on_any_number_of_ranks(
    pack: bool,
) -> None:
    without, single, double = (_router_gradients(weight, pack) for weight in (0.0, 0.5, 1.0))
    for none, one, two in zip(without, single, double, strict=True):
        assert (one - none).abs().max() > 1e-5
        torch.testing.assert_close(two - none, 2 * (one - none), atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(on_ranks(2, _router_gradients, 1.0, pack), double, atol=1e-6, rtol=1e-4)
