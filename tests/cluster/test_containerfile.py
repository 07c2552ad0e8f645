"""The steps of `cluster/Containerfile`, run in a root made by debootstrap: Debian without GPUs. FROM is not tried."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from string import Template

import pytest

from tests.conftest import ROOT

CONTAINERFILE = ROOT / "cluster" / "Containerfile"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MACHINE = "/machine"
"""Where a root has the files that this machine's pip settings name: certificates, wheels, an index on disk."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Containerfile, each with its arguments on one line, without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def machine_mirror() -> tuple[str, str]:
    """Return this machine's release and its apt's mirror of it. Skip the test unless it is Debian 12."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.MULTILINE))
    name = release.get("VERSION_CODENAME", "")
    if (release.get("ID"), release.get("VERSION_ID")) != ("debian", "12"):
        pytest.skip("the steps need Debian 12, for its Python 3.11")
    form = ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    found = re.search(rf"^{name} main (\S+)$", subprocess.check_output(form, text=True), re.MULTILINE)
    return (name, found[1]) if found else pytest.skip("apt has no list of packages: apt-get update")


def pip_settings() -> tuple[dict[str, str], set[str]]:
    """Return the variables that configure pip as on this machine, and the paths in their values."""
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    scopes = [re.findall(rf"^{scope}\.([a-z-]+)=(.*)$", listed, re.MULTILINE) for scope in ("global", ":env:")]
    found = {key: str(ast.literal_eval(value)) for scope in scopes for key, value in scope}
    settings = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in found.items()}
    words = {word.removeprefix("file://") for value in settings.values() for word in value.split()}
    paths = {word for word in words if word.startswith("/") and Path(word).exists()}
    for path in sorted(paths, key=len, reverse=True):
        settings = {key: value.replace(path, MACHINE + path) for key, value in settings.items()}
    return settings, paths


@dataclass
class Image:
    """A root, and how the next step runs in it."""

    root: Path
    user: str = "root"
    folder: str = "/"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    environment: dict[str, str] = field(default_factory=dict)
    mounts: list[str] = field(default_factory=list)

    def run(self, command: str, timeout: int = 1800) -> subprocess.CompletedProcess[str]:
        """Run a command in namespaces of its own: its mounts and processes end with it."""
        ids = {"root": "0:0"}.get(self.user, f"{self.user}:{self.user}")
        home = {"root": "/root"}.get(self.user, "/home/ray")
        variables = [f"{key}={value}" for key, value in {**self.environment, "HOME": home}.items()]
        inside = ["chroot", f"--userspec={ids}", str(self.root), "env", "-i", "-C", self.folder]
        script = " && ".join([*self.mounts, "exec " + shlex.join([*inside, *variables, *self.shell, command])])
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={self.root}/proc"]
        return subprocess.run([*apart, "bash", "-c", script], capture_output=True, text=True, timeout=timeout)

    def build(self, text: str, arguments: dict[str, str]) -> None:
        """Run the steps of a Containerfile."""
        for name, rest in instructions(text):
            known = {**arguments, **self.environment}
            match name:
                case "FROM":
                    pass
                case "ARG":
                    arguments.setdefault(*rest.split("=", 1))
                case "ENV":
                    for each in rest.split():
                        key, _, value = each.partition("=")
                        self.environment[key] = Template(value).substitute(known)
                case "SHELL":
                    self.shell = ast.literal_eval(rest)
                case "USER":
                    self.user = rest
                case "WORKDIR":
                    self.folder = rest
                case "COPY":
                    chown, source, target = rest.split()
                    assert source == "."
                    self.copy(self.root / target.removeprefix("/"), chown.removeprefix("--chown="))
                case "RUN":
                    done = self.run(rest)
                    assert done.returncode == 0, f"{rest}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
                case _:
                    raise AssertionError(f"{name} is an instruction that this test does not know")

    def copy(self, target: Path, owner: str) -> None:
        """Copy the project without what .dockerignore names."""
        patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]

        def ignored(folder: str, names: list[str]) -> list[str]:
            here = [each.removeprefix("**/") for each in patterns if each.startswith("**/") or Path(folder) == ROOT]
            return [name for name in names if any(fnmatch(name, pattern) for pattern in here)]

        shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)
        subprocess.run(["chown", "--recursive", "--no-dereference", owner, str(target)], check=True)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image that the Containerfile makes with DEVICE=cpu."""
    if missing := [tool for tool in ("debootstrap", "chroot", "unshare") if not shutil.which(tool, path=PATH)]:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install debootstrap")
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"]).returncode:
        pytest.skip("a root is made by root, on a machine that allows namespaces")
    release, mirror = machine_mirror()
    root = tmp_path_factory.mktemp("image") / "root"
    try:
        yield make_image(root, release, mirror)
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=True)


def make_image(root: Path, release: str, mirror: str) -> Image:
    """Make a root of this release with this machine's settings of apt and pip, and run the steps in it."""
    command = ["debootstrap", "--variant=minbase", release, str(root), mirror]
    made = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    settings = subprocess.check_output(["apt-config", "dump", "Acquire"], text=True)
    (root / "etc/apt/apt.conf.d/99machine").write_text(settings)
    pip, paths = pip_settings()
    mounts = [f"mount --rbind /dev {root}/dev", f"mount --rbind /sys {root}/sys"]
    for path in sorted(paths):
        target = Path(f"{root}{MACHINE}{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if Path(path).is_dir() else target.touch()
        mounts.append(shlex.join(["mount", "--bind", "-o", "ro", path, str(target)]))
    proxies = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
    image = Image(root, environment={**pip, **proxies, "PATH": PATH}, mounts=mounts)
    image.build(CONTAINERFILE.read_text(), {"DEVICE": "cpu"})
    return image


@pytest.mark.slow
def test_an_image_without_gpus_has_the_command_and_takes_the_quickstart(image: Image) -> None:
    assert (image.user, image.folder) == ("1000", "/home/ray") and not (image.root / "opt/rayrft/.git").exists()
    helped = image.run("rayrft --help")
    assert helped.returncode == 0 and "Run a config to its end." in helped.stdout, helped.stderr
    check = (
        "from rayrft.config import load_config as load; from rayrft.core.parts.table import plan_placement as plan; "
        "import torch, vllm; assert plan(load('/opt/rayrft/jobs/quickstart.yaml'))"
    )
    checked = image.run(shlex.join(["python", "-c", check]))
    assert checked.returncode == 0, checked.stderr
    assert image.run("touch /opt/rayrft/x && command -v bwrap gcc wget && id -u").stdout.endswith("\n1000\n")
    quick = "tasks.eval_size=4 stages.warmup.steps=2 stages.mix.steps=2 explorer.drop_zero_variance=false"
    ran = image.run(f"RAY_ADDRESS=local rayrft run /opt/rayrft/jobs/quickstart.yaml storage=/home/ray/runs {quick}")
    assert ran.returncode == 0 and "finished after" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]
