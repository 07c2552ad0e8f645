"""Why an engine does not start whose core is a process of its own, as on GPUs: vLLM raises only that it failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray

from rayrft.config.explorer import EngineConfig
from rayrft.errors import ActorDied
from rayrft.explorer.engines import core_output
from rayrft.explorer.engines.core_output import printed_bytes, start_failure
from rayrft.explorer.engines.engine import RolloutEngine
from tests.errors import about

LOGGED = "(EngineCore pid=7) ERROR 11-29 23:22:23 [core.py:1510] "
FREE = "Free memory on device cuda:0 (3.1/139.8 GiB) on startup is less than desired GPU memory utilization (0.85, 119)"
NONE = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
LENGTH = (
    "To serve at least one request with the model's max seq len (60000), (9 GiB KV cache is needed, which is larger"
)
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB"
FIRST = "(Worker_TP1 pid=8) ERROR 11-29 23:22:23 [multiproc_executor.py:953] " + CUDA
LATER = f"{LOGGED}Exception: WorkerProc initialization failed due to an exception in a background process."


@pytest.mark.parametrize(
    ("logged", "raised", "remedy"),
    [
        (f"{LOGGED}ValueError: {FREE}", f"ValueError: {FREE}", "lower engine.gpu_memory_utilization"),
        ("", f"ValueError: {NONE}", "raise engine.gpu_memory_utilization"),
        (f"{LOGGED}ValueError: {LENGTH}", "", "lower max_length"),
        (f"{FIRST}\n{LATER}", "Exception: WorkerProc initialization failed due to", "raise engine.tensor_parallel"),
        (f"{LOGGED}KeyError: 'qkv'", "", "see the engine's log"),
        ("WARNING [a.py:1] ImportError: no tcmalloc", f"RuntimeError: {NONE}", "raise engine.gpu_memory_utilization"),
        (LATER, "Killed", "lower max_length"),
    ],
)
def test_the_first_error_that_is_printed_or_a_death_without_one_is_named_with_a_remedy(
    logged: str, raised: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = tmp_path / "out", tmp_path / "err"
    monkeypatch.setattr(core_output, "OUTPUTS", outputs)
    for file in outputs:
        file.write_text("ValueError: of an earlier start\n")
    before = printed_bytes()
    for file, text in zip(outputs, (logged, raised), strict=True):
        with file.open("a") as opened:
            opened.write(f"Traceback (most recent call last):\n{text}\n")
    found = start_failure("engine-1", before)
    assert remedy in found.remedy and "initialization failed" not in found.problem and found.field == "engine-1"


class WithCore(RolloutEngine):
    """One whose core is a process, on a CPU."""

    async def start(self, *arguments: Any, **options: Any) -> None:
        with mock.patch("rayrft.explorer.engines.engine.prepare_environment"):  # which sets it to none for CPUs
            await super().start(*arguments, **options)


@pytest.mark.slow
def test_a_core_that_has_too_little_memory_is_named_with_what_helps(tiny_model: Path, ray_cluster: Any) -> None:
    long = {"env_vars": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}
    actor = (
        ray.remote(WithCore).options(num_cpus=0.5, max_concurrency=10, runtime_env=long, name="run:engine-7").remote()
    )
    settings = {"max_length": 60000, "dtype": "float32", "seed": 0}
    with pytest.raises(ActorDied, check=about("engine-7")) as error:
        ray.get(actor.start.remote(str(tiny_model), EngineConfig(kv_cache_mib=8), **settings))
    assert "KV cache is needed" in error.value.problem and "max_length" in error.value.remedy
