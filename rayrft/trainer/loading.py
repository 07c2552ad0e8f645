"""Models of ranks: built without memory, sharded, and filled with a rank's own part of the weights in their files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from rayrft.config.trainer import TrainerConfig
from rayrft.data.images import ImageReader, takes_images
from rayrft.errors import ModelError, first_line
from rayrft.trainer.lora import Lora, checkpoint_name
from rayrft.trainer.policy import Policy
from rayrft.weights.nf4 import quantise

if TYPE_CHECKING:
    from rayrft.trainer.value_model import ScalarHead

_LEAST_LAYERS = 2
"""Fast paths are judged on at least so many layers, and on as many as have one of every kind."""

_CPU = torch.device("cpu")

Sharded = TypeVar("Sharded", bound="Policy | ScalarHead")


def rank_mesh(device: str, ranks: int, replicas: int) -> DeviceMesh:
    """Return the mesh of all ranks, with a dimension for the ``replicas`` if there are several. A collective."""
    if replicas == 1:
        return init_device_mesh(device, (ranks,))
    return init_device_mesh(device, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def expert_mesh(device: str, ranks: int) -> DeviceMesh:
    """Return the mesh over which experts are spread. A collective."""
    return init_device_mesh(device, (1, ranks), mesh_dim_names=("copies", "experts"))


def sends_tokens(model: Any) -> bool:
    """Return whether transformers has a plan for a model by which tokens travel to its experts."""
    return "ep_dispatch_experts" in model.ep_plan.values()


def spreads_experts(mesh: DeviceMesh) -> bool:
    """Return whether a mesh is that of `expert_mesh`."""
    return "experts" in (mesh.mesh_dim_names or ())


def shard(
    policy: Sharded,
    mesh: DeviceMesh,
    compute: torch.dtype,
    *,
    cpu_offload: bool = False,
    experts: DeviceMesh | None = None,
) -> Sharded:
    """Shard by FSDP2: every decoder layer is a unit, the root holds the rest. Gradients are reduced in float32, over
    the last dimension of the mesh and then over the replicas of the first (HSDP), if it has two.

    ``cpu_offload``: parameters, gradients and optimiser state are kept in CPU memory while unused. ``experts``: the
    mesh over which those of each layer are spread (see `TrainerConfig.expert_parallel`).
    """
    mixed = compute != torch.float32
    precision = fsdp.MixedPrecisionPolicy(compute if mixed else None, torch.float32 if mixed else None)
    offload = fsdp.CPUOffloadPolicy() if cpu_offload else fsdp.OffloadPolicy()
    if experts is not None:
        for module in _spread(policy.model, experts):
            fsdp.fully_shard(module, mesh=experts["copies"], mp_policy=precision, offload_policy=offload)
            module.set_gradient_divide_factor(float(mesh.size()))  # an expert's gradient is of the rows of all ranks
    layers = set(policy.model._no_split_modules or ())
    for module in policy.modules():
        if type(module).__name__ in layers:
            fsdp.fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fsdp.fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)
    if isinstance(policy, Policy):
        fsdp.register_fsdp_forward_method(policy, "top_logprobs")
    return policy


def _spread(model: Any, mesh: DeviceMesh) -> list[Any]:
    """Give every rank its part of the experts of each layer, and let tokens travel to them, by the plan that
    transformers has for the model. Return the modules of experts."""
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    problem = "" if sends_tokens(model) else "the model has no experts to which tokens could travel"
    try:
        apply_expert_parallelism(model, mesh["experts"], None, model.ep_plan)
    except ValueError as error:
        problem = first_line(error)
    if problem:
        remedy = "set it to false, or trainer.ranks to a divisor of the number of experts"
        raise ModelError(problem, remedy, field="trainer.expert_parallel", value=type(model).__name__)
    return [module for module in model.modules() if getattr(module, "_is_expert_parallel", False)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: after a forward without backward the root module keeps them unsharded."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def load_policy(
    path: str,
    field: str = "model.path",
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    prepare: Callable[[Policy], Any] = lambda policy: None,
    cut: bool = False,
) -> Policy:
    """Load a language or vision-language model with weights of ``dtype``, or a ``cut``: its first few layers.

    ``prepare`` gets the policy before it has memory (its parameters are on the device ``meta``) and may add an adapter
    and shard it. Of a sharded parameter only the rank's own part is read, so that a rank holds no more than its parts
    and the tensors of one layer. Raises ModelError, which names the config's ``field``, if none can be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.distributed.configuration_utils import DistributedConfig

    try:
        images = ImageReader(path) if takes_images(path) else None
        auto = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
        config = AutoConfig.from_pretrained(path)
        kind, config = _class_of(auto, config)
        if cut:
            _cut(config)
        made: list[Policy] = []

        def build(model: Any) -> Policy:
            model.tie_weights()  # FSDP must know that two are one
            made.append(Policy(model, images))
            prepare(made[0])
            return made[0]

        model = _filled(kind, build, device, cut).from_pretrained(
            path, config=config, dtype=dtype, distributed_config=DistributedConfig()
        )
    except (OSError, ValueError) as error:
        problem = f"no causal language model can be loaded: {first_line(error)}"
        remedy = "give a folder in Hugging Face format, or the id of a model on the hub"
        raise ModelError(problem, remedy, field=field, value=path) from None
    model.__class__ = kind
    del model.config.distributed_config
    return made[0]


