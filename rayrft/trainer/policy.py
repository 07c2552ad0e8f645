"""The trainer's interface to a model: tokens in, log-probs and entropy out."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayrft.algorithms import PolicyOutput, chosen_logprobs
from rayrft.data.images import ImageReader
from rayrft.errors import ModelError, first_line
from rayrft.trainer import packing
from rayrft.trainer.batches import MicroBatch, TrainRow, flatten
from rayrft.trainer.blame import blaming, is_device_fault
from rayrft.trainer.head import head_logprobs, head_top_logprobs
from rayrft.trainer.lora import Lora, checkpoint_name
from rayrft.trainer.vision import run_model, with_images

_TOLERANCE = 1e-4
"""Largest difference (nats) between two float32 computations of the same log-probs."""

_CAP = re.compile("^(?!.*(?:att|router|gate)).*(?:soft_?cap|logit_cap)")
"""Options of configs that cap the logits after the head."""

_ATTENTION = {"full_attention", "sliding_attention"}

_ROUNDING_FACTOR = 3.0
"""How many times the model's own half-precision error a kernel's error may be."""


class Policy(nn.Module):
    """A causal language model of transformers, as the submodule ``model``.

    ``packs``: rows of a micro-batch share one sequence (see `rayrft.trainer.packing`); else they are padded.
    ``chunks_head``: logits are computed for a few tokens at a time (see `rayrft.trainer.head`), for ``head_chunk`` if
    that is not None.
    ``router_loss``: the weight of the loss that balances experts; see `TrainerConfig`.
    ``lora``: the adapter that is trained instead of the model's own weights, if any.
    ``images``: reads the images of rows, for a vision model.
    """

    def __init__(self, model: Any, images: ImageReader | None = None) -> None:
        super().__init__()
        self.images = images
        # No dropout: probability ratios need deterministic log-probs.
        self.model = model.eval()
        self.packs = False
        self.chunks_head = False
        self.head_chunk: int | None = None
        self.router_loss = 0.0
        self.lora: Lora | None = None

    def checkpoint_layers(self) -> None:
        """Enable gradient checkpointing: the backward pass recomputes activations from the inputs of the layers.

        Raises ModelError if the model's layers do not support it.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers or not self.model.supports_gradient_checkpointing:
            problem, remedy = "the model does not support gradient checkpointing", "set it to false"
            raise ModelError(problem, remedy, field="trainer.gradient_checkpointing", value=type(self.model).__name__)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # only the layer itself, not its submodules: else it does not checkpoint

    def balance_experts(self, weight: float) -> None:
        """Compute the loss that balances experts from now on. Raises ModelError if transformers has none for it."""
        if not hasattr(self.model, "num_experts") or _balancing(self.model) is None:
            problem, remedy = "the model has no experts whose load could be balanced", "set it to 0"
            raise ModelError(problem, remedy, field="trainer.router_loss", value=type(self.model).__name__)
        self.router_loss = weight

    def compile_layers(self) -> None:
        """Compile every decoder layer at its first call, for micro-batches of any size. Call it before the model is
        sharded. Raises ModelError if the model names no class of layers."""
        names = set(self.model._no_split_modules or ())
        layers = [module for module in self.model.modules() if type(module).__name__ in names]
        if not layers:
            problem, remedy = "the model names no layers that could be compiled", "set it to off"
            raise ModelError(problem, remedy, field="trainer.compile", value=type(self.model).__name__)
        for layer in layers:
            layer.compile(dynamic=True)

    def use(self, *, packs: bool, chunks_head: bool) -> None:
        """Use the fast paths that `enable_fast_paths` has found for this model."""
        if packs:
            packing.register()
            self.model.set_attn_implementation(packing.ATTENTION)
        self.packs, self.chunks_head = packs, chunks_head

    def enable_fast_paths(self, *, pack: bool, compute: torch.dtype = torch.float32) -> str | None:
        """Enable the chunked head and, if ``pack``, packing, each only if the log-probs stay the model's own.

        A model may mix tokens by more than plain attention, or change its logits after the head. Returns which path
        stays disabled and by how much log-probs differ, or None. Call it before the model is sharded, while its weights
        are in float32; ``compute`` is the precision of the training. Caps and convolutions, which
        do not show at the small values of a fresh model, disable a path by themselves.
        """
        batch = _sample(self.vocabulary, next(self.parameters()).device)
        expected = self._logprobs(batch)
        notes = []
        if getattr(self.model.get_output_embeddings(), "bias", None) is None:
            self.chunks_head = True
            if why := self._capped() or self._difference(batch, expected):
                notes.append(f"the head is not chunked: {why}")
                self.chunks_head = False
        if pack and (why := self._try_packing(batch, expected, compute)):
            notes.append(f"rows are padded, not packed: {why}")
        return "; ".join(notes) or None

    def _try_packing(self, batch: MicroBatch, expected: Tensor, compute: torch.dtype) -> str | None:
        """Enable packing, or return the reason why it cannot be used."""
        if self.images is not None:
            return "image tokens have two-dimensional positions"
        kinds = {*(getattr(self.model.config.get_text_config(), "layer_types", None) or ())}
        if kinds - _ATTENTION or any(isinstance(module, nn.Conv1d) for module in self.model.modules()):
            return "tokens are mixed by more than plain attention"
        own, kernel = self.model.config._attn_implementation, packing.uses_kernel(batch.token_ids.device, compute)
        rounding = 0.0
        if kernel:
            with _in_precision(self.model, compute):
                rounding = self._gap(batch, expected)
        packing.register()
        try:
            self.model.set_attn_implementation(packing.ATTENTION)
        except (ValueError, NotImplementedError) as error:
            return first_line(error)
        self.packs = True
        why = self._difference(batch, expected)
        if kernel and why is None:
            with _in_precision(self.model, compute):
                why = self._try_kernel(batch, expected, rounding)
        if why is not None:
            self.packs = False
            self.model.set_attn_implementation(own)
        return why

    def _try_kernel(self, batch: MicroBatch, expected: Tensor, rounding: float) -> str | None:
        """Run forward and backward through the attention kernel; return the reason if it cannot be used."""
        try:
            found = self.output(batch, temperature=1.0).logprobs
            torch.autograd.grad(found.sum(), self.model.get_input_embeddings().weight)
        except Exception as error:  # a kernel may reject the head size by any error, forward or backward
            return f"the attention kernel fails: {_reason(error)}"
        gap = float((found.detach() - expected).abs().max())
        if gap <= _TOLERANCE + _ROUNDING_FACTOR * rounding:
            return None
        differ = f"by {gap:.2g}, and by {rounding:.2g} from rounding alone"
        return f"with the attention kernel log-probs would differ {differ}"

    @property
    def transformer(self) -> Any:
        """The transformers model that is written to files."""
        return self.model

    def named_as_in_files(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters by their names in files, one of two tied weights, which are separate in gathered shards."""
        named = {checkpoint_name(name.removeprefix("model.")): tensor for name, tensor in state.items()}
        return {name: tensor for name, tensor in named.items() if name not in self.model.all_tied_weights_keys}

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return self.model.config.get_text_config().vocab_size

    def forward(
        self, batch: MicroBatch, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Compute log-prob and entropy of every action token, both ``[T]`` and 0 elsewhere, log-probs of the batch's
        candidates, if any, ``[T, K]``, and the loss that balances experts, if it has a weight: see `PolicyOutput`."""
        inputs, before = model_inputs(batch, packs=self.packs, images=self.images)
        chosen, temperatures = batch.token_ids[batch.predicted], _temperatures(batch, temperature)
        targets = chosen if batch.candidates is None else torch.cat([chosen[:, None], batch.candidates], 1)
        if balances := bool(self.router_loss) and torch.is_grad_enabled():
            inputs["output_router_logits"] = True
        output = run_model(self.model.base_model if self.chunks_head else self.model, inputs)
        balance = self._balance(output.router_logits, batch) if balances else None
        if self.chunks_head:
            states = self._states(output, before)
            logprobs, entropy = head_logprobs(*states, targets, temperatures, chunk=self.head_chunk)
        else:
            logits, scale = output.logits.flatten(0, 1)[before], 1.0 if temperatures is None else temperatures[:, None]
            logprobs, entropy = chosen_logprobs(logits, targets, temperature=scale, entropy_gradient=entropy_gradient)
        if batch.candidates is None:
            return _scatter(batch, logprobs), _scatter(batch, entropy), None, balance
        return _scatter(batch, logprobs[:, 0]), _scatter(batch, entropy), _scatter(batch, logprobs[:, 1:]), balance

    @torch.no_grad()
    def top_logprobs(self, batch: MicroBatch, temperature: float, k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` most likely of the first ``vocabulary`` tokens at every action token: log-probs ``[T, k]``,
        0 elsewhere, and ids ``[A, k]``. ``temperature`` as in `output`."""
        with blaming(batch):
            inputs, before = model_inputs(batch, packs=self.packs, images=self.images)
            temperatures = _temperatures(batch, temperature)
            if self.chunks_head:
                states = self._states(run_model(self.model.base_model, inputs), before)
                logprobs, ids = head_top_logprobs(*states, temperatures, k, vocabulary, chunk=self.head_chunk)
            else:
                logits = run_model(self.model, inputs).logits.flatten(0, 1)[before]
                scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
                scaled = scaled if temperatures is None else scaled / temperatures[:, None]
                logprobs, ids = scaled.log_softmax(-1)[:, :vocabulary].topk(k)
            return _scatter(batch, logprobs), ids

    def output(self, batch: MicroBatch, *, temperature: float, entropy_gradient: bool = False) -> PolicyOutput:
        """Compute the inputs of losses, with gradient (of the entropy only if ``entropy_gradient``).

        ``temperature`` is the sampler's, for usual rows; demonstrations and pairs, which were not sampled, use 1.
        """
        with blaming(batch):
            logprobs, entropy, candidates, balance = self(batch, temperature, entropy_gradient)
        return PolicyOutput(logprobs, entropy if entropy_gradient else entropy.detach(), candidates, balance)

    def _states(self, output: Any, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicting states, ``[A, H]``, and the weight of the head, ``[V, H]``."""
        return output.last_hidden_state.flatten(0, 1)[before], self.model.get_output_embeddings().weight

    def _balance(self, logits: tuple[Tensor, ...], batch: MicroBatch) -> Tensor:
        """Return the loss that balances experts, over all tokens but padding."""
        mask, balancing = None, _balancing(self.model)
        assert balancing is not None  # `balance_experts` has checked it
        if not self.packs:
            mask = batch.token_ids.new_zeros(len(batch.lengths), batch.packing.longest)
            mask[batch.tokens.sequence, batch.packing.positions] = 1
        return balancing(logits, self.model.num_experts, self.model.num_experts_per_tok, mask)

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self.output(batch, temperature=1.0).logprobs

    def _difference(self, batch: MicroBatch, expected: Tensor) -> str | None:
        """Return how the model fails, or by how much log-probs differ from the expected ones; None if they agree."""
        try:
            gap = self._gap(batch, expected)
        except Exception as error:  # architectures fail in many ways on inputs that they are not made for
            return _reason(error)
        return None if gap <= _TOLERANCE else f"log-probs would differ by {gap:.2g}"

    def _capped(self) -> str | None:
        """Return the reason if the config names a cap of logits; caps of attention and routers do not count."""
        options = self.model.config.get_text_config().to_dict().items()
        caps = [name for name, value in options if value and _CAP.search(name)]
        return f"the model has a {caps[0]}" if caps else None

    def _gap(self, batch: MicroBatch, expected: Tensor) -> float:
        return float((self._logprobs(batch) - expected).abs().max())


class Reference:
    """The reference policy: a frozen earlier state of the policy, for KL and preference losses.

    It is a copy of the policy's weights (this rank's shards), exchanged with them while the reference is evaluated: one
    model serves both, independent of architecture and sharding. With an adapter nothing is copied: the reference is the
    model without it, which is the policy at the stage's start.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.weights = self._copied_weights() if policy.lora is None else {}
        """Reference weights by parameter; a checkpoint is loaded into these tensors in place."""

    def refresh(self) -> None:
        """Make the present policy the reference. Not available with an adapter, which has no copy."""
        assert self._policy.lora is None, "refused by the configuration"
        for name, weight in self._copied_weights().items():
            self.weights[name].copy_(weight)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the policy compute as the reference. For use without gradients; its weights are restored afterwards."""
        if self._policy.lora is not None:
            with self._policy.lora.disabled():
                yield
            return
        parameters = dict(self._policy.named_parameters())  # a forward pass that fails leaves others in their places
        self._swap(parameters)
        try:
            yield
        finally:
            self._swap(parameters)

    @torch.no_grad()
    def _swap(self, parameters: dict[str, nn.Parameter]) -> None:
        """Exchange the policy's weights and the reference's, in memory for one of them."""
        for name, weight in self.weights.items():
            held = parameters[name].clone()
            parameters[name].copy_(weight)
            weight.copy_(held)

    def _copied_weights(self) -> dict[str, Tensor]:
        named = self._policy.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named if parameter.requires_grad}


def _balancing(model: Any) -> Callable[..., Tensor] | None:
    """Return transformers' own load-balancing loss for a model's architecture, if it has one."""
    return getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)


def _reason(error: Exception) -> str:
    """Return an error of a trial in one line. Raises it if the device failed."""
    if is_device_fault(error):
        raise error
    return first_line(error)


@contextlib.contextmanager
def _in_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round parameters to ``dtype`` inside, as FSDP2's mixed precision does; buffers stay exact."""
    exact = {parameter: parameter.data for parameter in model.parameters()}
    for parameter, data in exact.items():
        parameter.data = data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in exact.items():
            parameter.data = data


def model_inputs(
    batch: MicroBatch, *, packs: bool, images: ImageReader | None, at: Tensor | None = None
) -> tuple[dict[str, Any], Tensor]:
    """Return inputs for `run_model`, and the indices of states in the flattened output: those after the tokens ``at``
    (int64), by default before predicted tokens. Raises ModelError if the model takes no images but rows have some."""
    layout = batch.packing
    at = batch.predicted - 1 if at is None else at
    if images is None and (image := next(chain.from_iterable(batch.images), None)):
        remedy = "give a model of the Qwen-VL family, or rows without images"
        raise ModelError("a row has an image, but the model takes none", remedy, field="model", value=image)
    inputs: dict[str, Any]
    if packs:
        ids, positions = batch.token_ids[layout.computed], layout.positions[layout.computed]
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "packing": layout}
        return inputs, layout.states[at]
    # Padding is on the right and attention is causal, so no real token sees it: no attention mask is needed.
    padded = batch.token_ids.new_zeros(len(batch.lengths), layout.longest)
    padded[batch.tokens.sequence, layout.positions] = batch.token_ids
    inputs = {"input_ids": padded} if images is None else with_images(padded, batch.images, images)
    flat = batch.tokens.sequence * inputs["input_ids"].shape[1] + layout.positions
    return inputs, flat[at]


def _temperatures(batch: MicroBatch, temperature: float) -> Tensor | None:
    """Return the temperature of every predicted token, ``[A]``; None if all are 1."""
    if temperature == 1 or not any(batch.sampled):
        return None
    tokens = batch.tokens
    own = tokens.spread(~tokens.expert & ~tokens.paired)[batch.predicted]
    return torch.where(own, temperature, 1.0)


def _scatter(batch: MicroBatch, values: Tensor) -> Tensor:
    """Scatter the entries of predicted tokens, ``[A, …]``, to ``[T, …]``, 0 elsewhere."""
    flat = values.new_zeros(len(batch.token_ids), *values.shape[1:])
    return flat.index_copy(0, batch.predicted, values)


def scored_batch(sequences: Sequence[Tensor], images: Sequence[tuple[str, ...]] | None = None) -> MicroBatch:
    """Return a micro-batch of sequences in which every token is an action token."""
    rows = []
    for ids, paths in zip(sequences, images or [()] * len(sequences), strict=True):
        zeros = np.zeros(len(ids), np.float32)
        rows.append(TrainRow(ids.numpy(force=True), zeros == 0, zeros, zeros, expert=False, images=paths))
    return flatten(rows, sequences[0].device)


def _sample(vocabulary: int, device: torch.device) -> MicroBatch:
    """Return rows of several lengths, the same in every process; three of them begin alike, and two are equal."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary, (n,), generator=generator).to(device) for n in (24, 5, 2, 17)]
    return scored_batch([*rows, torch.cat([rows[0][:15], rows[3]]), torch.cat([rows[0][:9], rows[1]]), rows[1]])
