"""The actor model: loaded from Hugging Face format, sharded by FSDP2, gathered again for saving and sending."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rayrft.errors import ModelError


def load_model(path: str) -> nn.Module:
    """A causal language model in float32 (the master weights). Raises ModelError where none can be loaded."""
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no causal language model can be loaded: {str(error).splitlines()[0]}",
            field="model.path",
            value=path,
        ) from None
    model.train()
    return model


def shard(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype) -> nn.Module:
    """FSDP2: every decoder layer is a unit, and the root holds the rest. Gradients are reduced in float32."""
    policy = (
        MixedPrecisionPolicy()
        if compute == torch.float32
        else MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    )
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def reshard(model: nn.Module) -> None:
    """Free gathered parameters. After a forward without backward the root keeps them, and would show them unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, gathered, under its checkpoint name. A collective: all ranks iterate in step."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save_hf(model: nn.Module, tokenizer_from: str, folder: Path, *, writer: bool) -> None:
    """Write a Hugging Face folder: weights, configuration, tokenizer. A collective; only ``writer`` touches the disk.

    The folder appears at once and whole, or not at all.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if not writer:
        return
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    hf: Any = model
    hf.save_pretrained(temporary, state_dict=state)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(temporary)
    _sync_to_disk(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def load_hf(model: nn.Module, folder: Path) -> None:
    """Put the weights of a Hugging Face folder into a sharded model. A collective."""
    state = load_model(str(folder)).state_dict()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def _sync_to_disk(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
