"""The model as the trainer uses it: tokens in, log-probs and entropy out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rayrft.algorithms import PolicyOutput, TokenBatch, chosen_logprobs
from rayrft.data.images import ImageReader
from rayrft.errors import ModelError
from rayrft.trainer import packing
from rayrft.trainer.batches import MicroBatch
from rayrft.trainer.blame import blaming
from rayrft.trainer.head import head_likeliest, head_logprobs
from rayrft.trainer.vision import refuse, run, with_images

if TYPE_CHECKING:
    from rayrft.trainer.lora import Lora

_ALIKE = 1e-4
"""Nats between two ways to compute the same log-probs (float32) from which on they are not the same."""

_ROUNDING = 3.0
"""How many times as far from float32 as the model itself, computed in half precision, a kernel may be."""


class Policy(nn.Module):
    """A causal language model of transformers. ``model`` is that, and every parameter's name begins with ``model.``.

    ``packs``: rows of a micro-batch share one sequence (see `rayrft.trainer.packing`); else they are padded.
    ``chunks_head``: logits exist for a few tokens at a time only (see `rayrft.trainer.head`).
    ``lora``: the adapter that is trained in place of the model's own weights, where there is one.
    ``images``: reads the images of rows, for a model that takes some.
    """

    def __init__(self, model: Any, images: ImageReader | None = None) -> None:
        super().__init__()
        self.images = images
        # Without dropout: where probabilities are compared, chance must not make them differ.
        self.model = model.eval()
        self.packs = False
        self.chunks_head = False
        self.lora: Lora | None = None

    def checkpoint_layers(self) -> None:
        """Keep only the input of each layer for the backward pass, which computes the rest again.

        Raises ModelError where the model's layers cannot do so.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers or not self.model.supports_gradient_checkpointing:
            raise ModelError(
                "the model's layers cannot be computed again for the backward pass",
                field="trainer.gradient_checkpointing",
                value=type(self.model).__name__,
                remedy="set it to false",
            )
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # the layer itself, not what is in it: else it does not checkpoint

    def choose(self, *, pack: bool, compute: torch.dtype = torch.float32) -> str | None:
        """Chunk the head, and ``pack`` rows, where that gives the log-probs that the model gives by itself.

        A model may mix tokens by more than plain attention, or change its logits after the head. What differs is not
        used; gives what that is and by how much, or None. To be called before the model is sharded, while its weights
        are in float32; ``compute`` is the precision that it will be trained in.
        """
        batch = _sample(self.vocabulary, next(self.parameters()).device)
        expected = self._logprobs(batch)
        said = []
        if getattr(self.model.get_output_embeddings(), "bias", None) is None:
            self.chunks_head = True
            if (gap := self._gap(batch, expected)) > _ALIKE:
                said.append(f"the head is not chunked: log-probs would differ by {gap:.2g}")
                self.chunks_head = False
        if pack and (why := self._try_packing(batch, expected, compute)):
            said.append(f"rows are padded, not packed: {why}")
        return "; ".join(said) or None

    def _try_packing(self, batch: MicroBatch, expected: Tensor, compute: torch.dtype) -> str | None:
        """Pack from now on, or give the reason why not."""
        if self.images is not None:
            return "tokens of an image have positions in its plane"
        own, kernel = self.model.config._attn_implementation, packing.uses_kernel(batch.token_ids.device, compute)
        rounding = 0.0
        if kernel:
            with _in_precision(self.model, compute):
                rounding = self._gap(batch, expected)
        packing.register()
        try:
            self.model.set_attn_implementation(packing.ATTENTION)
        except (ValueError, NotImplementedError) as error:
            return str(error).splitlines()[0]
        self.packs = True
        why = f"log-probs would differ by {gap:.2g}" if (gap := self._gap(batch, expected)) > _ALIKE else None
        if kernel and why is None:
            with _in_precision(self.model, compute):
                why = self._try_kernel(batch, expected, rounding)
        if why is not None:
            self.packs = False
            self.model.set_attn_implementation(own)
        return why

    def _try_kernel(self, batch: MicroBatch, expected: Tensor, rounding: float) -> str | None:
        """Go forward and backward through the attention kernel, or give the reason why that cannot be."""
        try:
            found = self.output(batch, temperature=1.0).logprobs
            torch.autograd.grad(found.sum(), self.model.get_input_embeddings().weight)
        except Exception as error:  # whatever a kernel refuses a head's size with, now or on the way back
            return f"the attention kernel fails: {(str(error).splitlines() or [type(error).__name__])[0]}"
        gap = float((found.detach() - expected).abs().max())
        if gap <= _ALIKE + _ROUNDING * rounding:
            return None
        return (
            f"with the attention kernel log-probs would differ by {gap:.2g}, and by {rounding:.2g} from rounding alone"
        )

    @property
    def vocabulary(self) -> int:
        """How many tokens the head tells apart."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def forward(
        self, batch: MicroBatch, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-prob and entropy of every action token, ``[T]`` each and 0 elsewhere, and the log-probs of the batch's
        candidates, ``[T, K]``, where it has any; see `PolicyOutput`."""
        inputs, before = lay_out(batch, packs=self.packs, images=self.images)
        chosen, temperatures = batch.token_ids[batch.predicted], _temperatures(batch, temperature)
        targets = chosen if batch.candidates is None else torch.cat([chosen[:, None], batch.candidates], 1)
        if self.chunks_head:
            logprobs, entropy = head_logprobs(*self._head_inputs(inputs, before), targets, temperatures)
        else:
            logits = run(self.model, inputs).logits.flatten(0, 1)[before]
            logprobs, entropy = chosen_logprobs(
                logits, targets, temperature=temperatures[:, None], entropy_gradient=entropy_gradient
            )
        if batch.candidates is None:
            return _at_places(batch, logprobs), _at_places(batch, entropy), None
        return _at_places(batch, logprobs[:, 0]), _at_places(batch, entropy), _at_places(batch, logprobs[:, 1:])

    @torch.no_grad()
    def likeliest(self, batch: MicroBatch, temperature: float, count: int, among: int) -> tuple[Tensor, Tensor]:
        """The ``count`` likeliest of the first ``among`` tokens in the place of every action token: log-probs
        ``[T, count]``, 0 elsewhere, and ids ``[A, count]``. ``temperature`` is as for `output`."""
        with blaming(batch):
            inputs, before = lay_out(batch, packs=self.packs, images=self.images)
            temperatures = _temperatures(batch, temperature)
            if self.chunks_head:
                logprobs, ids = head_likeliest(*self._head_inputs(inputs, before), temperatures, count, among)
            else:
                logits = run(self.model, inputs).logits.flatten(0, 1)[before]
                scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
                logprobs, ids = scaled.log_softmax(-1)[:, :among].topk(count)
            return _at_places(batch, logprobs), ids

    def output(self, batch: MicroBatch, *, temperature: float, entropy_gradient: bool = False) -> PolicyOutput:
        """What losses take; with gradient, but for the entropy where that has no need of one.

        ``temperature`` is that of the sampler, under which own rows are taken; demonstrations and pairs, which nobody
        sampled, are taken at 1.
        """
        with blaming(batch):
            logprobs, entropy, candidates = self(batch, temperature, entropy_gradient)
        return PolicyOutput(logprobs, entropy if entropy_gradient else entropy.detach(), candidates)

    def _head_inputs(self, inputs: dict[str, Any], before: Tensor) -> tuple[Tensor, Tensor]:
        """The states that predict, ``[A, H]``, and the weight of the head, ``[V, H]``."""
        states = run(self.model.base_model, inputs).last_hidden_state.flatten(0, 1)[before]
        return states, self.model.get_output_embeddings().weight

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self.output(batch, temperature=1.0).logprobs

    def _gap(self, batch: MicroBatch, expected: Tensor) -> float:
        return float((self._logprobs(batch) - expected).abs().max())


