"""Small runs: the same code and actors as the quickstart, with a model and numbers that are quick."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT


def small_config(storage: Path, name: str, **overrides: Any) -> dict[str, Any]:
    """One engine, one rank, three warm-up steps, two MIX steps."""
    config: dict[str, Any] = {
        "name": name,
        "storage": str(storage),
        "model": {"tiny": {"layers": 2, "hidden_size": 64, "heads": 2}, "max_length": 48},
        "tasks": {
            "sources": [
                {
                    "source": "reasoning_gym",
                    "dataset": "spell_backward",
                    "options": {"min_word_len": 3, "max_word_len": 3},
                    "size": 3000,
                }
            ],
            "eval_size": 40,
        },
        "demonstrations": {"gold": {"size": 60}},
        "explorer": {
            "sampling": {"max_tokens": 6, "max_prompt_tokens": 40},
            "engine": {"count": 1},
            "drop_zero_variance": False,
        },
        "trainer": {"ranks": 1},
        "stages": [
            {
                "name": "warmup",
                "algorithm": {"name": "sft"},
                "demonstrations": "gold",
                "steps": 3,
                "batch_size": 16,
                "optimizer": {"lr": 1e-3},
            },
            {
                "name": "mix",
                "algorithm": {"name": "mix", "mu": 0.2},
                "demonstrations": "gold",
                "steps": 2,
                "batch_size": 20,
                "group_size": 4,
                "expert_share": 0.2,
                "optimizer": {"lr": 1e-4},
            },
        ],
    }
    return {**config, **overrides}


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small config to a file."""

    def write(name: str, **overrides: Any) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(small_config(tmp_path / "runs", name, **overrides)))
        return path

    return write


@pytest.fixture(scope="session")
def rayrft(ray_cluster: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, in a process of its own on the tests' cluster."""

    def call(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rayrft", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": ray_cluster.address_info["gcs_address"]},
        )

    return call


@pytest.fixture(scope="session")
def command_line(rayrft: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Any]:
    """`rayrft`, for modules that import the package by that name."""
    return rayrft
