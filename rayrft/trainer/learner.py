"""One training step, independent of how rows are split into micro-batches. Torch and FSDP2 only, no Ray."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rayrft.algorithms import Algorithm, Coefficients, Denominators, LossParts, count, sum_gains
from rayrft.algorithms.normalisation import Moments, normalise, sum_moments
from rayrft.config.stage import StageConfig, UpdateConfig
from rayrft.config.trainer import Accumulate, OptimizerConfig, TrainerConfig
from rayrft.errors import NotFinite
from rayrft.runtime.trace import Trace
from rayrft.trainer.annotation import Batches, each_micro, value_errors, with_logprobs, with_teacher, with_values
from rayrft.trainer.batches import MicroBatch, TrainRow, empty_batch, micro_batches, mismatched, widest_gap
from rayrft.trainer.blame import blaming
from rayrft.trainer.loading import reshard
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy, Reference, scored_batch
from rayrft.trainer.result import PairRanking, RowGap, StepResult, Update
from rayrft.trainer.reward_model import RewardClassifier
from rayrft.trainer.value_model import Critic

_GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, which is in float32."""

_SMALL_BYTES = 2**30
"""Gradients of at most so many bytes are accumulated unsharded: reducing them in each micro-batch costs time."""


def accumulates_whole(how: Accumulate, trained: int) -> bool:
    """Return whether every rank accumulates the whole gradient of so many ``trained`` parameters."""
    return how == "unsharded" or (how == "auto" and _GRADIENT_BYTES * trained <= _SMALL_BYTES)


