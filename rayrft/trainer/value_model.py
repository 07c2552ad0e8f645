"""Models that estimate values: a language model's decoder with a scalar head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayrft.trainer.batches import MicroBatch
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


def last_tokens(batch: MicroBatch, padding: int | None = None) -> Tensor:
    """Return the index of every row's last token that is not ``padding``, ``[N]``; its first one if all are."""
    index = torch.arange(len(batch.token_ids), device=batch.token_ids.device)
    if padding is not None:
        index = torch.where(batch.token_ids == padding, index - batch.packing.positions, index)
    return index.new_zeros(len(batch.lengths)).scatter_reduce(0, batch.tokens.sequence, index, "amax")


class Critic(ScalarHead):
    """Estimates state values, for algorithms with per-token advantages."""

    optimizer: Optimizer
    """That of the open stage."""

    def forward(self, batch: MicroBatch, *, final: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the value of the state before every action token, ``[T]``, 0 elsewhere; with ``final`` also that of
        the state after the last token of every row, ``[N]``, otherwise empty."""
        at = batch.predicted - 1
        if final:
            at = torch.cat([at, last_tokens(batch)])
        before, ends = self.outputs(batch, at).tensor_split([len(batch.predicted)])
        return before.new_zeros(len(batch.token_ids)).index_copy(0, batch.predicted, before), ends
