"""The actor model, gathered for saving and sending."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.files import atomic_folder
from rayrft.trainer.loading import load_policy
from rayrft.trainer.lora import checkpoint_name
from rayrft.trainer.policy import Policy

if TYPE_CHECKING:
    from rayrft.trainer.reward_model import RewardClassifier

_ONE_FILE = 5 << 30
"""Bytes up to which the first rank writes a model's weights, as one file."""

_LAYER = re.compile(r"(.*?\.\d+)\..*")
"""A parameter and its layer. Those of a layer stay together: a tensor in a file may be made of several."""


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights sent to engines, by checkpoint name and still sharded: all, or only the adapter's."""
    for name, parameter in policy.model.named_parameters():
        if policy.lora is None or parameter.requires_grad:
            yield checkpoint_name(name), parameter.detach()


def gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather a tensor that is sharded, in this dtype: fewer bytes travel if it is cast first. Shards that are kept in
    the host's memory are moved to the device of their mesh first, whose links are faster."""
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype)
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    shard = tensor.to_local().to(mesh.device_type, dtype)
    moved = DTensor.from_local(shard, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    return moved.full_tensor()


def save_hf(
    model: Policy | RewardClassifier, tokenizer: ChatTokenizer, folder: Path, *, dtype: torch.dtype, index: int = 0
) -> None:
    """Write a Hugging Face folder: weights in ``dtype`` (with an adapter merged), configuration, tokenizer.

    A collective that gathers one tensor at a time; ``index`` is that of this rank. The first rank keeps and writes
    them all; of a large model every rank a part, as a file of its own.
    """
    found = model.state_dict()
    large = model.lora is None and sum(each.numel() for each in found.values()) * dtype.itemsize > _ONE_FILE
    sizes, state = [0] * (dist.get_world_size() if large else 1), dict[str, Tensor]()
    for _, layer in groupby(found.items(), lambda each: _LAYER.sub(r"\1", each[0])):
        owner = sizes.index(min(sizes))
        for name, tensor in layer:
            sizes[owner] += tensor.numel()
            # An adapter is merged before its weights are rounded.
            rounds = model.lora is None and tensor.is_floating_point()
            whole = gather(tensor, dtype if rounds else tensor.dtype)
            if owner == index:
                state[name] = whole.cpu()
    if len(sizes) > 1:
        parts = [folder.with_name(f".{folder.name}.part-{owner}") for owner in range(len(sizes))]
        named = revert_weight_conversion(model.transformer, model.named_as_in_files(state))
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, parts[index], {"format": "pt"})
        dist.barrier()
        if index == 0:
            write_hf(model, {}, tokenizer, folder, dtype, parts)
    elif index == 0:
        write_hf(model, state, tokenizer, folder, dtype)


def write_hf(
    model: Policy | RewardClassifier,
    state: dict[str, Tensor],
    tokenizer: ChatTokenizer,
    folder: Path,
    dtype: torch.dtype,
    parts: Sequence[Path] = (),
) -> None:
    """Write a Hugging Face folder from gathered parameters, in ``dtype``, or with the files of ``parts``, which become
    its own. An adapter is merged into the frozen weights as read from their files, because the model's may be rounded
    to the compute dtype."""
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
        if parts:
            _move(parts, temporary)
        _name_dtype(temporary / "config.json", str(dtype).removeprefix("torch."))
        if model.images is not None:
            model.images.processor.save_pretrained(temporary)
        tokenizer.hf.save_pretrained(temporary)  # with the chat template that was trained with


def _move(parts: Sequence[Path], folder: Path) -> None:
    """Make files that have a part of the weights each those of a Hugging Face folder."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    places, size = dict[str, str](), 0
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        with safe_open(part, "pt") as weights:
            places |= dict.fromkeys(weights.keys(), name)
        with part.open("rb") as opened:
            size += part.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
        part.rename(folder / name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _name_dtype(file: Path, dtype: str) -> None:
    """Name the dtype of the files in a model's configuration, which says that of the model in memory."""
    config = json.loads(file.read_text())
    for section in (config, *(each for each in config.values() if isinstance(each, dict))):
        if "dtype" in section:
            section["dtype"] = dtype
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_adapter(policy: Policy, base: str, tokenizer: ChatTokenizer, folder: Path) -> None:
    """Write the adapter of an unsharded model as a peft folder, to be applied to the model ``base``."""
    assert policy.lora is not None
    settings = policy.lora.peft_config
    settings.base_model_name_or_path = base
    factors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in named_weights(policy)}
    with atomic_folder(folder) as temporary:
        settings.save_pretrained(str(temporary))
        save_file(factors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        tokenizer.hf.save_pretrained(temporary)
