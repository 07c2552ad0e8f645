"""How much memory a rank needs, by its model, the number of ranks and the tokens of a micro-batch; nothing is loaded.

Adam in float32 on sharded weights: 12 bytes a parameter over the ranks, and 4 for the gradient (ZeRO, arXiv:1910.02054,
3). Activations are counted: what the model's own layers keep for the backward pass, on the device ``meta``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from rayrft.config.trainer import TrainerConfig
from rayrft.data.images import takes_images
from rayrft.errors import ModelError, first_line
from rayrft.trainer import packing
from rayrft.trainer.head import LOGITS, chunk_tokens
from rayrft.trainer.learner import accumulates_whole
from rayrft.trainer.loading import sends_tokens
from rayrft.weights.nf4 import BLOCK

_META = torch.device("meta")
_WEIGHT, _GRADIENT, _MOMENTS = 4, 4, {"float32": 8, "8bit": 2}
"""Bytes of a trained parameter: its master weight; its gradient; two moments."""

_DEQUANTISED = 6
"""Bytes of a number while it is made whole, besides the weight: in float32, and half an index."""

_TOKENS = 1024
"""Tokens with which activations are counted."""


@dataclass(frozen=True)
class Shape:
    """Numbers that a model's memory follows from."""

    parameters: int
    root: int
    """Parameters outside the layers: embedding, head and norms."""
    layer: int
    """Parameters of the largest layer."""
    experts: int
    """Of these, what is in experts that ranks may share (`TrainerConfig.expert_parallel`)."""
    layers: int
    hidden: int
    vocabulary: int
    linear: int
    """Inputs and outputs of all linear layers of the decoder, which an adapter has factors of."""
    adapted: int
    """Parameters of these layers, which may be in 4 bits under an adapter."""
    widest: int
    """Those of the largest, which is made whole when it is used."""
    kv_numbers: int
    """Numbers in the KV cache of a token, in all layers."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the GPU of a rank."""

    states: float
    gradients: float
    gathered: float
    head: float
    activations: float
    models: float
    """Reference, critic and teacher."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@cache
def shape_of(path: str, field: str = "model.path") -> Shape:
    """Return the shape of a model. Raises ModelError, which names the config's ``field``, if there is none."""
    config, auto = _kind(path, field)
    with _META:
        return _shape(auto.from_config(config))


@cache
def activation_bytes(path: str) -> float:
    """Return the bytes that a layer of a model keeps of a token for the backward pass, in half precision.

    Raises ModelError if there is no such model, or if its layers cannot be run without memory.
    """
    config, auto = _kind(path)
    try:
        one, two = (_saved_bytes(config, auto, count) for count in (1, 2))
    except Exception as error:  # architectures fail in many ways on inputs that they are not made for
        raise _uncounted(error, path) from None
    return (two - one) / _TOKENS


@cache
def tower_bytes(path: str) -> tuple[float, float]:
    """Return the bytes that the vision tower of a model keeps of an image token for the backward pass, in half
    precision, without gradient checkpointing and with it; zeros for a model of texts. Raises as `activation_bytes`."""
    config, auto = _kind(path)
    if not takes_images(path):
        return 0.0, 0.0
    try:
        depth, tokens = config.vision_config.depth, _TOKENS / config.vision_config.spatial_merge_size**2
        (one, state), (two, _) = (_tower_bytes(config, auto, count) for count in (1, 2))
    except Exception as error:  # as above
        raise _uncounted(error, path) from None
    return (one + (depth - 1) * (two - one)) / tokens, (one + depth * state) / tokens


def _uncounted(error: Exception, path: str) -> ModelError:
    problem = f"activations cannot be counted without memory: {first_line(error)}"
    return ModelError(problem, "measure them by one step of a run", field="model.path", value=path)


