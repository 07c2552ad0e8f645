"""The actor model: loaded from Hugging Face format, sharded by FSDP2, gathered for saving and sending."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rayrft.data.images import ImageReader, takes_images
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError
from rayrft.files import atomic_folder
from rayrft.trainer.lora import checkpoint_name
from rayrft.trainer.policy import Policy

if TYPE_CHECKING:
    from rayrft.trainer.lora import Lora
    from rayrft.trainer.value_model import ScalarHead


def load_policy(path: str, field: str = "model.path") -> Policy:
    """Load a language or vision-language model in float32 (the master weights).

    Raises ModelError, which names the config's ``field``, if none can be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        images = ImageReader(path) if takes_images(path) else None
        kind = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
        model = kind.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        problem = f"no causal language model can be loaded: {str(error).splitlines()[0]}"
        remedy = "give a folder in Hugging Face format, or the id of a model on the hub"
        raise ModelError(problem, remedy, field=field, value=path) from None
    return Policy(model, images)


Sharded = TypeVar("Sharded", bound="Policy | ScalarHead")


def shard(policy: Sharded, mesh: DeviceMesh, compute: torch.dtype, *, cpu_offload: bool = False) -> Sharded:
    """Shard by FSDP2: every decoder layer is a unit, the root holds the rest. Gradients are reduced in float32.

    ``cpu_offload``: parameters, gradients and optimiser state are kept in CPU memory while unused.
    """
    precision = (
        MixedPrecisionPolicy()
        if compute == torch.float32
        else MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    )
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    layers = set(policy.model._no_split_modules or ())
    for module in policy.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    if isinstance(policy, Policy):
        register_fsdp_forward_method(policy, "top_logprobs")
    return policy


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: after a forward without backward the root module keeps them unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights sent to engines, by checkpoint name and still sharded: all, or only the adapter's."""
    for name, parameter in policy.model.named_parameters():
        if policy.lora is None or parameter.requires_grad:
            yield checkpoint_name(name), parameter.detach()


def full_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Iterate over `named_weights`, gathered. A collective: all ranks iterate in step."""
    for name, tensor in named_weights(policy):
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_hf(policy: Policy, tokenizer: ChatTokenizer, folder: Path, *, writer: bool) -> None:
    """Write a Hugging Face folder: weights (with an adapter merged), configuration, tokenizer.

    A collective; only the ``writer`` rank writes.
    """
    state = gathered(policy)
    if not writer:
        return
    write_hf(policy, {name.removeprefix("model."): tensor for name, tensor in state.items()}, tokenizer, folder)


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters of a sharded model, in CPU memory. A collective; they are on the first rank alone."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


def write_hf(policy: Policy, state: dict[str, Tensor], tokenizer: ChatTokenizer, folder: Path) -> None:
    """Write a Hugging Face folder from gathered parameters. An adapter is merged into the frozen weights as read from
    their files, because the model's may be rounded to the compute dtype."""
    # Keep one of two tied weights: gathered from shards they are separate tensors, and both would be written.
    tied = set(policy.model.all_tied_weights_keys)
    weights = {checkpoint_name(name): tensor for name, tensor in state.items()}
    weights = {name: tensor for name, tensor in weights.items() if name not in tied}
    if policy.lora is not None:
        exact = exact_weights(policy.lora)
        weights = policy.lora.merged({name: exact.get(name, tensor) for name, tensor in weights.items()})
    write_folder(policy.model, weights, tokenizer, folder, policy.images)


def exact_weights(lora: Lora, *, decoder: bool = False) -> dict[str, Tensor]:
    """Return the frozen weights under an adapter as they are in their files, of the whole model or its ``decoder``."""
    model = load_policy(lora.base).model
    weights: dict[str, Tensor] = (model.base_model if decoder else model).state_dict()
    return weights


def write_folder(
    model: Any, weights: dict[str, Tensor], tokenizer: ChatTokenizer, folder: Path, images: ImageReader | None = None
) -> None:
    """Write a Hugging Face folder of a model with these weights, by the names in its files."""
    with atomic_folder(folder) as temporary:
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.eos_token_id = list(tokenizer.stop_ids)
        model.save_pretrained(temporary, state_dict=weights)
        if images is not None:
            images.processor.save_pretrained(temporary)
        tokenizer.hf.save_pretrained(temporary)  # with the chat template that was trained with


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


def load_hf(policy: Policy, folder: str) -> None:
    """Load the weights of a Hugging Face folder into a sharded model. A collective.

    With an adapter they become its frozen base, and the adapter is reset.
    """
    state = load_policy(folder).state_dict()
    if policy.lora is not None:
        policy.lora.base = folder
        state = {name: state[checkpoint_name(name)] for name in policy.state_dict() if ".lora_" not in name}
        state |= {f"model.{name}": factor for name, factor in policy.lora.initial_factors().items()}
    set_model_state_dict(policy, state, options=StateDictOptions(full_state_dict=True))
