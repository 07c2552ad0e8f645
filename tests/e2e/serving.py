"""The config of an endpoint that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_config(folder: Path, port: int, **overrides: Any) -> dict[str, Any]:
    (folder / "keys").write_text("sk-app\n")
    return {
        "name": "served",
        "mode": "serve",
        "storage": str(folder / "runs"),
        "max_staleness": 4,
        "model": {"tiny": {"layers": 2, "hidden_size": 64, "heads": 2}, "max_length": 512},
        "explorer": {"sampling": {"max_tokens": 8}, "engine": {"count": 1}},
        "trainer": {"ranks": 1},
        "serve": {"port": port, "keys_file": str(folder / "keys")},
        "stages": [{"name": "online", "algorithm": {"name": "grpo"}, "steps": 2, "batch_size": 8, "group_size": 4}],
        **overrides,
    }
