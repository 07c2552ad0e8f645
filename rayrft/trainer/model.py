"""The actor model: loaded from Hugging Face format, sharded by FSDP2, gathered for saving and sending."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from rayrft.data.images import ImageReader, takes_images
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError, first_line
from rayrft.files import atomic_folder
from rayrft.trainer.lora import checkpoint_name
from rayrft.trainer.policy import Policy

if TYPE_CHECKING:
    from rayrft.trainer.reward_model import RewardClassifier
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
        problem = f"no causal language model can be loaded: {first_line(error)}"
        remedy = "give a folder in Hugging Face format, or the id of a model on the hub"
        raise ModelError(problem, remedy, field=field, value=path) from None
    return Policy(model, images)


Sharded = TypeVar("Sharded", bound="Policy | ScalarHead")


def shard(policy: Sharded, mesh: DeviceMesh, compute: torch.dtype, *, cpu_offload: bool = False) -> Sharded:
    """Shard by FSDP2: every decoder layer is a unit, the root holds the rest. Gradients are reduced in float32.

    ``cpu_offload``: parameters, gradients and optimiser state are kept in CPU memory while unused.
    """
    precision = (
        fsdp.MixedPrecisionPolicy()
        if compute == torch.float32
        else fsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    )
    offload = fsdp.CPUOffloadPolicy() if cpu_offload else fsdp.OffloadPolicy()
    layers = set(policy.model._no_split_modules or ())
    for module in policy.modules():
        if type(module).__name__ in layers:
            fsdp.fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fsdp.fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    if isinstance(policy, Policy):
        fsdp.register_fsdp_forward_method(policy, "top_logprobs")
    return policy


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: after a forward without backward the root module keeps them unsharded."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights sent to engines, by checkpoint name and still sharded: all, or only the adapter's."""
    for name, parameter in policy.model.named_parameters():
        if policy.lora is None or parameter.requires_grad:
            yield checkpoint_name(name), parameter.detach()


def save_hf(model: Policy | RewardClassifier, tokenizer: ChatTokenizer, folder: Path, *, writer: bool) -> None:
    """Write a Hugging Face folder: weights (with an adapter merged), configuration, tokenizer.

    A collective; only the ``writer`` rank writes.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)  # on the first rank alone
    if writer:
        write_hf(model, state, tokenizer, folder)


def write_hf(
    model: Policy | RewardClassifier, state: dict[str, Tensor], tokenizer: ChatTokenizer, folder: Path
) -> None:
    """Write a Hugging Face folder from gathered parameters. An adapter is merged into the frozen weights as read from
    their files, because the model's may be rounded to the compute dtype."""
    weights, target = model.named_as_in_files(state), model.transformer
    if model.lora is not None:
        frozen = load_policy(model.lora.base).model
        exact = (frozen if isinstance(model, Policy) else frozen.base_model).state_dict()
        exact = model.named_as_in_files({f"model.{name}": tensor for name, tensor in exact.items()})
        weights = model.lora.merged({name: exact.get(name, tensor) for name, tensor in weights.items()})
    with atomic_folder(folder) as temporary:
        if getattr(target, "generation_config", None) is not None:
            target.generation_config.eos_token_id = list(tokenizer.stop_ids)
        target.save_pretrained(temporary, state_dict=weights)
        if model.images is not None:
            model.images.processor.save_pretrained(temporary)
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
