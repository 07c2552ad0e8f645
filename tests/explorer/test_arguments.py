"""Arguments that reach vLLM: its defaults for throughput on GPUs, and a config's own, each checked before the run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rayrft.config.explorer import EngineConfig
from rayrft.config.trainer import ProbeBounds
from rayrft.errors import ConfigError
from rayrft.explorer.engines import arguments
from rayrft.explorer.engines.arguments import OptionGap, check_options, vllm_release
from rayrft.explorer.engines.engine import RolloutEngine
from tests.errors import about

BOUNDS = ProbeBounds(0.03, 0.2, 0.99)
ON_GPU = EngineConfig(gpus=2, tensor_parallel=2)


class Recorded(Exception):
    """Raised in place of starting vLLM."""


async def recorded(monkeypatch: pytest.MonkeyPatch, model: Path, config: EngineConfig, dtype: str) -> tuple[Any, Any]:
    """The arguments and the usage with which an engine would start."""
    from vllm.v1.engine.async_llm import AsyncLLM

    start = mock.Mock(side_effect=Recorded)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    with pytest.raises(Recorded):
        await RolloutEngine().start(str(model), config, max_length=64, dtype=dtype, seed=3)
    return start.call_args.args[0], start.call_args.kwargs["usage_context"]


async def test_engines_on_gpus_have_the_defaults_of_the_llm_class(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.usage.usage_lib import UsageContext

    found, usage = await recorded(monkeypatch, tiny_model, ON_GPU, "bfloat16")
    assert usage is UsageContext.LLM_CLASS and found.max_num_batched_tokens is None, "vLLM chooses, by the GPU"
    assert (found.enforce_eager, found.max_num_seqs, found.tensor_parallel_size) == (False, 1024, 2)
    assert found.hf_overrides == {"head_dtype": "float32"}, "the trainer computes logits in float32"
    assert found.distributed_executor_backend == "mp" and found.gpu_memory_utilization == 0.85
    found, _ = await recorded(monkeypatch, tiny_model, shared(ON_GPU), "float32")
    assert not found.hf_overrides


def shared(config: EngineConfig) -> EngineConfig:
    return config.model_copy(update={"gpus": 0.4, "tensor_parallel": 1})


async def test_engines_on_cpus_compile_nothing_and_split_no_prompt(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = await recorded(monkeypatch, tiny_model, EngineConfig(), "float32")
    assert found.enforce_eager and found.enable_chunked_prefill is False
    assert found.max_num_batched_tokens == 256 * 64 and found.kv_cache_memory_bytes == 64 << 20


async def test_options_reach_vllm_and_win_over_defaults(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(options={"block_size": 16, "stream_interval": 4})
    check_options(config, "explorer.engine", bounds=BOUNDS)
    found, _ = await recorded(monkeypatch, tiny_model, config, "float32")
    assert (found.block_size, found.stream_interval) == (16, 4)


async def test_a_value_that_vllm_refuses_is_an_error_of_the_options(tiny_model: Path) -> None:
    config = EngineConfig(options={"max_num_batched_tokens": -1})
    check_options(config, "explorer.engine", bounds=BOUNDS)  # vLLM alone knows the range
    with pytest.raises(ConfigError, check=about("engine.options")) as error:
        await RolloutEngine().start(str(tiny_model), config, max_length=64, dtype="float32", seed=3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "trained", "said"),
    [
        ("max_num_batched_tokens", 8192, True, None),
        ("max_num_batched_tokens", "8192", True, "must be int | None"),
        ("max_num_batched_tokens", True, True, "must be int | None"),
        ("max_num_batched_tokens", None, True, None),
        ("cpu_offload_gb", 4, True, None),
        ("enable_expert_parallel", 1, True, "must be bool"),
        ("max_num_batched_token", 8192, True, "Did you mean 'max_num_batched_tokens'"),
        ("max_num_seqs", 8, True, "Set engine.max_running"),
        ("tensor_parallel_size", 8, False, "Set engine.tensor_parallel"),
        ("logprobs_mode", "raw_logprobs", False, "is set by rayrft"),
        ("pipeline_parallel_size", 2, True, "is set by rayrft"),
        ("quantization", "fp8", True, "alters the log-probs"),
        ("speculative_config", {"method": "ngram"}, True, "alters the log-probs"),
        ("load_format", "dummy", True, "alters the log-probs"),
        ("quantization", "fp8", False, None),
        ("scheduling_policy", "by dice", True, "must be Literal['fcfs', 'priority']"),
        ("scheduling_policy", "priority", True, None),
        ("runner", "pooling", True, None),
        ("runner", "poolingg", True, "must be Literal["),
        ("cudagraph_capture_sizes", [1, 2], True, None),
        ("cudagraph_capture_sizes", [1, "2"], True, "must be list[int] | None"),
        ("cudagraph_capture_sizes", 4, True, "must be list[int] | None"),
        ("offload_params", ["gate"], True, None),
        ("mm_processor_kwargs", {"size": 1}, True, None),
        ("media_io_kwargs", {"video": 1}, True, "must be dict[str, dict[str, Any]]"),
        ("device_ids", [0, "GPU-1"], True, None),
        ("compilation_config", {"level": 1}, True, None),
        ("kv_cache_dtype", "fp8", False, None),
    ],
)
def test_options_are_checked_by_name_type_and_effect(name: str, value: Any, trained: bool, said: str | None) -> None:
    config = EngineConfig(options={name: value})
    if said is None:
        check_options(config, "auxiliary.user.engine", bounds=BOUNDS if trained else None)
        return
    with pytest.raises(ConfigError, check=about(f"auxiliary.user.engine.options.{name}", value)) as error:
        check_options(config, "auxiliary.user.engine", bounds=BOUNDS if trained else None)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({}, None),
        ({"mean": 0.031}, "options.quantization"),
        ({"most": 0.21}, "options.quantization"),
        ({"value": "int8"}, "options.quantization"),
        ({"option": "kv_cache_dtype"}, "options.quantization"),
        ({"vllm": "0.1.0"}, "options.quantization"),
        ({"tokens": 7}, "proven"),
        (None, "proven"),
    ],
)
def test_an_option_that_alters_log_probs_is_accepted_if_a_gpu_has_proven_it(
    change: dict[str, Any] | None, field: str | None, tmp_path: Path
) -> None:
    proven = OptionGap("quantization", "fp8", vllm_release(), "H200", mean=0.02, most=0.15)
    if change is not None:
        (tmp_path / "proven.json").write_text(json.dumps([asdict(proven) | change]))
    config = EngineConfig(options={"quantization": "fp8"}, proven=tmp_path / "proven.json")
    if field is None:
        check_options(config, "explorer.engine", bounds=BOUNDS)
        return
    with pytest.raises(ConfigError, check=about(f"explorer.engine.{field}")):
        check_options(config, "explorer.engine", bounds=BOUNDS)


def test_every_argument_that_is_named_is_one_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(arguments._annotations()) == fields
    assert {*arguments._OWN, *arguments._FIXED, *arguments._ALTER} <= fields
