"""Arguments of vLLM's engines: those that rayrft sets, by the device, and those that a config passes through."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rayrft.config import RunConfig
from rayrft.config.explorer import EngineConfig
from rayrft.config.trainer import ProbeBounds
from rayrft.data.models import find_model
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
    *("distributed_executor_backend", "worker_cls", "worker_extension_cls", "_api_process_count", "_api_process_rank"),
    *("pipeline_parallel_size", "prefill_context_parallel_size", "nnodes", "node_rank", "master_addr", "master_port"),
    *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank"),
    *("data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend", "data_parallel_hybrid_lb"),
    *("data_parallel_external_lb", "data_parallel_multi_port_external_lb"),
    *("enable_elastic_ep", "elastic_ep_max_dp_size", "skip_tokenizer_init", "enable_prefix_caching", "logprobs_mode"),
    *("weight_transfer_config", "disable_log_stats", "mm_processor_cache_gb", "limit_mm_per_prompt"),
}
"""Arguments on which the actor, its placement or the weight transfer relies."""

_ALTER = {
    *("quantization", "quantization_config", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill"),
    *("speculative_config", "spec_method", "spec_model", "spec_tokens", "logits_processors", "watermark_config"),
    *("hf_overrides", "model_impl", "model_class_overrides", "model_loader_extra_config", "load_format", "revision"),
    *("code_revision", "config_format", "hf_config_path", "generation_config", "override_generation_config"),
    *("diffusion_config", "attention_config", "disable_sliding_window", "swa_bounded_replay", "additional_config"),
    *("mamba_config", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "enable_mamba_cache_stochastic_rounding"),
    *("mm_encoder_attn_dtype", "mm_processor_kwargs", "video_pruning_rate", "default_mm_loras"),
}
"""Arguments that alter the log-probs of tokens, by how much a GPU must show: see `OptionGap`."""

_STEP_TOKENS = 64
"""Tokens of a sequence that fit in a step of an engine on CPUs, in the mean; a prompt may have all of them."""

_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


@dataclass(frozen=True)
class OptionGap:
    """How far an engine with an argument that alters log-probs was from the trainer's, on a GPU: a record of the file
    that `cluster/gpu_check.sh` writes and ``engine.proven`` names."""

    model: str
    """Its absolute folder, or its id on the hub; of random weights, which prove nothing of others, their size."""
    option: str
    value: Any
    vllm: str
    """Release of vLLM."""
    gpu: str
    """Its name; "none" on CPUs, which prove nothing."""
    mean: float
    most: float
    """Difference that 99 % of tokens do not exceed."""


def check_run_options(config: RunConfig) -> None:
    """Check the options of the engines of a run or a bench, as `check_options`."""
    bounds = config.probe_bounds if config.trains else None
    check_options(config.explorer.engine, "explorer.engine", bounds=bounds, model=config.model.path)
    for name, each in config.auxiliary.items():
        check_options(each.engine, f"auxiliary.{name}.engine", bounds=None)


def check_options(config: EngineConfig, section: str, *, bounds: ProbeBounds | None, model: str | None = None) -> None:
    """Raise ConfigError for an option of the engines in a ``section`` of the config that vLLM does not have, of a wrong
    type, or that has a key of its own. Where answers are trained on, there are ``bounds`` of their log-probs: options
    that alter these must be proven to keep them, with this ``model``."""
    known = _annotations() if config.options else {}
    for name, value in config.options.items():
        field, problem, remedy = f"{section}.options.{name}", "", "remove it"
        if name in _OWN:
            problem, remedy = "has a key of its own", f"set {_OWN[name]}"
        elif name in _FIXED:
            problem = "is set by rayrft, which relies on it"
        elif name not in known:
            problem, remedy = "is not an argument of this release of vLLM", nearest(name, known)
        elif bounds is not None and name in _ALTER:
            problem, remedy = _unproven(_gap(config, section, name, value, model), bounds)
        elif not _fits(value, known[name]):
            problem, remedy = f"must be {_shown(known[name])}", "correct it"
        if problem:
            raise ConfigError(problem, remedy, field=field, value=value)


def _unproven(gap: OptionGap | None, bounds: ProbeBounds) -> tuple[str, str]:
    """Return why an option that alters log-probs is refused, and the remedy; empty if its gap is within the bounds."""
    if gap is None:
        problem = "alters the log-probs that are trained on, and engine.proven lacks it for this model and vLLM"
        command = "bash cluster/gpu_check.sh --only altered --model MODEL"
        return problem, f"measure it on a GPU: {command}; then set engine.proven"
    if gap.mean > bounds.mean or gap.most > bounds.most:
        gaps = f"{gap.mean:.2g} in the mean and {gap.most:.2g} (99 %)"
        return f"moves log-probs by {gaps}, more than weight_sync.tolerance allows", "remove it"
    return "", ""


def _gap(config: EngineConfig, section: str, name: str, value: Any, model: str | None) -> OptionGap | None:
    """Return the gap of an option that a GPU has proven with this model and this release of vLLM; None without one."""
    if config.proven is None:
        return None
    try:
        gaps = [OptionGap(**each) for each in json.loads(config.proven.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        problem, remedy = f"is not a file of cluster/gpu_check.sh: {first_line(error)}", "correct the path"
        raise ConfigError(problem, remedy, field=f"{section}.proven", value=str(config.proven)) from None
    asked = find_model(model, "model.path") if model else None, name, value, vllm_release()
    proven = (gap for gap in reversed(gaps) if gap.gpu != "none")
    return next((gap for gap in proven if (gap.model, gap.option, gap.value, gap.vllm) == asked), None)


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
        "max_num_seqs": config.max_running if config.gpus else config.most_running,
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
            # vLLM allocates its inputs for so many tokens: with a long context those of every sequence are gigabytes.
            "max_num_batched_tokens": max(max_length, config.most_running * min(max_length, _STEP_TOKENS)),
        }
    if sees:
        # No cache of processed images: it is cleared when weights change, and requests in flight would miss theirs.
        arguments |= {"mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"video": 0}}
    return arguments | config.options


@cache
def _annotations() -> Mapping[str, ast.expr]:
    """Return the types of vLLM's engine arguments by name, read from its source: importing it takes seconds."""
    found = dict[str, ast.expr]()
    for statement in parsed_source("engine/arg_utils.py"):
        if isinstance(statement, ast.ClassDef) and statement.name in ("EngineArgs", "AsyncEngineArgs"):
            for field in statement.body:
                match field:
                    case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Constant(value=str(quoted))):
                        found[name] = ast.parse(quoted, mode="eval").body
                    case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
                        found[name] = kind
    return found