def memory_savings(
    path: str, config: TrainerConfig, parts: Collection[str], *, half: bool, teacher: str | None = None, **beside: Any
) -> list[tuple[str, float]]:
    """Return changes of the config with the bytes by which each lowers ``parts`` of the memory of a rank, the largest
    first; nothing if the activations of the model cannot be counted. ``beside``: ``reference`` and ``critic``."""
    try:
        shape, activation = shape_of(path), activation_bytes(path)
        teaches = shape_of(teacher) if teacher else None
    except ModelError:
        return []
    gpu_bytes = torch.cuda.mem_get_info()[1] if torch.cuda.is_initialized() else 80e9  # type: ignore[no-untyped-call]
    chunk = (config.head_chunk or chunk_tokens(shape.vocabulary, gpu_bytes)) // 2
    tokens, ranks = config.micro_batch_tokens // 2, 2 * config.ranks
    changes: dict[str, dict[str, Any]] = {
        "set trainer.gradient_checkpointing: true": {"gradient_checkpointing": True},
        f"lower trainer.micro_batch_tokens to {tokens}": {"micro_batch_tokens": tokens},
        f"lower trainer.head_chunk to {chunk}": {"head_chunk": chunk},
        "set trainer.accumulate: sharded": {"accumulate": "sharded"},
        f"raise trainer.ranks to {ranks}": {"ranks": ranks},
        "set trainer.moments: 8bit (package torchao)": {"moments": "8bit"},
    }
    if config.lora is not None:
        changes["set trainer.lora.frozen: nf4"] = {"lora": config.lora.model_copy(update={"frozen": "nf4"})}
    if config.replicas == 1:
        changes["set trainer.expert_parallel: true"] = {"expert_parallel": True}
    if config.gpus:
        changes["set trainer.cpu_offload: true"] = {"cpu_offload": True}

    def total(change: dict[str, Any]) -> float:
        settings, models = config.model_copy(update=change), {"teacher": teaches, **beside}
        memory = rank_memory(shape, settings, half=half, activation=activation, gpu_bytes=gpu_bytes, **models)
        return sum(getattr(memory, part) for part in parts)

    saved = [(text, total({}) - total(change)) for text, change in changes.items()]
    return sorted((each for each in saved if each[1] > 0), key=lambda each: -each[1])


def _kind(path: str, field: str = "model.path") -> tuple[Any, Any]:
    """Return a model's config, and the auto class of transformers that makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        auto = AutoModelForImageTextToText if takes_images(path) else AutoModelForCausalLM
        return AutoConfig.from_pretrained(path), auto
    except (OSError, ValueError) as error:
        remedy = "give a folder in Hugging Face format, or the id of a model on the hub"
        raise ModelError(f"no model: {first_line(error)}", remedy, field=field, value=path) from None


def rank_memory(
    shape: Shape,
    config: TrainerConfig,
    *,
    half: bool,
    activation: float = 0.0,
    tower: tuple[float, float] = (0.0, 0.0),
    reference: bool = False,
    critic: bool = False,
    teacher: Shape | None = None,
    gpu_bytes: float = 80e9,
) -> RankMemory:
    """Return the memory of a rank whose compute is in ``half`` precision, or in float32. Models are sharded over the
    ranks of a replica; the run's parameters are trained, or an adapter of theirs. ``activation`` is that of
    `activation_bytes`, and ``tower`` that of `tower_bytes`, in the mean of the tokens. On a GPU of ``gpu_bytes`` the
    head takes its share of them, unless the config has the tokens of a chunk."""
    compute, ranks, tokens = 2 if half else 4, config.shards, config.micro_batch_tokens
    adapter, trained = config.lora is not None, _trained(shape, config)
    quantised = config.lora is not None and config.lora.frozen == "nf4"
    saved = quantised * (compute - 0.5 - compute / BLOCK) * shape.adapted  # of all layers
    frozen = compute * shape.parameters - saved if adapter else 0
    whole = accumulates_whole(config.accumulate, trained)
    of_layer = activation * compute / 2
    kept = compute * shape.hidden if config.gradient_checkpointing else of_layer
    activations = tokens * (shape.layers * kept + config.gradient_checkpointing * of_layer)
    activations += tokens * tower[config.gradient_checkpointing] * compute / 2
    state = _WEIGHT + _MOMENTS[config.moments]
    models = _GRADIENT * trained if reference and not adapter else 0
    models += compute * teacher.parameters if teacher else 0
    models += (state + _GRADIENT) * trained if critic else 0
    logits = LOGITS * 4 * (config.head_chunk or chunk_tokens(shape.vocabulary, gpu_bytes)) * shape.vocabulary
    on_gpu = 0 if config.cpu_offload else 1
    elsewhere = shape.experts * (ranks - 1) // ranks if config.expert_parallel else 0
    return RankMemory(
        states=on_gpu * (state * trained + frozen) / ranks,
        gradients=on_gpu * _GRADIENT * trained / (1 if whole else ranks),
        gathered=compute * (shape.root + 2 * (shape.layer - elsewhere))
        - 2 * saved / shape.layers
        + quantised * (_DEQUANTISED + compute) * shape.widest,
        head=4 * shape.vocabulary * shape.hidden + logits,
        activations=activations,
        models=on_gpu * models / ranks,
    )


def checkpoint_bytes(shape: Shape, config: TrainerConfig, *, reference: bool, critic: bool, reward_model: bool) -> int:
    """Return the size of a checkpoint: weights and moments of trained models, weights of the reference (none with an
    adapter), and those of the policy in a stage that trains a reward model."""
    frozen = (reference and config.lora is None) + reward_model
    return _trained(shape, config) * ((_WEIGHT + _MOMENTS[config.moments]) * (1 + critic) + _WEIGHT * frozen)


def _trained(shape: Shape, config: TrainerConfig) -> int:
    """Return the number of the policy's parameters that are trained: all, or those of an adapter."""
    return shape.parameters if config.lora is None else config.lora.rank * shape.linear


