"""LoRA: linear layers stay frozen, maybe in 4 bits (QLoRA), and a low-rank product of two matrices beside each of them
is trained."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrft.config.trainer import LoraConfig
from rayrft.errors import ConfigError
from rayrft.weights.adapter import A, merge
from rayrft.weights.messages import Adapter
from rayrft.weights.nf4 import BLOCK, dequantise, quantise

_NAME = "default"
"""peft's default adapter name."""

_ADAPTED = ".base_layer.weight"
"""End of the name of a frozen weight under an adapter."""


class Lora:
    """A LoRA adapter injected into a transformers model by peft; all other parameters are frozen.

    It starts without effect (B = 0) and is the same on every rank. Create it before the model is sharded; frozen
    weights are cast to the dtype ``compute``, the factors stay in float32.
    """

    def __init__(self, model: Any, config: LoraConfig, *, origin: str, compute: torch.dtype, seed: int) -> None:
        """Inject the adapter. ``origin`` is the folder or hub id that the model was loaded from.

        Raises ConfigError if a target is not a linear layer of the decoder, or not as wide as blocks of 4 bits need.
        """
        self._config, self._seed = config, seed
        self.origin = self.base = origin
        """``base``: where the present frozen weights come from."""
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self.peft_config = PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=config.targets,
            lora_dropout=0.0,  # probability ratios need deterministic log-probs
            task_type="CAUSAL_LM",
        )
        try:
            inject_adapter_in_model(self.peft_config, model)
        except ValueError:
            raise _no_target(config.targets) from None
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        """The layers that have an adapter, by their names in the model."""
        head = model.get_output_embeddings()
        bases = {name: layer.get_base_layer() for name, layer in self.layers.items() if layer is not head}
        invalid = [name for name in self.layers if not isinstance(bases.get(name), nn.Linear)]
        named = [] if isinstance(config.targets, str) else config.targets
        invalid += [target for target in named if not any(f".{name}".endswith(f".{target}") for name in self.layers)]
        if invalid:
            raise _no_target(invalid[0])
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(compute)
        for name, factor in self.initial_factors().items():
            parameters[name].data = factor.to(parameters[name].device)
        if config.frozen == "nf4":
            for name, layer in self.layers.items():
                if layer.in_features % BLOCK:
                    problem = f"needs layers of a multiple of {BLOCK} inputs, and {name} has {layer.in_features}"
                    remedy = "set it to dtype, or name other targets"
                    raise ConfigError(problem, remedy, field="trainer.lora.frozen", value=config.frozen)
                layer.base_layer = _QuantisedLinear(layer.get_base_layer())

    def quantises(self, parameter: str) -> bool:
        """Return whether a parameter of the model is held in 4 bits (`rayrft.weights.nf4`)."""
        return self._config.frozen == "nf4" and parameter.endswith(_ADAPTED)

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.base, self._config.alpha / self._config.rank, self._config.frozen)

    def initial_factors(self) -> dict[str, Tensor]:
        """Return an adapter without effect, by parameter: A as peft initialises it, B zero."""
        generator = torch.Generator().manual_seed(self._seed)
        factors = {}
        for name, layer in self.layers.items():
            dtype = torch.promote_types(layer.get_base_layer().weight.dtype, torch.float32)
            a = torch.empty(self._config.rank, layer.in_features, dtype=dtype)
            factors[f"{name}.lora_A.{_NAME}.weight"] = nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            factors[f"{name}.lora_B.{_NAME}.weight"] = torch.zeros(layer.out_features, self._config.rank, dtype=dtype)
        return factors

    def merged(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights with the factors merged in; all under their checkpoint names."""
        factors = {name: tensor for name, tensor in state.items() if ".lora_" in name}
        weights = {name: tensor for name, tensor in state.items() if name not in factors}
        if self._config.frozen == "nf4":
            for name in {factor.removesuffix(A) + ".weight" for factor in factors if factor.endswith(A)}:
                weights[name] = dequantise(weights[name]).float()
        return dict(merge(weights.items(), factors, replace(self.adapter, frozen="dtype")))  # they are rounded

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the model compute with the frozen weights alone."""
        self._multiply(0.0)
        try:
            yield
        finally:
            self._multiply(1.0)

    def _multiply(self, factor: float) -> None:
        # Not peft's own switch: it changes requires_grad, which FSDP reads only when it shards.
        for layer in self.layers.values():
            layer.set_scale(_NAME, factor)


class _QuantisedLinear(nn.Module):
    """A linear layer whose frozen weight is held in 4 bits."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantise(layer.weight.detach()), requires_grad=False)
        self.bias = layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _linear_in_4_bits(inputs, self.weight)
        return outputs if self.bias is None else outputs + self.bias


@torch.library.custom_op("rayrft::linear_in_4_bits", mutates_args=())
def _linear_in_4_bits(inputs: Tensor, quantised: Tensor) -> Tensor:
    """Inputs ``[..., in]`` times the transpose of a weight in 4 bits, which is whole for this product alone."""
    return functional.linear(inputs, dequantise(quantised))


@_linear_in_4_bits.register_fake
def _shape(inputs: Tensor, quantised: Tensor) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], len(quantised))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    [quantised] = ctx.saved_tensors
    return gradient @ dequantise(quantised), None


_linear_in_4_bits.register_autograd(_backward, setup_context=_keep)


def checkpoint_name(name: str) -> str:
    """Return a parameter's name in checkpoint files: without the parts that peft inserts."""
    return name.replace(".base_layer.", ".").replace(f".{_NAME}.weight", ".weight")


def _no_target(value: Any) -> ConfigError:
    problem = "the model's decoder has no such linear layer"
    remedy = "name linear layers, such as q_proj, or all-linear"
    return ConfigError(problem, remedy, field="trainer.lora.targets", value=value)
