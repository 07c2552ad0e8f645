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
