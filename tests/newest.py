"""An environment over the present one that has the newest releases of some packages."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest


def environment(folder: Path, *packages: str) -> Path:
    """Install the newest releases of packages, with what they need, and return the environment's Python.

    All else is that of the present environment, which stays as it is. Skips the test if an index has no such package.
    """
    venv.create(folder, with_pip=True)
    [packages_of] = folder.glob("lib/python*/site-packages")
    (packages_of / "zz_base.pth").write_text("\n".join(site.getsitepackages()))
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--no-input", "--upgrade", *packages]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(packages)} cannot be installed on Python {sys.version[:4]}: {done.stderr[-500:]}")
    return python


def version(python: str | Path, package: str) -> str:
    """The release of a package that a Python has."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
