"""Arguments of vLLM's engines: those that rayrft sets, by the device, and those that a config passes through."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rayrft.config.explorer import EngineConfig
from rayrft.config.trainer import ProbeBounds
from rayrft.errors import ConfigError, first_line, nearest

_OWN = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "dtype": "dtype of the model",
    "seed": "seed",
    "max_model_len": "max_length of the model",
    "max_num_seqs": "engine.max_running",
    "tensor_parallel_size": "engine.tensor_parallel",
    "enforce_eager": "engine.enforce_eager",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "engine.kv_cache_mib",
    "enable_sleep_mode": "engine.sleep",
}
"""Arguments that keys of the config set."""

_FIXED = {
    "distributed_executor_backend",
    "pipeline_parallel_size",
    "data_parallel_size",
    "nnodes",
    "skip_tokenizer_init",
    "enable_prefix_caching",
    "logprobs_mode",
    "worker_cls",
    "worker_extension_cls",
    "weight_transfer_config",
    "disable_log_stats",
    "mm_processor_cache_gb",
    "limit_mm_per_prompt",
}
"""Arguments on which the actor, its placement or the weight transfer relies."""

_ALTER = {
    "quantization",
    "quantization_config",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "speculative_config",
    "spec_method",
    "hf_overrides",
    "model_impl",
    "logits_processors",
    "kv_sharing_fast_prefill",
    "override_generation_config",
    "load_format",
}
"""Arguments that alter the log-probs of tokens, by how much a GPU must show: see `OptionGap`."""

_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


@dataclass(frozen=True)
class OptionGap:
    """How far an engine with an argument that alters log-probs was from the trainer's, on a GPU: a record of the file
    that `cluster/gpu_check.sh` writes and ``engine.proven`` names."""

    option: str
    value: Any
    vllm: str
    """Release of vLLM."""
    gpu: str
    mean: float
    most: float
    """Difference that 99 % of tokens do not exceed."""


def check_options(config: EngineConfig, section: str, *, bounds: ProbeBounds | None) -> None:
    """Raise ConfigError for an option of the engines in a ``section`` of the config that vLLM does not have, of a wrong
    type, or that has a key of its own. Where answers are trained on, there are ``bounds`` of their log-probs: options
    that alter these must be proven to keep them."""
    known = _annotations() if config.options else {}
    for name, value in config.options.items():
        field, problem, remedy = f"{section}.options.{name}", "", "remove it"
        if name in _OWN:
            problem, remedy = "has a key of its own", f"set {_OWN[name]}"
        elif name in _FIXED:
            problem = "is set by rayrft, which relies on it"
        elif name not in known:
            problem, remedy = "is no argument of this release of vLLM", nearest(name, known)
        elif bounds is not None and name in _ALTER:
            problem, remedy = _unproven(_gap(config, section, name, value), bounds)
        elif not _fits(value, known[name]):
            problem, remedy = f"must be {known[name]}", "correct it"
        if problem:
            raise ConfigError(problem, remedy, field=field, value=value)


def _unproven(gap: OptionGap | None, bounds: ProbeBounds) -> tuple[str, str]:
    """Return why an option that alters log-probs is refused, and the remedy; empty if its gap is within the bounds."""
    if gap is None:
        problem = "alters the log-probs that are trained on, and engine.proven does not have it for this vLLM"
        return problem, "measure it on a GPU: bash cluster/gpu_check.sh --only altered; then set engine.proven"
    if gap.mean > bounds.mean or gap.most > bounds.most:
        gaps = f"{gap.mean:.2g} in the mean and {gap.most:.2g} (99 %)"
        return f"moves log-probs by {gaps}, more than weight_sync.tolerance allows", "remove it"
    return "", ""


def _gap(config: EngineConfig, section: str, name: str, value: Any) -> OptionGap | None:
    """Return the gap of an option by the file of the config; None if it has none with this release of vLLM."""
    if config.proven is None:
        return None
    try:
        gaps = [OptionGap(**each) for each in json.loads(config.proven.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        problem, remedy = f"is not a file of cluster/gpu_check.sh: {first_line(error)}", "correct the path"
        raise ConfigError(problem, remedy, field=f"{section}.proven", value=str(config.proven)) from None
    asked = name, value, vllm_release()
    return next((gap for gap in reversed(gaps) if (gap.option, gap.value, gap.vllm) == asked), None)


def vllm_release() -> str:
    """Return the release of vLLM, whose package for CPUs has another name."""
    return version(packages_distributions()["vllm"][0]).partition("+")[0]


def engine_arguments(
    model: str, config: EngineConfig, *, max_length: int, dtype: str, seed: int, sees: bool, structured: bool
) -> dict[str, Any]:
    """Return the arguments of an engine's `AsyncEngineArgs`, but for those of the weight transfer.

    ``sees``: the model takes images; ``structured``: answers may have to follow a JSON schema.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": not sees and not structured,  # image processors and grammars need one
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_length,
        "max_num_seqs": config.max_running,
        "tensor_parallel_size": config.tensor_parallel,
        # The default inside a placement group needs one bundle per GPU; child processes see all GPUs of this actor's
        # one bundle.
        "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else None,
        "enforce_eager": config.enforce_eager,
        # Of an image in a cached prefix vLLM keeps no pixels (`strip_covered_mm_data`): a pause, after which running
        # requests are computed again, would kill the core.
        "enable_prefix_caching": not sees,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if config.gpus:
        arguments |= {"gpu_memory_utilization": config.gpu_share, "enable_sleep_mode": config.sleep}
        if dtype == "bfloat16":
            arguments["hf_overrides"] = {"head_dtype": "float32"}  # as the trainer computes its logits
    else:
        arguments |= {
            "kv_cache_memory_bytes": config.kv_cache_mib << 20,
            # A seeded request that is split between two steps kills the engine's core, which rewinds a generator that
            # cannot be rewound.
            "enable_chunked_prefill": False,
            "block_size": 32,  # a prefix is shared in whole blocks, which have 128 tokens otherwise
            "max_num_batched_tokens": config.max_running * max_length,
        }
    if sees:
        # No cache of processed images: it is cleared when weights change, and requests in flight would miss theirs.
        arguments |= {"mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"video": 0}}
    return arguments | config.options


@cache
def _annotations() -> Mapping[str, str]:
    """Return the types of vLLM's engine arguments by name, read from its source: importing it takes seconds."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    classes = [each for each in ast.parse(source.read_text()).body if isinstance(each, ast.ClassDef)]
    return {
        field.target.id: ast.unparse(field.annotation)
        for each in classes
        if each.name in ("EngineArgs", "AsyncEngineArgs")
        for field in each.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _fits(value: Any, annotation: str) -> bool:
    """Return whether a value may be one of a type; of types other than plain ones vLLM itself decides."""
    kinds = {kind.strip() for kind in annotation.split("|")}
    if not kinds <= {*_PLAIN, "None"}:
        return True
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in kinds
    return any(isinstance(value, types) for kind, types in _PLAIN.items() if kind in kinds - {"bool"})