@contextlib.contextmanager
def _in_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """In here parameters are rounded to ``dtype``, as FSDP2 does for the compute; buffers are not."""
    exact = {parameter: parameter.data for parameter in model.parameters()}
    for parameter, data in exact.items():
        parameter.data = data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in exact.items():
            parameter.data = data


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


def _temperatures(batch: MicroBatch, temperature: float) -> Tensor:
    """``[A]``: of each predicted token."""
    tokens = batch.tokens
    own = tokens.spread(~tokens.expert & ~tokens.paired)[batch.predicted]
    return torch.where(own, temperature, 1.0)


def _at_places(batch: MicroBatch, values: Tensor) -> Tensor:
    """``[A, …]``, an entry for each predicted token, to ``[T, …]``, which is 0 elsewhere."""
    flat = values.new_zeros(len(batch.token_ids), *values.shape[1:])
    return flat.index_copy(0, batch.predicted, values)


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
    return MicroBatch(token_ids, lengths, tokens, images=tuple(images or ()))


def _sample(vocabulary: int, device: torch.device) -> MicroBatch:
    """Rows of several lengths, the same in every process."""
    chance = torch.Generator().manual_seed(0)
    return scored_batch([torch.randint(vocabulary, (n,), generator=chance).to(device) for n in (24, 5, 2, 17)])
