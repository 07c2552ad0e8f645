"""Models that estimate values: a language model's decoder with a scalar head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rayrft.algorithms import Algorithm, Denominators
from rayrft.config.trainer import OptimizerConfig
from rayrft.trainer.batches import MicroBatch
from rayrft.trainer.blame import blaming
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy, model_inputs
from rayrft.trainer.vision import run_model


class ScalarHead(nn.Module):
    """The decoder of a policy's model, as the submodule ``model``, with a head of one output.

    The head is zero at first, and so is every output. If the policy has an adapter, only adapter and head are trained.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.packs = policy.packs
        self.images = policy.images
        self.lora = policy.lora
        self.model = policy.model.base_model
        config = self.model.config.get_text_config()
        example = next(self.model.parameters())
        dtype = torch.promote_types(example.dtype, torch.float32)  # frozen weights may be in half precision
        self.head = nn.Linear(config.hidden_size, 1, bias=False, dtype=dtype, device=example.device)
        nn.init.zeros_(self.head.weight)

    def outputs(self, batch: MicroBatch, at: Tensor) -> Tensor:
        """Compute the outputs in the states after the tokens ``at`` (int64), one each."""
        inputs, states = model_inputs(batch, packs=self.packs, images=self.images, at=at)
        values: Tensor = self.head(run_model(self.model, inputs).last_hidden_state.flatten(0, 1)[states]).squeeze(-1)
        return values.to(torch.promote_types(values.dtype, torch.float32))


class Critic(ScalarHead):
    """Estimates state values, for algorithms with per-token advantages."""

    def open_stage(self, config: OptimizerConfig, steps: int, ranks: int, updates_per_step: int = 1) -> None:
        """Begin a stage with a new optimiser."""
        self.optimizer = Optimizer(self.parameters(), config, steps, updates_per_step)
        self._ranks = ranks

    def forward(self, batch: MicroBatch, *, final: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the value of the state before every action token, ``[T]``, 0 elsewhere; with ``final`` also that of
        the state after the last token of every row, ``[N]``, otherwise empty."""
        at = batch.predicted - 1
        if final:
            at = torch.cat([at, torch.tensor(batch.lengths, device=at.device).cumsum(0) - 1])
        before, ends = self.outputs(batch, at).tensor_split([len(batch.predicted)])
        return before.new_zeros(len(batch.token_ids)).index_copy(0, batch.predicted, before), ends

    @torch.no_grad()
    def values(self, batch: MicroBatch, *, final: bool = False) -> tuple[Tensor, Tensor]:
        """Compute values as `forward` does, without gradient."""
        with blaming(batch):
            values: tuple[Tensor, Tensor] = self(batch, final=final)
        return values

    def backward(self, batches: list[MicroBatch], over: Denominators, algorithm: Algorithm) -> Tensor:
        """Accumulate the gradient of a mini-batch, whose rows carry returns; return this rank's share of the loss."""
        total = torch.zeros(())
        for index, micro in enumerate(batches):
            if isinstance(self, FSDPModule):
                self.set_requires_gradient_sync(index == len(batches) - 1)
            with blaming(micro):
                loss = algorithm.value_loss_of(self(micro)[0], micro.tokens, over)
                torch.autograd.backward(loss * self._ranks)
            total += loss.detach().cpu()
        return total
