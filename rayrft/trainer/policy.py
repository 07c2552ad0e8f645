"""The model as the trainer uses it: tokens in, log-probs and entropy out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayrft.algorithms import PolicyOutput, TokenBatch, chosen_logprobs
from rayrft.buffer.images import ImageReader
from rayrft.trainer import packing
from rayrft.trainer.batches import MicroBatch
from rayrft.trainer.head import head_logprobs
from rayrft.trainer.vision import refuse, run, with_images

_ALIKE = 1e-4
"""Nats between two ways to compute the same log-probs (float32) from which on they are not the same."""


class Policy(nn.Module):
    """A causal language model of transformers. ``model`` is that, and every parameter's name begins with ``model.``.

    ``packs``: rows of a micro-batch share one sequence (see `rayrft.trainer.packing`); else they are padded.
    ``chunks_head``: logits exist for a few tokens at a time only (see `rayrft.trainer.head`).
    ``images``: reads the images of rows, for a model that takes some.
    """

    def __init__(self, model: Any, images: ImageReader | None = None) -> None:
        super().__init__()
        self.images = images
        # Without dropout: where probabilities are compared, chance must not make them differ.
        self.model = model.eval()
        self.packs = False
        self.chunks_head = False

    def checkpoint_layers(self) -> None:
        """Keep only the input of each layer for the backward pass, which computes the rest again."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # the layer itself, not what is in it: else it does not checkpoint

    def choose(self, *, pack: bool) -> str | None:
        """Chunk the head, and ``pack`` rows, where that gives the log-probs that the model gives by itself.

        A model may mix tokens by more than plain attention, or change its logits after the head. What differs is not
        used; gives what that is and by how much, or None. To be called before the model is sharded.
        """
        batch = _sample(self.model.config.get_text_config().vocab_size, next(self.parameters()).device)
        expected = self._logprobs(batch)
        said = []
        if getattr(self.model.get_output_embeddings(), "bias", None) is None:
            self.chunks_head = True
            if (gap := self._gap(batch, expected)) > _ALIKE:
                said.append(f"the head is not chunked: log-probs would differ by {gap:.2g}")
                self.chunks_head = False
        if pack and (why := self._try_packing(batch, expected)):
            said.append(f"rows are padded, not packed: {why}")
        return "; ".join(said) or None

    def _try_packing(self, batch: MicroBatch, expected: Tensor) -> str | None:
        """Pack from now on, or give the reason why not."""
        if self.images is not None:
            return "tokens of an image have positions in its plane"
        own = self.model.config._attn_implementation
        packing.register()
        try:
            self.model.set_attn_implementation(packing.ATTENTION)
        except (ValueError, NotImplementedError) as error:
            return str(error).splitlines()[0]
        self.packs = True
        if (gap := self._gap(batch, expected)) > _ALIKE:
            self.packs = False
            self.model.set_attn_implementation(own)
            return f"log-probs would differ by {gap:.2g}"
        return None

    def forward(self, batch: MicroBatch, temperature: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every action token, ``[T]`` each and 0 elsewhere; see `PolicyOutput`."""
        inputs, before = lay_out(batch, packs=self.packs, images=self.images)
        targets, temperature = batch.token_ids[batch.predicted], temperature[batch.predicted]
        if self.chunks_head:
            states = run(self.model.base_model, inputs).last_hidden_state.flatten(0, 1)[before]
            weight = self.model.get_output_embeddings().weight
            logprobs, entropy = head_logprobs(states, weight, targets, temperature)
        else:
            logits = run(self.model, inputs).logits.flatten(0, 1)[before]
            logprobs, entropy = chosen_logprobs(
                logits, targets, temperature=temperature[:, None], entropy_gradient=entropy_gradient
            )
        flat = logprobs.new_zeros(len(batch.token_ids))
        return flat.index_copy(0, batch.predicted, logprobs), flat.index_copy(0, batch.predicted, entropy)

    def output(self, batch: MicroBatch, *, temperature: float, entropy_gradient: bool = False) -> PolicyOutput:
        """What losses take; with gradient, but for the entropy where that has no need of one.

        ``temperature`` is that of the sampler, under which own rows are taken; demonstrations and pairs, which nobody
        sampled, are taken at 1.
        """
        tokens = batch.tokens
        own = tokens.spread(~tokens.expert & ~tokens.paired)
        each = torch.where(own, temperature, 1.0)
        logprobs, entropy = self(batch, each, entropy_gradient)
        return PolicyOutput(logprobs, entropy if entropy_gradient else entropy.detach())

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self.output(batch, temperature=1.0).logprobs

    def _gap(self, batch: MicroBatch, expected: Tensor) -> float:
        return float((self._logprobs(batch) - expected).abs().max())


def lay_out(batch: MicroBatch, *, packs: bool, images: ImageReader | None) -> tuple[dict[str, Any], Tensor]:
    """A model's inputs, for `run`, and for each predicted token the place of the state before it in the flattened
    output. Raises ModelError where rows have images and nothing reads them."""
    where = batch.packing
    if images is None:
        refuse(batch.images)
    inputs: dict[str, Any]
    if packs:
        inputs = {"input_ids": batch.token_ids[None], "position_ids": where.positions[None], "packing": where}
        return inputs, batch.predicted - 1
    # Padding is on the right and attention is causal, so no real token ever sees it: no attention mask is needed.
    padded = batch.token_ids.new_zeros(len(batch.lengths), where.longest)
    padded[batch.tokens.sequence, where.positions] = batch.token_ids
    inputs = {"input_ids": padded} if images is None else with_images(padded, batch.images, images)
    places = batch.tokens.sequence * inputs["input_ids"].shape[1] + where.positions
    return inputs, places[batch.predicted] - 1


def scored_batch(sequences: list[Tensor], images: Sequence[tuple[str, ...]] | None = None) -> MicroBatch:
    """A micro-batch of sequences (with these images) of which every token's log-prob is wanted."""
    lengths = tuple(len(sequence) for sequence in sequences)
    token_ids = torch.cat(sequences)
    zeros = torch.zeros(len(token_ids), device=token_ids.device)
    tokens = TokenBatch(
        mask=torch.ones_like(token_ids, dtype=torch.bool),
        sequence=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(token_ids.device),
        behaviour_logprobs=zeros,
        advantages=zeros,
        expert=torch.zeros(len(lengths), dtype=torch.bool, device=token_ids.device),
    )
    return MicroBatch(token_ids, lengths, tokens, tuple(images or ()))


def _sample(vocabulary: int, device: torch.device) -> MicroBatch:
    """Rows of several lengths, the same in every process."""
    chance = torch.Generator().manual_seed(0)
    return scored_batch([torch.randint(vocabulary, (n,), generator=chance).to(device) for n in (24, 5, 2, 17)])