@dataclass(frozen=True)
class FastPaths:
    """Which fast paths keep a model's log-probs (see `Policy`), and what the others change."""

    packs: bool
    chunks_head: bool
    warning: str | None


class Loader:
    """Loads the models of a rank: policy, critic, reward model and teacher. Every method is a collective."""

    def __init__(
        self, config: TrainerConfig, mesh: DeviceMesh, device: torch.device, compute: torch.dtype, seed: int
    ) -> None:
        self._config, self._mesh, self._compute, self._seed = config, mesh, compute, seed
        self._experts = expert_mesh(mesh.device_type, mesh.size()) if config.expert_parallel else None
        self._device = device
        self._paths: dict[str, FastPaths] = {}

    def load(
        self, path: str, kind: Callable[[Policy], Sharded], *, field: str = "model.path", frozen: bool = False
    ) -> Sharded:
        """Load the run's model, or one of its kind, as ``kind`` makes it of a policy; with the run's adapter, unless it
        is ``frozen``. Master weights are in float32, frozen ones in the compute dtype. Raises as `load_policy` does."""
        config, paths = self._config, self.fast_paths(path, field)
        lora, made = None if frozen else config.lora, list[Sharded]()

        def prepare(policy: Policy) -> None:
            policy.use(packs=paths.packs, chunks_head=paths.chunks_head)
            policy.head_chunk = config.head_chunk
            if config.gradient_checkpointing and not frozen:
                policy.checkpoint_layers()
            if config.router_loss and not frozen:
                policy.balance_experts(config.router_loss)
            if config.compile == "layers":
                policy.compile_layers()
            if lora is not None:
                policy.lora = Lora(policy.model, lora, origin=path, compute=self._compute, seed=self._seed)
            if frozen:
                policy.requires_grad_(False)
            experts = None if frozen and not sends_tokens(policy.model) else self._experts  # such as a dense teacher
            offload = config.cpu_offload
            made.append(shard(kind(policy), self._mesh, self._compute, cpu_offload=offload, experts=experts))

        dtype = torch.float32 if lora is None and not frozen else self._compute
        device = _CPU if config.cpu_offload else self._device
        load_policy(path, field, dtype=dtype, device=device, prepare=prepare)
        [model] = made
        empty = {name: weight for name, weight in model.named_parameters() if weight.device.type == "meta"}
        zeros = {name: torch.zeros(weight.shape, dtype=weight.dtype) for name, weight in empty.items()}
        _fill(model, zeros, device)  # the head of a critic or reward model is in no file, and is zero
        return model

    def fast_paths(self, path: str, field: str = "model.path") -> FastPaths:
        """Return the fast paths of a model, which the first rank finds on its first layers."""
        if path not in self._paths:
            found: list[Any] = [None]
            if dist.get_rank() == 0:
                try:
                    policy = load_policy(path, field, device=self._device, cut=True)
                    warning = policy.enable_fast_paths(pack=self._config.pack, compute=self._compute)
                    found = [FastPaths(policy.packs, policy.chunks_head, warning)]
                except ModelError as error:
                    found = [error]
            dist.broadcast_object_list(found)
            if isinstance(found[0], ModelError):
                raise found[0]
            self._paths[path] = found[0]
        return self._paths[path]


def load_like(model: nn.Module, folder: str, dtype: torch.dtype, device: torch.device) -> Policy:
    """Load a model, sharded as another one is, if it is."""
    meshes = {each.device_mesh for each in model.parameters() if isinstance(each, DTensor)}
    experts = next(filter(spreads_experts, meshes), None)
    whole = next((mesh for mesh in meshes if mesh is not experts), None)

    def prepare(fresh: Policy) -> None:
        if whole is not None:
            shard(fresh, whole, dtype, experts=experts)

    return load_policy(folder, dtype=dtype, device=device, prepare=prepare)


@torch.no_grad()
def load_hf(policy: Policy, folder: str) -> None:
    """Load the weights of a Hugging Face folder, or a model on the hub, into a model, if it is sharded by its parts.

    With an adapter they become its frozen base, and the adapter is reset.
    """
    reshard(policy)
    held = dict(policy.model.named_parameters())
    example = next(weight for name, weight in held.items() if ".lora_" not in name)
    theirs = dict(load_like(policy, folder, example.dtype, example.device).model.named_parameters())
    factors = policy.lora.initial_factors() if policy.lora is not None else {}
    for name, weight in held.items():
        value = _placed(factors[name], weight) if name in factors else theirs[checkpoint_name(name)]
        in_4_bits = policy.lora is not None and policy.lora.quantises(name)
        _own(weight).copy_(quantise(_own(value)) if in_4_bits else _own(value))
    if policy.lora is not None:
        policy.lora.base = folder


