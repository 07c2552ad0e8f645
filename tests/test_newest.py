"""The newest release of each integration, in an environment of its own: what the pins hide is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.newest import environment, version

pytestmark = pytest.mark.slow

INTEGRATIONS = {
    "openai": ["tests/endpoint/test_api.py"],
    "anthropic": ["tests/endpoint/test_anthropic.py"],
    "trl": ["tests/data/test_layouts.py", "tests/rewards/test_functions.py"],
    "mcp": ["tests/explorer/test_tools.py"],
    "gymnasium": ["tests/explorer/test_environments.py"],
    "openenv": ["tests/explorer/test_environments.py"],
    "wandb": ["tests/monitor/test_sinks.py"],
    "mlflow": ["tests/monitor/test_sinks.py"],
    "trackio": ["tests/monitor/test_sinks.py"],
    "math-verify": ["tests/rewards/test_math.py"],
}
"""Tests of each integration. Those of verifiers, lm-eval and inspect-ai install the newest releases themselves."""


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
