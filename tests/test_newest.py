"""The newest release of each integration, in an environment of its own: what the pins hide is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT
from tests.newest import environment, version

INTEGRATIONS = {
    "openai": ["tests/endpoint/test_api.py", "tests/endpoint/test_refusals.py"],
    "anthropic": ["tests/endpoint/test_anthropic.py"],
    "trl": ["tests/data/test_layouts.py", "tests/rewards/test_functions.py"],
    "mcp": ["tests/explorer/test_mcp_servers.py"],
    "gymnasium": ["tests/explorer/test_environments.py"],
    "openenv": ["tests/explorer/test_environments.py"],
    "wandb": ["tests/monitor/test_sinks.py"],
    "mlflow": ["tests/monitor/test_sinks.py"],
    "trackio": ["tests/monitor/test_sinks.py"],
    "math-verify": ["tests/rewards/test_math.py"],
    "datasets": ["tests/data/test_row_sources.py", "tests/data/test_layouts.py"],
    "huggingface_hub": ["tests/data/test_hub.py"],
    "peft": ["tests/trainer/test_lora.py"],
    "torchao": ["tests/trainer/test_optimizer.py"],
    "bitsandbytes": ["tests/weights/test_nf4.py"],
    "reasoning-gym": ["tests/data/test_task_sources.py", "tests/explorer/test_environments.py"],
    "tensorboard": ["tests/monitor/test_sinks.py"],
    "lingua-language-detector": ["tests/pipelines/test_filters.py"],
    "websockets": ["tests/explorer/test_environments.py"],
}
"""Tests of each integration. Those of verifiers, lm-eval and inspect-ai install the newest releases themselves."""
_OTHERS = ("cpu", "gpu", "test", "bench")


def test_the_extras_are_in_the_table_and_its_tests_are_there() -> None:
    """All extras but those that install vLLM, and what tests and benches need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: each for name, each in project["optional-dependencies"].items() if name not in _OTHERS}
    named = {canonicalize_name(Requirement(each[0]).name) for each in extras.values()}
    assert named <= {canonicalize_name(package) for package in INTEGRATIONS}
    assert all((ROOT / path).is_file() for paths in INTEGRATIONS.values() for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize("package", INTEGRATIONS)
def test_the_tests_of_an_integration_pass_with_its_newest_release(package: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", package)
    pinned, newest = (_version(each, package) for each in (sys.executable, python))
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *INTEGRATIONS[package]]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    assert ran.returncode == 0, f"{package} {newest} (pinned: {pinned}) fails {failed}:\n{ran.stdout[-3000:]}"


def _version(python: str | Path, package: str) -> str:
    try:
        return version(python, package)
    except subprocess.CalledProcessError:
        return "not installed"
