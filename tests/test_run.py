"""`bash tests/run.sh`: what lies on a machine by chance cannot help the suite, and nothing outside it is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.conftest import ROOT


def test_the_suite_runs_in_an_empty_home_with_empty_caches_that_are_removed(tmp_path: Path) -> None:
    for name in ("tests", "cluster", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "tests/run.sh", tmp_path / "tests")
    (tmp_path / "cluster/setup.sh").write_text("")
    fake = tmp_path / ".venv/bin/python"
    fake.write_text(f'#!/bin/sh\nenv > "{tmp_path}/seen"\nls -A "$HOME" >> "{tmp_path}/seen"\nexit 3\n')
    fake.chmod(0o755)
    caches = ("HF_HOME", "VLLM_CACHE_ROOT", "NUMBA_CACHE_DIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "RAY_AUTH_TOKEN_PATH")
    outside = {name: str(tmp_path / "outside") for name in (*caches, "HOME", "RAY_ADDRESS")}
    ended = subprocess.run(["bash", str(tmp_path / "tests/run.sh")], env={**os.environ, **outside})
    seen = (tmp_path / "seen").read_text()
    assert ended.returncode == 3, "that of pytest"
    assert str(tmp_path / "outside") not in seen
    home = next(line for line in seen.splitlines() if line.startswith("HOME=")).removeprefix("HOME=")
    assert not Path(home).exists()


def test_only_continuous_integration_looks_beside_the_checkout() -> None:
    beside = "../" + "shared"
    found = [
        path
        for path in (
            ROOT / name for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        )
        if path.is_file() and beside.encode() in path.read_bytes()
    ]
    assert found == [ROOT / ".ci/run"]