def _shape(model: Any) -> Shape:
    text = model.config.get_text_config()
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    sizes = [_numbers(layer) for layer in layers]
    spread = [[each for each in layer.modules() if hasattr(each, "_is_expert_parallel")] for layer in layers]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    linear = [each for each in model.base_model.modules() if isinstance(each, nn.Linear)]
    return Shape(
        parameters=_numbers(model),
        root=_numbers(model) - sum(sizes),
        layer=max(sizes, default=0),
        experts=max((sum(map(_numbers, each)) for each in spread), default=0) if sends_tokens(model) else 0,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        linear=sum(each.in_features + each.out_features for each in linear),
        adapted=sum(each.weight.numel() for each in linear),
        widest=max((each.weight.numel() for each in linear), default=0),
        kv_numbers=2 * text.num_hidden_layers * heads * width,
    )


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _saved_bytes(config: Any, auto: Any, layers: int) -> int:
    """Return the bytes that the backward pass of a model of so many layers needs, without its weights and head."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    packing.register()
    with _META:
        model = auto.from_config(config, dtype=torch.bfloat16).base_model
        model.set_attn_implementation(packing.ATTENTION)
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
    layout = packing.on_device(packing.Packing.of([np.arange(_TOKENS)]), _META)
    return _kept_bytes(model, lambda: model(input_ids=ids, position_ids=layout.positions[None], packing=layout))


def _tower_bytes(config: Any, auto: Any, blocks: int) -> tuple[int, int]:
    """Return the bytes that the backward pass of a vision tower of so many blocks needs, and those of a block's input.
    Its sizes are computed from the grid of an image, so only the other tensors are without memory."""
    config = copy.deepcopy(config)
    config.vision_config.depth = blocks
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower = auto.from_config(config, dtype=torch.bfloat16).base_model.visual
        patches = torch.zeros(_TOKENS, tower.patch_embed.proj.weight[0].numel(), dtype=torch.bfloat16)
    side = math.isqrt(_TOKENS)
    kept = _kept_bytes(tower, lambda: tower(patches, grid_thw=torch.tensor([[1, side, side]])))
    return kept, 2 * _TOKENS * tower.blocks[0].norm1.weight.numel()


def _kept_bytes(model: Any, forward: Callable[[], Any]) -> int:
    """Return the bytes of what a forward pass keeps, without the model's weights."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())