def _class_of(auto: Any, config: Any) -> tuple[Any, Any]:
    """Return the class that an auto class of transformers loads for a config, and the (part of the) config it takes."""
    from transformers.models.auto.auto_factory import _get_model_class

    if type(config) not in auto._model_mapping:
        raise ValueError(f"{type(config).__name__} is a config of no such model")
    kind = _get_model_class(config, auto._model_mapping)
    of_text = kind.config_class == config.sub_configs.get("text_config")
    return kind, config.get_text_config() if of_text else config


def _cut(config: Any) -> None:
    """Leave the first layers of a model: at least two, and one of every kind."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    count = max([_LEAST_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))])
    count = min(text.num_hidden_layers, count + getattr(text, "first_k_dense_replace", 0))
    text.num_hidden_layers = count
    if kinds:
        text.layer_types = kinds[:count]


def _filled(kind: Any, build: Callable[[Any], Policy], device: torch.device, cut: bool) -> Any:
    """Return a subclass of a model class of transformers, whose `from_pretrained` lets ``build`` make a policy of the
    model before its weights are read. Each weight is then read onto the device, as it is sharded."""

    class Filled(kind):
        @classmethod
        def maybe_distribute_model(cls, model: Any, *_: Any) -> Any:
            model.policy = [build(model)]  # in a list: it is not a submodule
            return model

        @staticmethod
        def _load_pretrained_model(model: Any, state_dict: Any, files: list[str], how: Any, *_: Any) -> Any:
            from transformers.core_model_loading import convert_and_load_state_dict_in_model

            [policy], names = model.__dict__.pop("policy"), how.weight_mapping or []
            if policy.lora is not None:
                names = [*names, _wrapped(policy.lora.layers, kind.base_model_prefix)]
                names.append(_quantised(policy.lora.quantises))
            how = replace(how, device_map={"": device}, weight_mapping=names)
            with contextlib.ExitStack() as opened:
                stored = _tensors(files, opened)
                info, offloaded = convert_and_load_state_dict_in_model(model, stored, how)
            filled = policy.lora.initial_factors() if policy.lora is not None else {}
            for name, weight in model.named_parameters():
                if isinstance(weight, DTensor) and not weight.to_local().numel():
                    # Such as experts, which are all on other ranks: transformers fails to merge none.
                    filled[name] = torch.empty_like(weight, device=device)
                    info.conversion_errors.pop(name, None)
            _fill(model, filled, device)
            info.missing_keys.difference_update(filled)
            if cut:
                info.unexpected_keys.clear()
            return info, offloaded

        @staticmethod
        def _finalize_model_loading(model: Any, how: Any, info: Any) -> Any:
            return kind._finalize_model_loading(model, replace(how, device_map={"": device}), info)

    Filled.__name__, Filled.__qualname__, Filled.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Filled


def _tensors(files: list[str], opened: contextlib.ExitStack) -> dict[str, Any]:
    """Return the tensors of checkpoint files by name; those of safetensors are read when they are used."""
    from safetensors import safe_open
    from transformers.modeling_utils import load_state_dict

    tensors: dict[str, Any] = {}
    for file in files:
        if file.endswith(".safetensors"):
            source = opened.enter_context(safe_open(file, framework="pt"))
            tensors |= {name: source.get_slice(name) for name in source.offset_keys()}
        else:
            tensors |= load_state_dict(file, map_location="cpu")
    return tensors


def _wrapped(layers: Collection[str], prefix: str) -> Any:
    """Return the renaming of weights in files to those of layers that have an adapter."""
    from transformers.core_model_loading import WeightRenaming

    class Wrapped(WeightRenaming):
        def rename_source_key(self, key: str) -> tuple[str, str | None]:
            layer, _, own = key.rpartition(".")
            adapted = layer in layers or f"{prefix}.{layer}" in layers
            return (f"{layer}.base_layer.{own}" if adapted else key), None

    return Wrapped("unused", "unused")


def _quantised(chosen: Callable[[str], bool]) -> Any:
    """Return the conversion of frozen weights to 4 bits, each as it is read: one is held whole."""
    from transformers.core_model_loading import WeightConverter, _IdentityOp

    name = "weight"

    class Quantised(WeightConverter):
        def rename_source_key(self, key: str) -> tuple[str, str | None]:
            return key, name if chosen(key) else None

        def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
            read = future() if callable(future) else future.result()
            super().add_tensor(target_key, source_key, source_pattern, quantise(read))

    return Quantised(name, name, [_IdentityOp()])


def _fill(module: nn.Module, values: dict[str, Tensor], device: torch.device) -> None:
    """Give parameters that have no memory their values."""
    for name, value in values.items():
        owner, _, own = name.rpartition(".")
        weight = module.get_parameter(name)
        filled = nn.Parameter(_placed(value.to(device), weight), requires_grad=weight.requires_grad)
        filled._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it as it is
        setattr(module.get_submodule(owner), own, filled)


def _own(tensor: Tensor) -> Tensor:
    """Return a rank's own part of a tensor, if it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that all ranks have, sharded as another one is."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
