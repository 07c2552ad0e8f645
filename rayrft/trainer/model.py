"""The actor model, gathered for saving and sending."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.files import atomic_folder, storage_error
from rayrft.trainer.loading import load_like, spreads_experts
from rayrft.trainer.lora import checkpoint_name
from rayrft.trainer.policy import Policy

if TYPE_CHECKING:
    from rayrft.trainer.reward_model import RewardClassifier

ONE_FILE = 5 << 30
"""Bytes up to which the first rank writes a model's weights, as one file."""

_LAYER = re.compile(r"(.*?\.\d+|.*?(?=\.(base_layer|lora_[AB])\.))\..*")
"""A parameter and its layer. Those of a layer stay together: a tensor in a file may be made of several."""


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights sent to engines, by checkpoint name and still sharded: all, or only the adapter's."""
    for name, parameter in policy.model.named_parameters():
        if policy.lora is None or parameter.requires_grad:
            yield checkpoint_name(name), parameter.detach()


def gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather a tensor that is sharded, in this dtype: fewer bytes travel if it is cast first. Shards that are kept in
    the host's memory are moved to the device of their mesh first, whose links are faster. A tensor that this rank has
    whole is returned as it is, in its own dtype: a cast would be one more copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, shape, stride, local = tensor.device_mesh, tensor.shape, tensor.stride(), tensor.to_local()
    if mesh.size() == 1:
        return local.to(mesh.device_type)
    shard, placements = local.to(mesh.device_type, dtype), tensor.placements
    if spreads_experts(mesh):  # the other dimension, of size 1, would be gathered by itself
        mesh, placements = mesh["experts"], (Shard(0),)
    moved = DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
    return moved.full_tensor()


def save_hf(
    model: Policy | RewardClassifier,
    tokenizer: ChatTokenizer,
    folder: Path,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
) -> Callable[[], None]:
    """Gather the weights for a Hugging Face folder, one tensor at a time; return the function that writes it: weights
    in ``dtype`` (with an adapter merged), configuration, tokenizer. It may be called beside training.

    Both are collectives, the latter over ``group``. The first rank keeps and writes all weights; of a large model every
    rank a part, as a file of its own. The latter raises StorageError on all ranks if one cannot write.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = _exact(model, dtype)
    large = sum(each.numel() for each in found.values()) * dtype.itemsize > ONE_FILE
    sizes, state = [0] * (ranks if large else 1), dict[str, Tensor]()
    for _, layer in groupby(found.items(), lambda each: _LAYER.sub(r"\1", each[0])):
        owner = sizes.index(min(sizes))
        for name, tensor in layer:
            sizes[owner] += tensor.numel()
            # An adapter is merged before its weights are rounded.
            rounds = model.lora is None and tensor.is_floating_point()
            kept = dtype if rounds else tensor.dtype
            whole = gather(tensor, kept)
            if owner == rank:
                state[name] = whole.to("cpu", kept, copy=True)  # training continues
    parts = [folder.with_name(f".{folder.name}.part-{owner}") for owner in range(len(sizes))] if large else []

    def write_part() -> None:
        if parts:
            named = revert_weight_conversion(model.transformer, _in_files(model, state, dtype))
            save_file({name: tensor.contiguous() for name, tensor in named.items()}, parts[rank], {"format": "pt"})

    def write_folder() -> None:
        if rank == 0:
            write_hf(model, {} if parts else state, tokenizer, folder, dtype, parts)

    def write() -> None:
        for work in (write_part, write_folder):
            _on_all(work, ranks, folder, group)

    return write


def _on_all(work: Callable[[], None], ranks: int, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Let every rank write. Raises StorageError about the folder on all of them if one cannot."""
    found: list[OSError | None] = [None] * ranks
    try:
        work()
    except OSError as error:
        found[0] = error
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        found[0] = OSError(int(number[1]), os.strerror(int(number[1])))
    if ranks > 1:
        dist.all_gather_object(found, found[0], group=group)
    for problem in filter(None, found):
        raise storage_error(problem, folder, "")


def _exact(model: Policy | RewardClassifier, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters, sharded as they are; the frozen ones under an adapter as read from their files, if the
    model's are rounded to the compute dtype. A collective."""
    found: dict[str, Tensor] = model.state_dict()
    if model.lora is None:
        return found
    base, held = model.lora.base, next(each for each in model.parameters() if not each.requires_grad)
    if held.dtype == torch.float32 or held.dtype == dtype == AutoConfig.from_pretrained(base).dtype:
        return found
    frozen = load_like(model, base, torch.float32, torch.device("cpu")).model
    exact = (frozen if isinstance(model, Policy) else frozen.base_model).state_dict()
    return {
        name: each if model.lora.quantises(name) else exact.get(checkpoint_name(name).removeprefix("model."), each)
        for name, each in found.items()
    }


def _in_files(model: Policy | RewardClassifier, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return gathered parameters by their names in files, in ``dtype``, with the adapter merged."""
    weights = model.named_as_in_files(state)
    if model.lora is not None:
        weights = model.lora.merged(weights)
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def write_hf(
    model: Policy | RewardClassifier,
    state: dict[str, Tensor],
    tokenizer: ChatTokenizer,
    folder: Path,
    dtype: torch.dtype,
    parts: Sequence[Path] = (),
) -> None:
    """Write a Hugging Face folder from gathered parameters, in ``dtype`` with the adapter merged, or with the files of
    ``parts``, which become its own."""
    weights, target = _in_files(model, state, dtype), model.transformer
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
