"""Setting up .venv: what it is made from, when it is made anew, and when nothing is done."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up reads, under a path with a space."""
    folder = tmp_path / "my checkout"
    shutil.copytree(ROOT / "cluster", folder / "cluster")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture
def setup(checkout: Path) -> Setup:
    """Runs it with a python that only notes what it is asked for."""

    def call(*extras: str, **environment: str) -> subprocess.CompletedProcess[str]:
        fake = Path(__file__).with_name("fake_python.sh")
        calls = {"PYTHON": str(fake), "CALLS": str(checkout / "calls"), "RAYRFT_DEVICE": "cpu"}
        (checkout / "calls").write_text("")
        return subprocess.run(
            ["bash", str(checkout / "cluster/setup.sh"), *extras],
            env={**os.environ, **calls, **environment},
            capture_output=True,
            text=True,
        )

    return call


@pytest.fixture
def asked(checkout: Path) -> Callable[[], str]:
    """What python was asked for in the last call."""
    return lambda: (checkout / "calls").read_text()


@pytest.fixture
def without_bubblewrap(tmp_path: Path) -> Path:
    """A folder for PATH with all that set-up calls but bubblewrap and what could install it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = "bash cat cksum cp cut dirname flock grep head id mkdir mv paste printf rm sed sort tail touch tr"
    for name in tools.split():
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


@pytest.mark.parametrize(("works", "asked_for"), [(0, 1), (1, 2)], ids=["it can be installed", "it cannot"])
def test_bubblewrap_is_installed_where_it_may_and_else_said_how(
    works: int, asked_for: int, setup: Setup, without_bubblewrap: Path
) -> None:
    for name, script in (("apt-get", f'echo "$*" >>{without_bubblewrap}/said\nexit {works}'), ("sudo", 'shift\n"$@"')):
        (without_bubblewrap / name).write_text(f"#!/bin/bash\n{script}\n")
        (without_bubblewrap / name).chmod(0o755)
    result = setup(PATH=str(without_bubblewrap))
    assert result.returncode == 0, result.stderr
    lines = (without_bubblewrap / "said").read_text().splitlines()
    assert lines[0] == "install -y bubblewrap" and len(lines) == asked_for
    assert ("apt-get install bubblewrap" in result.stderr) == bool(works)


def test_without_a_way_to_install_bubblewrap_it_is_said_how(setup: Setup, without_bubblewrap: Path) -> None:
    result = setup(PATH=str(without_bubblewrap))
    assert result.returncode == 0 and "apt-get install bubblewrap" in result.stderr


def test_a_second_call_does_nothing_unless_something_changed(
    setup: Setup, asked: Callable[[], str], checkout: Path
) -> None:
    assert setup("test").returncode == 0
    assert "-m venv" in asked() and "-c cluster/constraints-cpu.txt -e .[cpu,test]" in asked()
    assert setup().returncode == 0 and asked().count("install") == 0
    assert setup("bench").returncode == 0 and "-e .[bench,cpu,test]" in asked()
    with (checkout / "cluster/constraints.txt").open("a") as file:
        file.write("newer==1\n")
    assert setup().returncode == 0
    assert "-e .[bench,cpu,test]" in asked() and "-m venv" not in asked(), "older packages are replaced, not all"


def test_what_was_interrupted_is_made_anew(setup: Setup, asked: Callable[[], str], checkout: Path) -> None:
    assert setup(DIE_AT="-e .").returncode == -9
    assert setup().returncode == 0 and "-m venv --clear .venv" in asked()
    assert setup().returncode == 0 and asked() == ""
    with (checkout / "cluster/constraints.txt").open("a") as file:
        file.write("newer==1\n")
    assert setup(DIE_AT="-e .").returncode == -9
    assert setup().returncode == 0 and "-m venv --clear .venv" in asked()


def test_each_device_has_its_versions_and_its_environment(setup: Setup, asked: Callable[[], str]) -> None:
    assert setup(RAYRFT_DEVICE="gpu").returncode == 0 and "-c cluster/constraints-gpu.txt -e .[gpu]" in asked()
    other = setup(RAYRFT_DEVICE="cpu")
    assert other.returncode == 2 and "remove .venv" in other.stderr and "install" not in asked()
    # By default the environment stays for the device that it is for, whether or not a driver answers just now.
    assert setup("test", RAYRFT_DEVICE="").returncode == 0 and "-e .[gpu,test]" in asked()
