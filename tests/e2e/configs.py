"""Configs of whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.e2e.conftest import small_config


def vision_config(storage: Path, name: str, **overrides: Any) -> dict[str, Any]:
    """Episodes with squares, besides an application with tasks of text alone; demonstrations of both kinds."""
    squares = {"source": "squares", "path": str(storage / "squares"), "size": 200, "weight": 2, "workflow": "episode"}
    text = small_config(storage, name)
    application = {"workflow_options": {"agent": {"agent": "tests.endpoint.applications:shows_pictures"}}}
    tasks, environment = text["tasks"]["sources"], {"name": "painter", "processes": 4}
    return small_config(
        storage,
        name,
        **{
            "model": {"tiny": {"vision": True, "layers": 2, "hidden_size": 64, "heads": 2}, "max_length": 96},
            "tasks": {"sources": [squares, *tasks], "eval_size": 12},
            "explorer": {**text["explorer"], "environment": environment, "workflow": "agent", **application},
            "plugins": [str(ROOT / "tests" / "samples" / "painter.py")],
            **overrides,
        },
    )


def gsm8k_on_cpu(dataset: Path) -> dict[str, Any]:
    """What lets the job gsm8k_grpo run for two steps on CPUs."""
    return {
        "model": {"tiny": {"layers": 1, "hidden_size": 64, "heads": 2}, "max_length": 1024},
        "tasks.sources.gsm8k.dataset": str(dataset),
        "tasks.eval_size": 20,
        "explorer.sampling": {"max_tokens": 16, "max_prompt_tokens": 200},
        "explorer.engine": {"count": 1, "kv_cache_mib": 128},
        "explorer.drop_zero_variance": False,
        "trainer": {"ranks": 1},
        "weight_sync": {"tolerance": 1e-4},
        "reward": {"name": "math", "truncated": "score"},
        "stages.grpo.steps": 2,
        "stages.grpo.batch_size": 16,
    }
