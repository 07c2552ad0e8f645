"""What a step does besides one gradient: references, critics, pairs, teachers, several updates on a batch."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rayrft.algorithms import Algorithm, build, corrections, presets
from rayrft.config import load_config
from rayrft.config.stage import StageConfig, UpdateConfig
from rayrft.config.trainer import OptimizerConfig, TrainerConfig
from rayrft.errors import RayrftError
from rayrft.trainer.annotation import with_logprobs
from rayrft.trainer.api import RankSetup
from rayrft.trainer.batches import TrainRow, micro_batches
from rayrft.trainer.learner import Learner
from rayrft.trainer.policy import Policy
from rayrft.trainer.rank import Rank
from rayrft.trainer.result import StepMetrics, group_value_errors
from tests.config.given import base
from tests.errors import about
from tests.scripted import handle
from tests.trainer.learners import CPU, adapt, make_learner, make_model, make_rows, on_policy, own_rows, pairs, weights
from tests.trainer.ranks import on_ranks

META = torch.device("meta")


def test_the_first_step_has_ratio_one_and_no_kl_and_the_reference_stays_while_the_policy_moves() -> None:
    learner = make_learner("grpo", {"kl": "k3", "kl_coef": 1e-3})
    rows = on_policy(learner, own_rows())
    assert learner.reference is not None
    start = [weight.clone() for weight in learner.reference.weights.values()]
    first, *others = (learner.step([rows]).metrics for _ in range(3))
    assert first.ratio == pytest.approx(1.0, abs=1e-6) and first.kl == pytest.approx(0.0, abs=1e-9)
    assert first.logprob_gap == pytest.approx(0.0, abs=1e-6) and first.clip_fraction == 0.0
    assert 0 < others[0].kl < others[1].kl
    assert all(torch.equal(old, new) for old, new in zip(start, learner.reference.weights.values(), strict=True))
    far = make_learner("grpo").step([own_rows()])
    assert far.first_update.clip_fraction == far.metrics.clip_fraction > 0, "of rows that another policy sampled"


def test_a_step_says_by_how_much_the_critic_missed_each_group_of_own_rows() -> None:
    # A new critic estimates 0 for every state: its error is the reward.
    rewarded = zip(own_rows(3), "aab", (1.0, 0.5, -2.0), strict=True)
    rows = [replace(row, group=name, reward=reward) for row, name, reward in rewarded]
    # Group "a" is split over two ranks.
    parts = [rows[0], replace(rows[0], group="gold", expert=True)], rows[1:]
    results = [make_learner("ppo").step([part]) for part in parts]
    assert group_value_errors(results) == pytest.approx({"a": 0.75, "b": 2.0})
    assert [(each.reward_sum, each.scored) for each in results] == [(1.0, 1), (-1.5, 2)], "of usual rows alone"
    assert make_learner("grpo").step([rows]).value_errors == {}


def test_a_refreshed_reference_is_the_policy_of_that_step() -> None:
    learner = make_learner("grpo", {"kl": "k2"}, update=UpdateConfig(reference_refresh=2, reset_optimizer=True))
    rows = on_policy(learner, own_rows())
    kls = []
    for step in range(4):
        kls.append(learner.step([rows]).metrics.kl)
        assert bool(learner.optimizer.adam.state) == (step % 2 == 0)
    assert kls[1] > 0 and kls[3] > 0
    assert kls[0] == pytest.approx(0.0, abs=1e-12) and kls[2] == pytest.approx(0.0, abs=1e-12)


def test_a_coefficient_rises_while_the_kl_is_over_its_target_and_is_reported() -> None:
    pieces = {"kl": "k2", "kl_coef": 0.5, "kl_target": 1e-9, "kl_horizon": 12.0}
    learner = make_learner("grpo", pieces)
    rows = on_policy(learner, own_rows())
    results = [learner.step([rows]) for _ in range(4)]
    # 12 rows a step: the first has no KL and lowers it by a fifth, the others raise it by a fifth.
    assert [each.metrics.kl_coef for each in results] == pytest.approx([0.5, 0.4, 0.48, 0.576])
    last = results[3].metrics
    assert last.loss == pytest.approx(last.policy_loss + 0.576 * last.kl, abs=1e-9)
    assert all(each.metrics.entropy_coef == 0.0 for each in results), "there is no such term"


def test_no_coefficient_follows_a_policy_that_waits_for_its_critic() -> None:
    pieces = {"kl": "k2", "kl_coef": 0.5, "kl_target": 1e-9, "kl_horizon": 12.0, "entropy": "bonus"}
    pieces |= {"entropy_coef": 0.001, "entropy_goal": 9.0, "sft": "nll", "mu_schedule": "cosine", "mu_warmup_steps": 4}
    learner = make_learner("ppo", pieces, update=UpdateConfig(critic_warmup_steps=3))
    rows = [*on_policy(learner, own_rows()), *[row for row in make_rows() if row.expert]]
    results = [learner.step([rows]) for _ in range(5)]
    # The first step of the policy is as configured, with mu 0; after it, which found no KL and too little entropy, they
    # move.
    assert [each.metrics.kl_coef for each in results] == pytest.approx([0.5] * 4 + [0.4])
    assert [each.metrics.entropy_coef for each in results] == pytest.approx([0.001] * 4 + [0.006])
    assert [each.metrics.sft_loss > 0 for each in results] == [False] * 4 + [True]


def test_the_kl_of_a_step_is_that_of_all_its_mini_batches() -> None:
    rows = own_rows()
    learner = make_learner("grpo", {"kl": "k2", "kl_coef": 1e-3}, update=UpdateConfig(epochs=2, mini_batches=3))
    updates = []
    update = learner.update
    learner.update = lambda *given: updates.append(update(*given)) or updates[-1]  # type: ignore
    expert = [replace(row, expert=True) for row in rows[:2]]
    result = learner.step([expert, rows[:4], rows[4:]])
    # The first has no usual rows; of the others' KL by token the second is not 0, for the policy has moved.
    tokens = [sum(int(row.mask.sum()) for row in each) for each in (rows[:4], rows[4:])]
    kls = [float(each.parts.kl) for each in updates[1:3]]
    assert kls[0] == pytest.approx(0.0, abs=1e-12) and kls[1] > 0
    assert result.metrics.kl == pytest.approx(kls[1] * tokens[1] / sum(tokens))
    assert result.first_update.kl == pytest.approx(0.0, abs=1e-12) and result.metrics.logprob_gap > 0


def test_epochs_and_mini_batches_are_that_many_updates() -> None:
    rows = own_rows()
    learner = make_learner("grpo", update=UpdateConfig(epochs=3, mini_batches=2))
    result = learner.step([rows[::2], rows[1::2]])
    assert learner.optimizer.updates == 6
    assert result.metrics.policy_tokens == sum(int(row.mask.sum()) for row in rows)
    by_hand = make_learner("grpo")
    for _ in range(3):
        by_hand.step([rows[::2]])
        by_hand.step([rows[1::2]])
    torch.testing.assert_close(weights(learner), weights(by_hand), atol=1e-12, rtol=0)


def test_the_proximal_policy_is_that_from_before_the_first_update() -> None:
    rows = own_rows()
    stale = [replace(row, logprobs=row.logprobs - row.mask.astype(np.float32)) for row in rows]
    learner = make_learner("grpo", {"correction": "truncated"}, update=UpdateConfig(epochs=2))
    results = learner.step([stale])
    # Ratios are taken to the trainer's own policy: 1 in the first update, near it in the second.
    assert results.metrics.ratio == pytest.approx(1.0, abs=0.3) and results.metrics.logprob_gap > 0.5


@pytest.mark.parametrize("correction", ["none", "truncated", "masked", "decoupled"])
def test_one_update_on_a_batch_costs_one_forward_pass_a_token(correction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(row, logprobs=row.logprobs - row.mask * np.float32(0.3)) for row in own_rows()]
    learner, asked = (make_learner("grpo", {"correction": correction}) for _ in range(2))
    passes = []
    forward = learner.policy.forward
    monkeypatch.setattr(learner.policy, "forward", lambda batch, *rest: passes.append(batch) or forward(batch, *rest))
    result = learner.step([rows]).metrics
    assert sum(len(batch.token_ids) for batch in passes) == sum(len(row.token_ids) for row in rows)
    if correction == "none":
        assert result.correction_weight == 1.0
        return
    # The same with the forward pass before the update.
    [batch] = with_logprobs(asked.make_micro_batches([rows]), "proximal_logprobs", asked.policy, asked.temperature)
    update = asked.update(batch, asked.count_denominators([batch])[0])
    assert torch.equal(weights(learner), weights(asked))
    assert result.correction_weight == pytest.approx(float(update.parts.correction) / result.policy_tokens)
    assert result.correction_weight != pytest.approx(1.0, abs=1e-3) and result.ratio == pytest.approx(1.0)


def test_a_schedule_counts_steps_and_not_updates() -> None:
    rows, update = own_rows(), UpdateConfig(epochs=2, mini_batches=4)
    learner = make_learner("grpo", optimizer=OptimizerConfig(lr=1e-4, warmup_steps=2, schedule="linear"), update=update)
    # The rate is that of a step's last update: the 8th of 16, the 16th, and after 7 of the 64 of the decay.
    rates = [learner.step([rows[number::4] for number in range(4)]).metrics.lr for _ in range(3)]
    assert rates == pytest.approx([0.5e-4, 1e-4, 1e-4 * (1 - 7 / 64)])


def test_the_schedule_begins_once_the_critic_has_warmed_up() -> None:
    optimizer = OptimizerConfig(lr=1e-3, schedule="linear")
    learner = make_learner("ppo", optimizer=optimizer, update=UpdateConfig(critic_warmup_steps=6))
    rows = [replace(row, reward=float(number % 2)) for number, row in enumerate(own_rows())]
    results = [learner.step([rows]) for _ in range(10)]
    # Of 10 steps the policy has 4.
    assert [each.metrics.lr for each in results] == pytest.approx([0.0] * 6 + [1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert [each.metrics.grad_norm > 0 for each in results] == [False] * 6 + [True] * 4


def test_a_critic_whose_update_is_not_finite_is_not_updated() -> None:
    learner = make_learner("ppo", update=UpdateConfig(critic_warmup_steps=5))
    assert learner.critic is not None
    before = [parameter.detach().clone() for parameter in learner.critic.parameters()]
    rows = own_rows()
    with pytest.raises(RayrftError, check=about("trainer")):
        learner.step([[replace(rows[0], reward=math.inf), *rows[1:]]])
    assert all(torch.equal(old, new) for old, new in zip(before, learner.critic.parameters(), strict=True))


def test_the_critic_learns_the_returns_and_the_policy_waits_for_it() -> None:
    learner = make_learner("ppo", update=UpdateConfig(critic_warmup_steps=5))
    rows = [replace(row, reward=float(number % 2)) for number, row in enumerate(on_policy(learner, own_rows()))]
    before = weights(learner)
    results = [learner.step([rows]) for _ in range(5)]
    assert torch.equal(before, weights(learner))
    assert all(parameter.grad is None for parameter in learner.policy.parameters()), "a backward pass for nothing"
    # Values begin at 0, and the mean square of returns that are 0 or 1 is halved: tokens of rows with reward 1.
    tokens = [int(row.mask.sum()) for row in rows]
    assert results[0].metrics.value_loss == pytest.approx(0.5 * sum(tokens[1::2]) / sum(tokens), abs=1e-6)
    assert results[4].metrics.value_loss < 0.7 * results[0].metrics.value_loss
    assert results[0].metrics.value_grad_norm > 0
    learner.step([rows])
    assert not torch.equal(before, weights(learner))


def test_a_closed_stage_leaves_nothing_but_the_policy_in_memory() -> None:
    learner = make_learner("ppo", {"kl": "k1", "kl_in": "reward"})
    learner.step([own_rows()])
    assert learner.critic is not None and learner.reference is not None
    held = [weakref.ref(each) for each in (learner.critic, learner.reference, learner.optimizer)]
    learner.close_stage()
    gc.collect()
    assert [each() for each in held] == [None] * 3
    learner.close_stage()


def _train(
    name: str, pieces: dict[str, Any], update: UpdateConfig, adapters: torch.dtype | None
) -> tuple[StepMetrics, Any, set[torch.dtype]]:
    """Two steps on rows that are dealt unevenly. ``adapters`` is what their frozen weights are held in."""
    size, rank = dist.get_world_size(), dist.get_rank()
    models = {} if adapters is None else {each: adapt(make_model(), adapters) for each in ("policy", "valued")}
    compute = adapters or torch.float32
    learner = make_learner(name, pieces, update=update, sharded=True, compute=compute, **models)
    batches = [own_rows()[number :: update.mini_batches] for number in range(update.mini_batches)]
    dealt = [each[:2] if size > 1 and rank == 0 else each[2 * (size > 1) :] for each in batches]
    for _ in range(2):
        result = learner.step(dealt)
    held = {weight.dtype for name, weight in learner.policy.named_parameters() if ".lora_" not in name}
    assert all(weight.dtype != torch.bfloat16 for weight in learner.policy.parameters() if weight.requires_grad)
    return result.metrics, weights(learner), held


@pytest.mark.parametrize(
    ("name", "pieces", "update", "adapters", "within"),
    [
        ("grpo", {"kl": "k3", "correction": "truncated"}, UpdateConfig(epochs=2, mini_batches=2), None, 1e-6),
        ("ppo", {"kl": "k1", "kl_in": "reward"}, UpdateConfig(), None, 1e-6),
        ("distill", {}, UpdateConfig(), None, 1e-6),
        ("jsd", {"teacher_candidates": 7}, UpdateConfig(mini_batches=2), None, 1e-6),
        ("ppo", {"kl": "k1", "kl_in": "reward"}, UpdateConfig(), torch.float64, 1e-6),
        ("ppo", {"kl": "k1", "kl_in": "reward"}, UpdateConfig(), torch.bfloat16, 2e-2),
    ],
    ids=["reference and proximal", "critic", "teacher", "candidates", "adapters", "rounded frozen weights"],
)
def test_everything_is_the_same_on_two_ranks(
    name: str, pieces: dict[str, Any], update: UpdateConfig, adapters: torch.dtype | None, within: float
) -> None:
    one, two = (on_ranks(ranks, _train, name, pieces, update, adapters) for ranks in (1, 2))
    torch.testing.assert_close(one[1], two[1], atol=within, rtol=0)
    assert one[2] == two[2] == {adapters or torch.float64}
    critic = ("value_loss", "value_grad_norm")
    for field in ("loss", "grad_norm", *critic, "distillation_loss", "kl", "entropy", "policy_tokens"):
        assert getattr(one[0], field) == pytest.approx(getattr(two[0], field), abs=within), field


@pytest.mark.parametrize("packs", [True, False])
def test_a_truncated_answer_is_worth_what_the_critic_makes_of_its_end(packs: bool) -> None:
    learner = make_learner("ppo", {"bootstrap_truncated": True, "normalise_advantages": False})
    critic = learner.critic
    assert critic is not None
    critic.packs = learner.policy.packs = packs
    if not packs:
        for model in (critic.model, learner.policy.model):
            model.set_attn_implementation("sdpa")
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(5))
    rows = [replace(row, reward=0.5, truncated=number % 2 == 0) for number, row in enumerate(own_rows(4))]
    [batch] = learner.compute_old_logprobs(learner.make_micro_batches([rows]), [rows])
    critic.model.set_attn_implementation("sdpa")
    seen = 0
    for micro in batch:
        assert micro.tokens.returns is not None and micro.tokens.truncated is not None
        for row, ids in enumerate(micro.token_ids.split(micro.lengths)):
            with torch.no_grad():
                states = critic.model(input_ids=ids[None]).last_hidden_state
                value = critic.head(states)[0, -1, 0].item()
            mine = micro.tokens.mask & (micro.tokens.sequence == row)
            cut = bool(micro.tokens.truncated[row])
            expected = 0.5 + value * cut
            assert micro.tokens.returns[mine].tolist() == pytest.approx([expected] * int(mine.sum()), abs=1e-5)
            assert not cut or abs(value) > 1e-3
            seen += cut
    assert seen == 2


def test_by_rewards_the_deviation_is_that_of_the_whole_batch() -> None:
    # Rewards 0, 1, 0, 1, doubled: deviation 1. Without normalisation the gradient is the same.
    rows = [replace(row, reward=float(number % 2)) for number, row in enumerate(own_rows(4))]
    pieces = {"normalise_advantages": True, "normalise_by": "rewards", "reward_scale": 2.0}
    scaled, plain = make_learner("dr_grpo", pieces), make_learner("dr_grpo")
    assert scaled.gradient(rows)[0].loss.item() == pytest.approx(plain.gradient(rows)[0].loss.item(), rel=1e-5)


def rows_for(algorithm: Algorithm, sampled: list[TrainRow]) -> list[TrainRow]:
    rows = pairs() if "pairs" in algorithm.needs else []
    if "expert" in algorithm.needs:
        rows += [row for row in make_rows() if row.expert]
    return rows + sampled if "rollouts" in algorithm.needs else rows


class HostReads(TorchDispatchMode):
    """Counts reads of a device from which nothing can be read, and answers them with zeros. Every operation whose
    result has a shape that depends on values fails on this device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.count += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device", META) != META:
            self.count += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


