"""Arguments that reach vLLM: its defaults for throughput on GPUs, and a config's own, each checked before the run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rayrft.config.explorer import EngineConfig
from rayrft.config.trainer import ProbeBounds
from rayrft.errors import ConfigError
from rayrft.explorer.engines import arguments
from rayrft.explorer.engines.arguments import OptionGap, check_options, engine_arguments, vllm_release
from rayrft.explorer.engines.engine import RolloutEngine
from tests.errors import about

BOUNDS = ProbeBounds(0.03, 0.2, 0.99)
HARMLESS = """
enable_return_routed_experts return_sampling_mask served_model_name runner convert enable_prompt_embeds
tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains download_dir
safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size cudagraph_capture_sizes
max_cudagraph_capture_size ir_op_priority distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind
numa_bind_nodes numa_bind_cpus device_ids decode_context_parallel_size dcp_comm_backend dcp_q_replicate
dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_hc_sp enable_expert_parallel
enable_batch_sharded_sampling enable_ep_weight_filter moe_backend linear_backend sparse_indexer_topk_backend
all2all_backend enable_dbo ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy max_parallel_loading_workers
block_size prefix_caching_hash_algo prefix_cache_retention_interval disable_cascade_attn offload_backend
cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params
max_num_batched_tokens max_num_scheduled_tokens long_prefill_token_threshold long_prefill_token_threshold_adaptive
max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_logprobs use_fp64_gumbel enable_trace_replay
aggregate_engine_logging hf_token tokenizer_revision allow_deprecated_quantization disable_custom_all_reduce
enable_shm_tensor_arena language_model_only enable_mm_embeds interleave_mm_strings media_io_kwargs
mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
mm_encoder_attn_backend mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
io_processor_plugin renderer_num_workers skip_mm_profiling video_pruning_method mm_tensor_ipc mm_processor_device
mm_ipc_gpu_memory_gb mm_device_do_normalize enable_lora max_loras max_lora_rank fully_sharded_loras max_cpu_loras
lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
enable_moe_shared_loras max_lora_cls_labels ray_workers_use_nsight num_gpu_blocks_override ignore_patterns
enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
disable_hybrid_kv_cache_manager structured_outputs_config aux_output_config reasoning_parser
reasoning_parser_plugin show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets
cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats scheduling_policy scheduler_cls pooler_config
compilation_config engram_config kernel_config enable_flashinfer_autotune profiler_config logging_config log_level
log_config_file kv_transfer_config kv_events_config ec_transfer_config ec_manager_config reasoning_config
sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend
attention_backend mamba_block_size prefix_match_unit mamba_cache_mode enable_mamba_shared_prefix_checkpoint
replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm mamba_cache_philox_rounds use_tqdm_on_load
pt_load_map_location async_scheduling stream_interval optimization_level performance_mode fault_tolerance_config
enable_fault_tolerance kv_offloading_size kv_offloading_backend tokens_only shutdown_timeout
fail_on_environ_validation gdn_prefill_backend kda_prefill_backend kda_decode_backend enable_log_requests
"""
"""Arguments of vLLM that alter no log-probs, or only as another kernel does, and place no workers."""
ON_GPU = EngineConfig(gpus=2, tensor_parallel=2)


class Recorded(Exception):
    """Raised in place of starting vLLM."""


async def recorded(
    monkeypatch: pytest.MonkeyPatch, model: Path, config: EngineConfig, dtype: str, **settings: Any
) -> tuple[Any, Any]:
    """The arguments and the usage with which an engine would start."""
    from vllm.v1.engine.async_llm import AsyncLLM

    start = mock.Mock(side_effect=Recorded)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    with pytest.raises(Recorded):
        await RolloutEngine().start(str(model), config, max_length=64, dtype=dtype, seed=3, **settings)
    return start.call_args.args[0], start.call_args.kwargs["usage_context"]


async def test_engines_on_gpus_have_the_defaults_of_the_llm_class(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.usage.usage_lib import UsageContext

    found, usage = await recorded(monkeypatch, tiny_model, ON_GPU, "bfloat16")
    assert usage is UsageContext.LLM_CLASS and found.max_num_batched_tokens is None, "vLLM chooses, by the GPU"
    assert (found.enforce_eager, found.max_num_seqs, found.tensor_parallel_size) == (False, None, 2)
    assert found.hf_overrides == {"head_dtype": "float32"}, "the trainer computes logits in float32"
    assert found.distributed_executor_backend == "mp", "else vLLM would ask for a bundle of each GPU"
    assert found.gpu_memory_utilization == 0.85
    found, _ = await recorded(monkeypatch, tiny_model, EngineConfig(gpus=0.4), "float32")
    assert not found.hf_overrides and found.distributed_executor_backend is None


async def test_an_engine_whose_gpus_are_lent_sees_them_alone(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as in any actor to which Ray gives none
    lent = EngineConfig(gpus=0.4, tensor_parallel=2)
    found, _ = await recorded(monkeypatch, tiny_model, lent, "float32", lent=("3", "5"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert (found.tensor_parallel_size, found.distributed_executor_backend) == (2, "mp")


async def test_engines_on_cpus_compile_nothing_and_split_no_prompt(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = await recorded(monkeypatch, tiny_model, EngineConfig(), "float32")
    assert found.enforce_eager and found.enable_chunked_prefill is False and found.max_num_seqs == 256
    assert found.max_num_batched_tokens == 256 * 64 and found.kv_cache_memory_bytes == 64 << 20


@pytest.mark.parametrize(("max_length", "tokens"), [(48, 256 * 48), (4096, 256 * 64), (131072, 131072)])
def test_a_step_of_an_engine_on_cpus_has_room_for_a_whole_prompt_and_not_for_one_of_each_sequence(
    max_length: int, tokens: int
) -> None:
    settings = {"dtype": "float32", "seed": 0, "sees": False, "structured": False}
    found = engine_arguments("model", EngineConfig(), max_length=max_length, **settings)  # type: ignore[arg-type]
    assert found["max_num_batched_tokens"] == tokens


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
        ("mm_processor_kwargs", {"size": 1}, True, "alters the log-probs"),
        ("mm_processor_kwargs", {"size": 1}, False, None),
        ("revision", "main", True, "alters the log-probs"),
        ("data_parallel_rank", 1, False, "is set by rayrft"),
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
        ({"gpu": "none"}, "options.quantization"),
        ({"model": "random weights, 0.6B"}, "options.quantization"),
        ({"tokens": 7}, "proven"),
        (None, "proven"),
    ],
)
def test_an_option_that_alters_log_probs_is_accepted_if_a_gpu_has_proven_it(
    change: dict[str, Any] | None, field: str | None, tiny_model: Path, tmp_path: Path
) -> None:
    proven = OptionGap(str(tiny_model), "quantization", "fp8", vllm_release(), "H200", mean=0.02, most=0.15)
    if change is not None:
        (tmp_path / "proven.json").write_text(json.dumps([asdict(proven) | change]))
    config = EngineConfig(options={"quantization": "fp8"}, proven=tmp_path / "proven.json")
    if field is None:
        check_options(config, "explorer.engine", bounds=BOUNDS, model=str(tiny_model))
        return
    with pytest.raises(ConfigError, check=about(f"explorer.engine.{field}")):
        check_options(config, "explorer.engine", bounds=BOUNDS, model=str(tiny_model))


def test_every_argument_of_vllm_is_known_to_alter_log_probs_or_not() -> None:
    """Look up what an argument of a new release does, and add it to a list."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(arguments._annotations()) == fields
    listed = [*arguments._OWN, *arguments._FIXED, *arguments._ALTER, *re.findall(r"\w+", HARMLESS)]
    assert fields.symmetric_difference(listed) == set() and len(listed) == len(fields)