class RngState:
    """torch's random number generators of the CPU and the rank's GPU, seeded differently on every rank."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._rank = rank
        self.name = f"rng {rank} of {ranks}"
        """Key of this rank's state; not restorable under another world size."""

    def reseed(self, step: int) -> None:
        """Seed the generators from the run's seed, the step of the stage and the rank."""
        [number] = np.random.SeedSequence([self._seed, step, self._rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(number))  # of all devices

    def state(self) -> dict[str, Tensor]:
        """Return the generators' states (uint8) by device."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def restore(self, states: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        torch.set_rng_state(states["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._device)


class Learner:
    """The policy (sharded or not), its optimiser and the loss. Every method is a collective over the default group.

    In a stage with a reward model, `trained` is the reward model, and the policy is unchanged.
    """

    def __init__(
        self,
        policy: Policy,
        config: TrainerConfig,
        *,
        temperature: float,
        device: torch.device,
        seed: int = 0,
        attention: float = 0.0,
        trace: Trace | None = None,
    ) -> None:
        """``attention``: see `micro_batches`. ``trace``: of the phases of steps, as the host sees them: it waits for a
        GPU only where it needs a number."""
        self.policy, self.config, self._trace = policy, config, trace or Trace()
        self.rng = RngState(seed, device)
        self.temperature = temperature
        self._device = device
        self._attention = attention
        self._widest_gap: RowGap | None = None
        self._has_looked = False
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1

    def open_stage(
        self,
        algorithm: Algorithm,
        optimizer: OptimizerConfig,
        steps: int,
        update: UpdateConfig | None = None,
        critic: Critic | None = None,
        teacher: Policy | None = None,
        reward_model: RewardClassifier | None = None,
    ) -> None:
        """Begin a stage with a new optimiser, schedule and reference, and the RNG reseeded."""
        self.rng.reseed(step=0)
        self._coefficients = Coefficients.of(algorithm)
        self._update_config = update or UpdateConfig()
        self._step = 0
        self._critic_warmup_steps = self._update_config.critic_warmup_steps if critic is not None else 0
        self.reward_model = reward_model
        updates = self._update_config.updates_per_step
        own_steps = steps - self._critic_warmup_steps
        self.optimizer = Optimizer(self.trained.parameters(), optimizer, own_steps, updates, self.config.moments)
        self.reference = Reference(self.policy) if "reference" in algorithm.needs else None
        self.critic = critic
        self.teacher = teacher

    def adjust(self, algorithm: Algorithm, stage: StageConfig, temperature: float) -> None:
        """See `RankApi`. Coefficients that adapt keep their present values."""
        self._coefficients = Coefficients.of(algorithm).restored(self._coefficients.state())
        self.temperature = temperature
        self.optimizer.config, self.optimizer.steps = stage.optimizer, stage.steps - self._critic_warmup_steps
        if self.critic is not None:
            self.critic.optimizer.config, self.critic.optimizer.steps = stage.critic_optimizer, stage.steps

    def close_stage(self) -> None:
        """Free the models and moments of the open stage, if there is one."""
        self.critic = self.teacher = self.reference = self.reward_model = None
        if hasattr(self, "optimizer"):
            del self.optimizer

    def step(self, mini_batches: list[list[TrainRow]]) -> StepResult:
        """Train on this rank's rows of the mini-batches, for the stage's number of epochs.

        Raises NotFinite for such a loss or gradient, unless such updates are skipped.
        """
        with self.phase("micro-batches"):
            batches = self.make_micro_batches(mini_batches)
            over = self.count_denominators(batches)
        with self.phase("old log-probs"):
            batches = self.compute_old_logprobs(batches, mini_batches)
        epochs, self._widest_gap, self._has_looked = self._update_config.epochs, None, False
        updates = [self.update(*each) for _ in range(epochs) for each in zip(batches, over, strict=True)]
        # Coefficients adapt only if usual rows have weight in the loss (else KL and entropy are unknown) and the policy
        # is trained (not during the critic's warm-up, nor by an update that is skipped).
        skipped = not all(update.is_finite for update in updates)
        adapts = self._step >= self._critic_warmup_steps and self.algorithm.mu(self._policy_step) < 1.0 and not skipped
        sequences = round(sum(denominators.policy_sequences for denominators in over)) if adapts else 0
        self._step += 1
        self._refresh()
        errors = {} if self.critic is None or skipped else value_errors(batches)
        own = [row for rows in mini_batches for row in rows if not row.expert]
        rewards = [row.reward for row in own if row.reward is not None]
        result = StepResult.of(updates, self.algorithm, epochs, errors, rewards, self._widest_gap)
        kl, entropy = result.metrics.kl, result.metrics.entropy
        self._coefficients = self._coefficients.update(kl=kl, entropy=entropy, sequences=sequences)
        return result

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Record a phase of this rank in its trace."""
        return self._trace.on(self._trace.actor, name)

    @property
    def trained(self) -> Policy | RewardClassifier:
        """The model that the open stage trains, besides a critic."""
        return self.policy if self.reward_model is None else self.reward_model

    @property
    def algorithm(self) -> Algorithm:
        """The open stage's algorithm, with its present coefficients."""
        return self._coefficients.applied

    @property
    def _policy_step(self) -> int:
        """Steps in which the stage has trained the policy so far."""
        return max(0, self._step - self._critic_warmup_steps)

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps besides weights and moments."""
        return {
            "step": self._step,
            "taken": self.optimizer.updates,
            "critic_taken": self.critic.optimizer.updates if self.critic is not None else 0,
            "reference": self.reference.weights if self.reference is not None else {},
            "coefficients": self._coefficients.state(),
        }

    def restore(self, state: dict[str, Any], rng: dict[str, Tensor] | None) -> None:
        """Restore the stage's progress from `state` (the reference's tensors are already filled).

        ``rng``: this rank's generator states; None if the checkpoint has no such rank, which reseeds them.
        """
        self._step = state["step"]
        if rng is not None:
            self.rng.restore(rng)
        else:
            self.rng.reseed(self._step)
        self.optimizer.updates = state["taken"]
        if self.critic is not None:
            self.critic.optimizer.updates = state["critic_taken"]
        self._coefficients = self._coefficients.restored(state["coefficients"])

    def gradient(self, rows: list[TrainRow]) -> tuple[LossParts, Denominators]:
        """Accumulate the gradient of one update; return the loss parts over all ranks, and their denominators."""
        batches = self.make_micro_batches([rows])
        over = self.count_denominators(batches)
        (batch,) = self.compute_old_logprobs(batches, [rows])
        return self._backward(batch, over[0]), over[0]

    @torch.no_grad()
    def rank_pairs(self, rows: list[TrainRow]) -> PairRanking:
        """Rank this rank's preference pairs by the model that the stage trains; return the ranking over all ranks."""
        parts, over = self.gradient(rows)
        reshard(self.trained)
        pairs = round(over.pairs)
        return PairRanking(pairs, round(float(parts.pair_accuracy)), float(parts.pair_margin) / max(pairs, 1))

    @torch.no_grad()
    def score(self, sequences: list[list[int]], images: list[tuple[str, ...]] | None = None) -> list[list[float]]:
        """Compute log-probs of all tokens but the first, at temperature 1, as the engines' `score` does."""
        scores = []
        for token_ids, paths in zip(sequences, images or [()] * len(sequences), strict=True):
            batch = scored_batch([torch.tensor(token_ids, device=self._device)], [paths])
            scores.append(self.policy.output(batch, temperature=1.0).logprobs[1:].tolist())
        reshard(self.policy)
        return scores

    def make_micro_batches(self, mini_batches: list[list[TrainRow]]) -> Batches:
        """Split mini-batches into micro-batches, with empty ones added so that all ranks have the same number."""
        models = [model for model in (self.trained, self.critic, self.teacher) if model is not None]
        padded = not all(model.packs for model in models)
        split = partial(micro_batches, padded=padded, attention=self._attention)
        batches = [split(rows, self.config.micro_batch_tokens, self._device) for rows in mini_batches]
        most = self._reduce(torch.tensor([len(batch) for batch in batches]), dist.ReduceOp.MAX).tolist()
        empty = empty_batch(self._device)
        return [batch + [empty] * (number - len(batch)) for batch, number in zip(batches, most, strict=True)]

    def count_denominators(self, batches: Batches) -> list[Denominators]:
        """Count the global denominators of every mini-batch, before the first backward pass."""
        counts = torch.stack([count((micro.tokens for micro in batch), self._device) for batch in batches])
        return [Denominators(*row.tolist()) for row in self._reduce(counts).cpu()]

    def compute_old_logprobs(self, batches: Batches, mini_batches: list[list[TrainRow]]) -> Batches:
        """Add old-policy, reference and teacher log-probs, values and advantages, each only if the loss uses it."""
        updates = self._update_config.epochs * self._update_config.mini_batches
        # With a single update the proximal policy is the current one: the loss's own forward pass gives its log-probs.
        if "proximal" in self.algorithm.needs and (updates > 1 or self.algorithm.penalises_rewards):
            batches = with_logprobs(batches, "proximal_logprobs", self.policy, self.temperature)
        if self.reference is not None:
            with self.reference.active():
                batches = with_logprobs(batches, "reference_logprobs", self.policy, self.temperature)
        if "reference_kl" in self.algorithm.needs:
            batches = self._with_reference_kl(batches, mini_batches)
        if self.critic is not None:
            bootstraps = bool(self.algorithm.coefficients.get("bootstrap_truncated"))
            batches = with_values(batches, self.critic, final=bootstraps)
        advantages = self.algorithm.token_advantages
        batches = each_micro(batches, lambda micro: replace(micro, tokens=advantages(micro.tokens)))
        if self.algorithm.normalise_advantages:
            by = self.algorithm.normalise_by
            sums = sum_moments((micro.tokens for batch in batches for micro in batch), self._device, by)
            moments = Moments.of(self._reduce(sums), by)
            batches = each_micro(batches, lambda micro: replace(micro, tokens=normalise(micro.tokens, moments)))
        if self.teacher is not None:
            vocabulary = self.policy.vocabulary
            batches = with_teacher(batches, self.algorithm, self.teacher, vocabulary, self.temperature)
        return batches

    def _with_reference_kl(self, batches: Batches, mini_batches: list[list[TrainRow]]) -> Batches:
        """Add the mean KL from the reference of every mini-batch: over its rows, on all ranks, of prompts with the
        answers of other rows; 0 if it is below."""
        assert self.reference is not None  # `kto` needs it
        others = [mismatched(rows, self._from_all_ranks(rows)) for rows in mini_batches]
        found = with_logprobs(self.make_micro_batches(others), "proximal_logprobs", self.policy, self.temperature)
        with self.reference.active():
            found = with_logprobs(found, "reference_logprobs", self.policy, self.temperature)
        gains = [sum_gains((micro.tokens for micro in batch), self._device) for batch in found]
        sums = self._reduce(torch.stack(gains))
        means = (sums[:, 0] / sums[:, 1].clamp(min=1)).clamp(min=0)
        return [
            [micro.annotated(reference_kl=mean.expand(micro.tokens.rows)) for micro in batch]
            for batch, mean in zip(batches, means, strict=True)
        ]

    def _from_all_ranks(self, rows: list[TrainRow]) -> list[TrainRow]:
        if self._ranks == 1:
            return rows
        gathered: list[Any] = [None] * self._ranks
        dist.all_gather_object(gathered, rows)
        return [row for each in gathered for row in each]

    def update(self, batch: list[MicroBatch], over: Denominators) -> Update:
        """Update the policy, unless its critic warms up, and then the critic, if there is one."""
        if self._step < self._critic_warmup_steps:
            with torch.no_grad():
                update = Update(self._backward(batch, over), over, grad_norm=0.0, lr=0.0)
            reshard(self.policy)
        else:
            parts, lr = self._backward(batch, over), self.optimizer.lr
            update = Update(parts, over, self._apply_gradient(self.optimizer, float(parts.loss), "model"), lr)
        if (critic := self.critic) is None:
            return update

        def share(micro: MicroBatch) -> tuple[Tensor, Tensor]:
            loss = self.algorithm.value_loss_of(critic(micro)[0], micro.tokens, over)
            return loss, loss

        loss = float(self._reduce(torch.stack(self._accumulate(critic, batch, share)).sum()))
        return replace(update, value_loss=loss, value_grad_norm=self._apply_gradient(critic.optimizer, loss, "critic"))

    def _apply_gradient(self, optimizer: Optimizer, loss: float, model: str) -> float:
        """Apply the accumulated gradient; return its norm before clipping. Raises NotFinite, or skips the update."""
        with self.phase("optimizer"):
            grad_norm = optimizer.clip()
            if math.isfinite(loss) and math.isfinite(grad_norm):
                optimizer.step()
                return grad_norm
        optimizer.adam.zero_grad()
        optimizer.updates += 1
        if self.config.not_finite != "skip":
            problem = f"the loss or its gradient is not finite; the {model} was not updated"
            remedy = "lower the optimizer's lr, or inspect the rows of this step; trainer.not_finite can skip it"
            found = {"loss": loss, "grad_norm": grad_norm, "step of the stage": self._step}
            raise NotFinite(problem, remedy, field="trainer", value=found)
        return grad_norm

    def _backward(self, batch: list[MicroBatch], over: Denominators) -> LossParts:
        """Accumulate the gradient of a mini-batch, if gradients are enabled; return its loss parts over all ranks. The
        first one of a step that has usual rows shows where engine and trainer differ most."""
        looks, seen = over.policy_tokens > 0 and not self._has_looked, list[tuple[MicroBatch, Tensor]]()

        def share(micro: MicroBatch) -> tuple[Tensor, Tensor]:
            if self.reward_model is not None:
                parts = self.algorithm.score_loss(self.reward_model(micro), micro.tokens, over)
            else:
                differentiable = "entropy" in self.algorithm.terms
                output = self.policy.output(micro, temperature=self.temperature, entropy_gradient=differentiable)
                parts = self.algorithm.loss(output, micro.tokens, over, step=self._policy_step)
                if looks:
                    seen.append((micro, output.logprobs.detach()))
                if output.balance is not None and len(micro.predicted):
                    balance = output.balance / (len(batch) * self._ranks)
                    return parts.loss + self.policy.router_loss * balance, parts.stack()
            return parts.loss, parts.stack()

        with self.phase("forward and backward"):
            reported = self._accumulate(self.trained, batch, share)
            parts = LossParts(*self._reduce(torch.stack(reported).sum(0)).cpu())  # the host waits once
        if looks:
            self._widest_gap, self._has_looked = widest_gap(seen), True
        return parts

    def _accumulate(
        self, model: nn.Module, batch: list[MicroBatch], share: Callable[[MicroBatch], tuple[Tensor, Tensor]]
    ) -> list[Tensor]:
        """Accumulate a model's gradient, if gradients are enabled. ``share`` computes a micro-batch's share of the loss
        and the numbers to report. Returns these by micro-batch."""
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        reported, whole = [], accumulates_whole(self.config.accumulate, trained)
        for index, micro in enumerate(batch):
            if isinstance(model, FSDPModule):
                last = index == len(batch) - 1
                model.set_requires_gradient_sync(not whole or last)
                model.set_requires_all_reduce(last)  # between replicas
            with blaming(micro):
                loss, numbers = share(micro)
                # FSDP averages gradients over ranks, but the loss is already divided by global counts: scale to a sum.
                if torch.is_grad_enabled():
                    torch.autograd.backward(loss * self._ranks)
                reported.append(numbers.detach())
        return reported

    def _refresh(self) -> None:
        every = self._update_config.reference_refresh
        if self.reference is not None and every and self._step % every == 0:
            self.reference.refresh()
            if self._update_config.reset_optimizer:
                self.optimizer.reset()

    def _reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce values over ranks, by sum unless ``op`` says otherwise."""
        if self._ranks > 1:
            values = values.to(self._device)
            dist.all_reduce(values, op=op)
        return values