PPO = {"gamma": 0.9, "bootstrap_truncated": True, "kl": "k1", "kl_in": "reward"}
CORRECTED = {"correction": [name for name in corrections if name != "decoupled"], "normalise_advantages": True}


@pytest.mark.parametrize(
    ("name", "pieces"), [("mix", CORRECTED), ("ppo", PPO), ("dpo", {}), ("kto", {}), ("reward_model", {}), ("jsd", {})]
)
def test_the_host_waits_for_the_device_as_often_as_if_a_step_had_one_micro_batch(
    name: str, pieces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(fused, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    reads = dict[int, int]()
    rows = rows_for(build(name, pieces), own_rows())[-4:]
    for tokens in (1, 1000):
        learner = make_learner(name, pieces, tokens=tokens, temperature=0.7, device=META)
        with HostReads() as found:
            learner.step([rows])
        reads[len(micro_batches(rows, tokens, CPU))] = found.count
    assert min(reads) == 1 and max(reads) > 1
    assert len(set(reads.values())) == 1 and 0 < min(reads.values()) < 20, reads


@pytest.mark.parametrize("name", presets)
def test_two_steps_of_every_preset_move_the_policy_and_stay_finite(name: str) -> None:
    learner = make_learner(name)
    rows = rows_for(learner.algorithm, on_policy(learner, own_rows()))
    before = weights(learner)
    results = [learner.step([rows]).metrics for _ in range(2)]
    numbers = [value for result in results for value in asdict(result).values()]
    assert all(map(math.isfinite, numbers))
    assert results[0].grad_norm > 0 and results[0].loss != results[1].loss
    assert not torch.equal(before, weights(learner))


@pytest.fixture(scope="module")
def rank(tiny_model: Path) -> Iterator[Callable[[str], Rank]]:
    """A rank by itself, in this process, for a precision of the compute."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = TrainerConfig(ranks=1)

    def make(dtype: str) -> Rank:
        run = load_config({**base(), "model": {"path": str(tiny_model), "dtype": dtype}})
        return Rank(RankSetup(handle(None), run, one, str(tiny_model)), 0, CPU)

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("algorithm", "dtype", "tolerance"),
    [
        ({"name": "distill"}, "float32", 1e-5),
        ({"name": "jsd", "teacher_candidates": 5}, "float32", 1e-5),
        ({"name": "jsd"}, "bfloat16", 1e-2),
    ],
    ids=["sampled tokens", "candidates", "half precision"],
)
def test_a_teacher_that_is_the_policy_teaches_nothing(
    algorithm: dict[str, Any], dtype: str, tolerance: float, rank: Callable[[str], Rank], tiny_model: Path
) -> None:
    one, whole = rank(dtype), {"name": "s", "steps": 2, "batch_size": 8, "group_size": 8}
    stage = StageConfig.model_validate({**whole, "algorithm": algorithm, "teacher": str(tiny_model)})
    one.open_stage(stage.algorithm.build(), stage, None)
    learner = one.learner
    assert learner.teacher is not None
    assert {each.dtype for each in learner.teacher.parameters()} == {getattr(torch, dtype)}
    result = learner.step([on_policy(learner, own_rows())])
    assert result.metrics.distillation_loss == pytest.approx(0.0, abs=tolerance)
    assert result.metrics.policy_tokens > 0 and not any(each.requires_grad for each in learner.teacher.parameters())


CHANCE = np.random.default_rng(0)
PROMPTS = CHANCE.integers(0, 50, (8, 5)).astype(np.int32)


def whole(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """``[prompts, vocabulary]``: log-probs of these tokens after each of the prompts."""
    rows = [TrainRow(np.append(each, 0), *[np.eye(6)[5]] * 3, expert=False) for each in PROMPTS]
    [micro] = micro_batches(rows, 1000, CPU)
    order = [PROMPTS.tolist().index(each[:5].tolist()) for each in micro.token_ids.view(8, 6)]
    found = policy.output(replace(micro, candidates=ids.expand(8, -1)), temperature=1.0).candidates
    assert found is not None
    return found[micro.predicted][np.argsort(order)].detach()


def sampled(learner: Learner, each: int = 32) -> list[TrainRow]:
    """Answers of one token to the prompts, drawn from the policy."""
    logprobs, mask, rows = whole(learner.policy, torch.arange(50)), np.eye(6, dtype=np.uint8)[5], []
    for prompt, known in zip(PROMPTS, logprobs.numpy(), strict=True):
        for token in CHANCE.choice(50, each, p=np.exp(known) / np.exp(known).sum()):
            behaviour = (mask * known[token]).astype(np.float32)
            rows.append(TrainRow(np.append(prompt, token), mask, behaviour, np.zeros(6, np.float32), expert=False))
    return rows


def divergence(learner: Learner) -> float:
    """``KL(pi || teacher)``, the mean over the prompts."""
    assert learner.teacher is not None
    ours, theirs = (whole(policy, torch.arange(50)) for policy in (learner.policy, learner.teacher))
    return (ours.exp() * (ours - theirs)).sum(-1).mean().item()


@pytest.mark.parametrize(("name", "pieces"), [("distill", {}), ("jsd", {}), ("jsd", {"teacher_candidates": 8})])
def test_the_policy_comes_nearer_to_its_teacher(name: str, pieces: dict[str, Any]) -> None:
    learner = make_learner(name, pieces, tokens=10_000, optimizer=OptimizerConfig(lr=3e-3))
    before = divergence(learner)
    for _ in range(10):
        learner.step([sampled(learner)])
    assert 0 < divergence(learner) < 0.7 * before
