"""Small runs: the same code and actors as the quickstart, with a model and numbers that are quick."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrft.core.run import Run
from rayrft.monitor.records import NoteRecord
from tests.conftest import ROOT

Call = Callable[..., subprocess.CompletedProcess[str]]

WITHOUT_VLLM: dict[str, Any] = {"plugins": [str(ROOT / "tests" / "without_vllm.py")], "weight_sync": {"tolerance": 1e9}}
"""For runs in which vLLM is not the subject: a scripted engine, whose log-probs are not the trainer's."""


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def port() -> int:
    """Ray Serve has one port in a cluster."""
    return free_port()


def endpoint_of(run: Run) -> str:
    notes = (record.text for record in run.records() if isinstance(record, NoteRecord))
    return next(found[1] for text in notes if (found := re.search(r"endpoint at (\S+)", text)))


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small config to a file."""

    def write(name: str, **overrides: Any) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(small_config(tmp_path / "runs", name, **overrides)))
        return path

    return write


@pytest.fixture
def rayrft(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command line, in this process: exit status and what it printed."""
    from rayrft.cli.main import main

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["rayrft", *arguments])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def command_line(rayrft: Call) -> Call:
    """`rayrft`, for modules that import the package by that name."""
    return rayrft


@pytest.fixture(scope="session")
def other_process(ray_cluster: Any) -> Call:
    """The command line, in a process of its own on the tests' cluster."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rayrft", *arguments],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": ray_cluster.address_info["gcs_address"]},
        )

    return call
