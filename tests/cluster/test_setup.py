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
def tools(tmp_path: Path) -> Path:
    """A folder with the programs of this machine, but for those that would change it or tell what it has."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for source in (Path(each) for each in os.environ["PATH"].split(":")):
        for program in source.iterdir() if source.is_dir() else ():
            if program.name not in ("apt-get", "sudo", "bwrap") and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


@pytest.fixture
def setup(checkout: Path, tools: Path) -> Setup:
    """Runs it with a python that only notes what it is asked for."""

    def call(*extras: str, **environment: str) -> subprocess.CompletedProcess[str]:
        fake = Path(__file__).with_name("fake_python.sh")
        calls = {"PYTHON": str(fake), "CALLS": str(checkout / "calls"), "RAYRFT_DEVICE": "cpu", "PATH": str(tools)}
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


def put(tools: Path, name: str, script: str) -> None:
    """A program of this name, in place of the machine's."""
    (tools / name).unlink(missing_ok=True)
    (tools / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (tools / name).chmod(0o755)


def test_bubblewrap_is_installed_where_it_may_be(
    setup: Setup, asked: Callable[[], str], checkout: Path, tools: Path
) -> None:
    put(tools, "id", "echo 0")
    put(
        tools,
        "apt-get",
        'echo "apt-get $*" >>"$CALLS"; [ "$1" = update ] || [ -e "$CALLS.updated" ]; code=$?\n'
        '[ "$1" != update ] || touch "$CALLS.updated"; exit $code',
    )
    result = setup()
    assert result.returncode == 0 and "installed bubblewrap" in result.stderr and "ready" in result.stderr
    commands = [line for line in asked().splitlines() if line.startswith("apt-get")]
    install = "apt-get install -y -qq bubblewrap"
    assert commands == [install, "apt-get update -qq", install], "the index is fetched where it is needed"

    put(tools, "id", "echo 1000")
    put(tools, "sudo", 'echo "sudo $*" >>"$CALLS"; shift; "$@"')
    assert setup("test").returncode == 0
    assert "sudo -n apt-get install" in asked(), "an ordinary user asks for no password"

    put(tools, "bwrap", "exit 0")
    assert setup("bench").returncode == 0 and "apt-get" not in asked()


@pytest.mark.parametrize("apt", [True, False])
def test_where_bubblewrap_may_not_be_installed_it_is_said_how_and_set_up_goes_on(
    setup: Setup, tools: Path, apt: bool
) -> None:
    put(tools, "id", "echo 1000")
    if apt:
        put(tools, "apt-get", "exit 0")
        put(tools, "sudo", "exit 1")
    result = setup()
    assert result.returncode == 0 and "ready" in result.stderr
    [line] = [line for line in result.stderr.splitlines() if "bubblewrap" in line]
    assert "apt-get install bubblewrap" in line and "installed" not in line.replace("cannot be installed", "")


@pytest.mark.parametrize(("device", "installs"), [("cpu", True), ("gpu", False)])
def test_libnuma_is_installed_where_vllm_loads_it_and_it_is_missing(
    setup: Setup, asked: Callable[[], str], tools: Path, device: str, installs: bool
) -> None:
    put(tools, "id", "echo 0")
    put(tools, "bwrap", "exit 0")
    put(tools, "apt-get", 'echo "apt-get $*" >>"$CALLS"')
    result = setup(RAYRFT_DEVICE=device, LACKS="libnuma.so.1")
    assert result.returncode == 0 and ("installed libnuma1" in result.stderr) == installs
    assert ("apt-get install -y -qq libnuma1" in asked()) == installs


@pytest.mark.parametrize(("device", "last"), [("cpu", False), ("gpu", True)])
def test_gpus_are_examined_at_the_end_and_a_fault_does_not_undo_the_set_up(
    setup: Setup, asked: Callable[[], str], device: str, last: bool
) -> None:
    result = setup(RAYRFT_DEVICE=device)
    assert result.returncode == 0 and (asked().splitlines()[-1] == "doctor") == last
    result = setup("test", RAYRFT_DEVICE=device, LACKS="doctor")
    assert result.returncode == 0 and "ready" in result.stderr
    assert setup(RAYRFT_DEVICE=device).returncode == 0 and asked() == "doctor\n" * last


@pytest.mark.parametrize(("device", "said"), [("", True), ("cpu", False)])
def test_a_gpu_whose_driver_does_not_answer_is_named(setup: Setup, tools: Path, device: str, said: bool) -> None:
    put(tools, "nvidia-smi", "exit 9")
    put(tools, "grep", f'[[ "$*" == *0x10de* ]] || exec {shutil.which("grep")} "$@"')
    result = setup(RAYRFT_DEVICE=device)
    assert result.returncode == 0 and ("driver does not answer" in result.stderr) is said