@cache
def _aliases() -> Mapping[str, ast.expr]:
    """Return the types of a few texts or numbers that vLLM's configs name, by their names."""
    found = dict[str, ast.expr]()
    for node in (each for statement in parsed_source("config/*.py") for each in ast.walk(statement)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript(value=ast.Name(id="Literal")) as kind):
                found[name] = kind
    return found


def parsed_source(files: str) -> Iterator[ast.stmt]:
    """Iterate over the statements of vLLM's modules, whose import takes seconds; over none if it is not installed."""
    spec = find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob(files)):
            yield from ast.parse(file.read_text()).body


def _shown(kind: ast.expr) -> str:
    """Return a type as text, with the texts that it may be."""
    aliases = _aliases()
    return re.sub(r"\w+", lambda name: ast.unparse(aliases.get(name[0], ast.Name(name[0]))), ast.unparse(kind))


def _fits(value: Any, kind: ast.expr) -> bool:
    """Return whether a value may be one of a type; of classes and the like vLLM itself decides."""
    match kind:
        case ast.Constant(value=constant):
            return bool(value == constant)
        case ast.BinOp(left=left, right=right):
            return _fits(value, left) or _fits(value, right)
        case ast.Name(id=name) if name in _PLAIN:
            return isinstance(value, _PLAIN[name]) and isinstance(value, bool) == (name == "bool")
        case ast.Name(id=name) if name in _aliases():
            return _fits(value, _aliases()[name])
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return any(_fits(value, each) for each in getattr(choices, "elts", [choices]))
        case ast.Subscript(value=ast.Name(id="list" | "set"), slice=item):
            return isinstance(value, list) and all(_fits(each, item) for each in value)
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, item])):
            return isinstance(value, dict) and all(_fits(one, key) and _fits(two, item) for one, two in value.items())
    return True
