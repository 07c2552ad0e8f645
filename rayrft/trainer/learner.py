"""One optimiser step, exact whatever the split: torch and FSDP2 only, no Ray."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rayrft.algorithms import (
    Algorithm,
    Denominators,
    LossParts,
    Moments,
    PolicyOutput,
    count,
    normalise,
    sum_moments,
    token_logprobs,
)
from rayrft.config.trainer import OptimizerConfig
from rayrft.errors import RayrftError
from rayrft.trainer.batches import MicroBatch, TrainRow, empty_batch, micro_batches
from rayrft.trainer.model import reshard


@dataclass(frozen=True)
class StepResult:
    """Metrics of one optimiser step over all ranks. Policy figures are means over RL tokens; 0 where there are none."""

    loss: float
    policy_loss: float
    sft_loss: float
    grad_norm: float
    lr: float
    entropy: float
    clip_fraction: float
    ratio: float
    logprob_gap: float
    policy_tokens: int
    expert_tokens: int
    train_s: float


class Learner:
    """A model (sharded or not), its optimiser and the loss. Every method is a collective over the default group."""

    def __init__(self, model: nn.Module, *, micro_batch_tokens: int, temperature: float, device: torch.device) -> None:
        self.model = model
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._device = device
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1

    def open_stage(self, algorithm: Algorithm, optimizer: OptimizerConfig, steps: int) -> None:
        """Begin a stage with a fresh optimiser and schedule."""
        self._algorithm = algorithm
        self._config = optimizer
        self._steps = steps
        self._taken = 0
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )

    def step(self, rows: list[TrainRow]) -> StepResult:
        """Update the model on this rank's rows. Raises RayrftError when loss or gradient is not finite."""
        started = time.perf_counter()
        parts, over = self.backward(rows)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        lr = learning_rate(self._config, self._taken, self._steps)
        result = self._summarise(parts, over, grad_norm, lr, started)
        if not math.isfinite(result.loss) or not math.isfinite(grad_norm):
            raise RayrftError(
                "the loss or its gradient is not finite; the model was not updated",
                field="trainer",
                value={"loss": result.loss, "grad_norm": grad_norm, "step of the stage": self._taken},
                remedy="lower optimizer.lr, or look at the rows of this step",
            )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._taken += 1
        return result

    def backward(self, rows: list[TrainRow]) -> tuple[LossParts, Denominators]:
        """Leave the gradient of the step's loss in the parameters; gives the parts of all ranks, added up, and the
        denominators."""
        batches = micro_batches(rows, self._micro_batch_tokens, self._device)
        over, most = self._count(batches)
        if self._algorithm.normalise_advantages:
            batches = self._normalise(batches)
        batches += [empty_batch(self._device) for _ in range(most - len(batches))]
        last = len(batches) - 1
        totals = torch.stack([self._backward(batch, over, last=index == last) for index, batch in enumerate(batches)])
        total = totals.sum(0)
        if self._ranks > 1:
            dist.all_reduce(total)
        return LossParts.unstack(total), over

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of every token but the first, at temperature 1, as the engines' `score` gives it."""
        scores = []
        for token_ids in sequences:
            ids = torch.tensor([token_ids], device=self._device)
            logprobs, _ = token_logprobs(self.model(input_ids=ids).logits, ids)
            scores.append(logprobs[0, 1:].tolist())
        reshard(self.model)
        return scores

    def _count(self, batches: list[MicroBatch]) -> tuple[Denominators, int]:
        """Global denominators, and how many micro-batches every rank runs (the most that any has)."""
        counts = count((batch.tokens for batch in batches), self._device)
        most = torch.tensor([len(batches)], device=counts.device)
        if self._ranks > 1:
            dist.all_reduce(counts)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return Denominators.of(counts), int(most)

    def _normalise(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Advantages normalised over all ranks."""
        sums = sum_moments((batch.tokens for batch in batches), self._device)
        if self._ranks > 1:
            dist.all_reduce(sums)
        moments = Moments.of(sums)
        return [replace(batch, tokens=normalise(batch.tokens, moments)) for batch in batches]

    def _backward(self, batch: MicroBatch, over: Denominators, *, last: bool) -> Tensor:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        # Padding is on the right and attention is causal, so no real token ever sees it: no attention mask is needed.
        logits = self.model(input_ids=batch.token_ids, use_cache=False).logits
        logprobs, entropy = token_logprobs(
            logits,
            batch.token_ids,
            temperature=self._temperature,
            entropy_gradient=self._algorithm.needs_entropy_gradient,
        )
        output = PolicyOutput(logprobs[batch.present], entropy[batch.present])
        parts = self._algorithm.loss(output, batch.tokens, over, step=self._taken)
        # Data parallelism averages gradients over ranks; the loss is already divided globally, so it wants their sum.
        torch.autograd.backward(parts.loss * self._ranks)
        return parts.stack()

    def _summarise(
        self, parts: LossParts, over: Denominators, grad_norm: float, lr: float, started: float
    ) -> StepResult:
        tokens = over.policy.tokens
        return StepResult(
            loss=float(parts.loss),
            policy_loss=float(parts.policy),
            sft_loss=float(parts.sft),
            grad_norm=grad_norm,
            lr=lr,
            entropy=float(parts.entropy) / tokens,
            clip_fraction=float(parts.clipped) / tokens,
            ratio=float(parts.ratio) / tokens,
            logprob_gap=float(parts.logprob_gap) / tokens,
            policy_tokens=int(over.policy_tokens),
            expert_tokens=int(over.expert_tokens),
            train_s=time.perf_counter() - started,
        )


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate at step ``step`` (from 0) of ``steps``: a linear warm-up, then constant, or decayed to 0 at the end."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr
