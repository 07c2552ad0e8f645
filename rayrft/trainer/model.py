"""The actor model, gathered for saving and sending."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.files import atomic_folder
from rayrft.trainer.loading import load_policy
from rayrft.trainer.lora import checkpoint_name
from rayrft.trainer.policy import Policy

if TYPE_CHECKING:
    from rayrft.trainer.reward_model import RewardClassifier


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights sent to engines, by checkpoint name and still sharded: all, or only the adapter's."""
    for name, parameter in policy.model.named_parameters():
        if policy.lora is None or parameter.requires_grad:
            yield checkpoint_name(name), parameter.detach()


def save_hf(
    model: Policy | RewardClassifier, tokenizer: ChatTokenizer, folder: Path, *, dtype: torch.dtype, writer: bool
) -> None:
    """Write a Hugging Face folder: weights in ``dtype`` (with an adapter merged), configuration, tokenizer.

    A collective that gathers one tensor at a time; only the ``writer`` rank keeps and writes them.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if model.lora is None and tensor.is_floating_point():  # an adapter is merged first
            tensor = tensor.to(dtype)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if writer:
            state[name] = whole.cpu()
    if writer:
        write_hf(model, state, tokenizer, folder, dtype)


def write_hf(
    model: Policy | RewardClassifier,
    state: dict[str, Tensor],
    tokenizer: ChatTokenizer,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write a Hugging Face folder from gathered parameters, in ``dtype``. An adapter is merged into the frozen weights
    as read from their files, because the model's may be rounded to the compute dtype."""
    weights, target = model.named_as_in_files(state), model.transformer
    if model.lora is not None:
        frozen = load_policy(model.lora.base).model
        exact = (frozen if isinstance(model, Policy) else frozen.base_model).state_dict()
        exact = model.named_as_in_files({f"model.{name}": tensor for name, tensor in exact.items()})
        weights = model.lora.merged({name: exact.get(name, tensor) for name, tensor in weights.items()})
    weights = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    with atomic_folder(folder) as temporary:
        if getattr(target, "generation_config", None) is not None:
            target.generation_config.eos_token_id = list(tokenizer.stop_ids)
        target.save_pretrained(temporary, state_dict=weights)
        _name_dtype(temporary / "config.json", str(dtype).removeprefix("torch."))
        if model.images is not None:
            model.images.processor.save_pretrained(temporary)
        tokenizer.hf.save_pretrained(temporary)  # with the chat template that was trained with


def _name_dtype(file: Path, dtype: str) -> None:
    """Name the dtype of the files in a model's configuration, which says that of the model in memory."""
    config = json.loads(file.read_text())
    for section in (config, *(each for each in config.values() if isinstance(each, dict))):
        if "dtype" in section:
            section["dtype"] = dtype
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_adapter(policy: Policy, base: str, tokenizer: ChatTokenizer, folder: Path) -> None:
    """Write the adapter of an unsharded model as a peft folder, to be applied to the model ``base``."""
    from safetensors.torch import save_file

    assert policy.lora is not None
    settings = policy.lora.peft_config
    settings.base_model_name_or_path = base
    factors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in named_weights(policy)}
    with atomic_folder(folder) as temporary:
        settings.save_pretrained(str(temporary))
        save_file(factors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        tokenizer.hf.save_pretrained(temporary)
