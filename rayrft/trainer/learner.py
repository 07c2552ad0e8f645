"""One step of training, exact whatever the split: torch and FSDP2 only, no Ray."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rayrft.algorithms import (
    Algorithm,
    Coefficients,
    Denominators,
    LossParts,
    Moments,
    count,
    normalise,
    sum_moments,
)
from rayrft.config.stage import UpdateConfig
from rayrft.config.trainer import OptimizerConfig
from rayrft.errors import RayrftError
from rayrft.trainer.annotation import Batches, value_errors, with_logprobs, with_teacher, with_values
from rayrft.trainer.batches import MicroBatch, TrainRow, empty_batch, micro_batches
from rayrft.trainer.blame import blaming
from rayrft.trainer.model import reshard
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy, scored_batch
from rayrft.trainer.reference import Reference
from rayrft.trainer.result import CriticUpdate, StepResult, Update
from rayrft.trainer.rng import Chance
from rayrft.trainer.value_model import Critic


class Learner:
    """The policy (sharded or not), its optimiser and the loss. Every method is a collective over the default group."""

    def __init__(
        self, policy: Policy, *, micro_batch_tokens: int, temperature: float, device: torch.device, seed: int = 0
    ) -> None:
        self.policy = policy
        self.chance = Chance(seed, device)
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._device = device
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1

    def open_stage(
        self,
        algorithm: Algorithm,
        optimizer: OptimizerConfig,
        steps: int,
        update: UpdateConfig | None = None,
        critic: Critic | None = None,
        teacher: Policy | None = None,
    ) -> None:
        """Begin a stage with a fresh optimiser, schedule and reference, and random numbers of the seed."""
        self.chance.begin(step=0)
        self._coefficients = Coefficients.of(algorithm)
        self._algorithm = self._coefficients.applied(algorithm)
        self._update_config = update or UpdateConfig()
        self._step = 0
        self._policy_waits = self._update_config.critic_warmup_steps if critic is not None else 0
        self.optimizer = Optimizer(
            self.policy.parameters(), optimizer, steps - self._policy_waits, self._update_config.updates_per_step
        )
        self.reference = Reference(self.policy) if algorithm.needs_reference else None
        self.critic = critic
        self.teacher = teacher

    def close_stage(self) -> None:
        """Free what the open stage alone needs, if there is one: critic, teacher, reference, moments."""
        self.critic = self.teacher = self.reference = None
        if hasattr(self, "optimizer"):
            del self.optimizer

    def step(self, mini_batches: list[list[TrainRow]]) -> StepResult:
        """Train on this rank's rows of each mini-batch, in as many epochs as the stage says.

        Raises RayrftError when loss or gradient is not finite; policy and critic are as they were before that update.
        """
        started = time.perf_counter()
        batches = self._lay_out(mini_batches)
        over = self._count(batches)
        batches = self._prepare(batches)
        updates, valued = [], []
        for _ in range(self._update_config.epochs):
            for batch, denominators in zip(batches, over, strict=True):
                updates.append(self._update(batch, denominators))
                if self.critic is not None:
                    valued.append(self._update_critic(self.critic, batch, denominators))
        # Where own rows have no weight in the loss, nothing is known of KL and entropy; while the policy waits for its
        # critic, no coefficient can move them.
        steered = self._step >= self._policy_waits and self._algorithm.mu(self._policy_step) < 1.0
        sequences = round(sum(each.policy_sequences for each in over)) if steered else 0
        self._step += 1
        self._refresh()
        errors = {} if self.critic is None else value_errors(batches)
        seconds = time.perf_counter() - started
        result = StepResult.of(updates, valued, self._algorithm, seconds, self._update_config.epochs, errors)
        self._coefficients = self._coefficients.update(kl=result.kl, entropy=result.entropy, sequences=sequences)
        self._algorithm = self._coefficients.applied(self._algorithm)
        return result

    @property
    def _policy_step(self) -> int:
        """The steps that the policy took in the stage so far."""
        return max(0, self._step - self._policy_waits)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides weights and moments."""
        return {
            "step": self._step,
            "taken": self.optimizer.taken,
            "critic_taken": self.critic.optimizer.taken if self.critic is not None else 0,
            "reference": self.reference.weights if self.reference is not None else {},
            "coefficients": self._coefficients.state(),
        }

    def restore(self, state: dict[str, Any], chance: dict[str, Tensor] | None) -> None:
        """Stand where the stage stood; the reference was filled in place. ``chance``: where this rank's random numbers
        stood, unless there was no such rank."""
        self._step = state["step"]
        if chance is not None:
            self.chance.restore(chance)
        else:
            self.chance.begin(self._step)
        self.optimizer.taken = state["taken"]
        if self.critic is not None:
            self.critic.optimizer.taken = state["critic_taken"]
        self._coefficients = self._coefficients.restored(state["coefficients"])
        self._algorithm = self._coefficients.applied(self._algorithm)

    def gradient(self, rows: list[TrainRow]) -> tuple[LossParts, Denominators]:
        """Leave the gradient of one update in the parameters; gives the parts of its loss over all ranks, and what
        they are over."""
        batches = self._lay_out([rows])
        over = self._count(batches)
        (batch,) = self._prepare(batches)
        return self._backward(batch, over[0]), over[0]

    @torch.no_grad()
    def score(self, sequences: list[list[int]], images: list[tuple[str, ...]] | None = None) -> list[list[float]]:
        """Log-prob of every token but the first, at temperature 1, as the engines' `score` gives it."""
        scores = []
        for token_ids, seen in zip(sequences, images or [()] * len(sequences), strict=True):
            batch = scored_batch([torch.tensor(token_ids, device=self._device)], [seen])
            scores.append(self.policy.output(batch, temperature=1.0).logprobs[1:].tolist())
        reshard(self.policy)
        return scores

    def _lay_out(self, mini_batches: list[list[TrainRow]]) -> Batches:
        """The micro-batches of each mini-batch, as many on every rank: the most that any has."""
        models = [model for model in (self.policy, self.critic, self.teacher) if model is not None]
        padded = not all(model.packs for model in models)
        batches = [micro_batches(rows, self._micro_batch_tokens, self._device, padded=padded) for rows in mini_batches]
        most = self._reduce(torch.tensor([len(each) for each in batches]), dist.ReduceOp.MAX).tolist()
        empty = empty_batch(self._device)
        return [each + [empty] * (number - len(each)) for each, number in zip(batches, most, strict=True)]

    def _count(self, batches: Batches) -> list[Denominators]:
        """Global denominators of each mini-batch, before its first backward pass."""
        counts = torch.stack([count((micro.tokens for micro in each), self._device) for each in batches])
        return [Denominators.of(each) for each in self._reduce(counts)]

    def _prepare(self, batches: Batches) -> Batches:
        """What a loss needs of the time before the first update, and costs a forward pass only where it needs it."""
        updates = self._update_config.epochs * self._update_config.mini_batches
        # Before its only update the policy is the proximal one: the loss's own forward pass tells.
        if self._algorithm.needs_proximal and (updates > 1 or self._algorithm.penalises_rewards):
            batches = with_logprobs(batches, "proximal_logprobs", self.policy, self._temperature)
        if self.reference is not None:
            with self.reference.in_place():
                batches = with_logprobs(batches, "reference_logprobs", self.policy, self._temperature)
        if self.critic is not None:
            batches = with_values(batches, self.critic)
        batches = [
            [replace(micro, tokens=self._algorithm.token_advantages(micro.tokens)) for micro in each]
            for each in batches
        ]
        if self._algorithm.normalise_advantages:
            sums = sum_moments((micro.tokens for each in batches for micro in each), self._device)
            moments = Moments.of(self._reduce(sums))
            batches = [[replace(m, tokens=normalise(m.tokens, moments)) for m in each] for each in batches]
        if self.teacher is not None:
            vocabulary = self.policy.vocabulary
            batches = with_teacher(batches, self._algorithm, self.teacher, vocabulary, self._temperature)
        return batches

    def _update(self, batch: list[MicroBatch], over: Denominators) -> Update:
        if self._step < self._policy_waits:
            with torch.no_grad():
                parts = self._backward(batch, over)
            reshard(self.policy)
            return Update(parts, over, grad_norm=0.0, lr=0.0)
        parts, lr = self._backward(batch, over), self.optimizer.lr
        return Update(parts, over, self._descend(self.optimizer, float(parts.loss), "model"), lr)

    def _update_critic(self, critic: Critic, batch: list[MicroBatch], over: Denominators) -> CriticUpdate:
        loss = float(self._reduce(critic.backward(batch, over, self._algorithm)))
        return CriticUpdate(loss, self._descend(critic.optimizer, loss, "critic"))

    def _descend(self, optimizer: Optimizer, loss: float, whose: str) -> float:
        """One update with the gradient that is there; gives its norm before it was clipped."""
        grad_norm = optimizer.clip()
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            optimizer.adam.zero_grad()
            raise RayrftError(
                f"the loss or its gradient is not finite; the {whose} was not updated",
                field="trainer",
                value={"loss": loss, "grad_norm": grad_norm, "step of the stage": self._step},
                remedy="lower the optimizer's lr, or look at the rows of this step",
            )
        optimizer.step()
        return grad_norm

    def _backward(self, batch: list[MicroBatch], over: Denominators) -> LossParts:
        """Leave the gradient of a mini-batch in the parameters, where gradients are wanted; gives the parts of its loss
        over all ranks."""
        total = torch.stack(
            [self._backward_micro(micro, over, last=index == len(batch) - 1) for index, micro in enumerate(batch)]
        ).sum(0)
        return LossParts.unstack(self._reduce(total))

    def _backward_micro(self, micro: MicroBatch, over: Denominators, *, last: bool) -> Tensor:
        if isinstance(self.policy, FSDPModule):
            self.policy.set_requires_gradient_sync(last)
        with blaming(micro):
            output = self.policy.output(
                micro, temperature=self._temperature, entropy_gradient=self._algorithm.needs_entropy_gradient
            )
            parts = self._algorithm.loss(output, micro.tokens, over, step=self._policy_step)
            # Data parallelism averages gradients over ranks; the loss is already divided globally, so it wants their
            # sum.
            if torch.is_grad_enabled():
                torch.autograd.backward(parts.loss * self._ranks)
            return parts.stack()

    def _refresh(self) -> None:
        every = self._update_config.reference_refresh
        if self.reference is not None and every and self._step % every == 0:
            self.reference.refresh()
            if self._update_config.reset_optimizer:
                self.optimizer.reset()

    def _reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or another reduction) over ranks."""
        if self._ranks > 1:
            values = values.to(self._device)
            dist.all_reduce(values, op=op)
        return values
