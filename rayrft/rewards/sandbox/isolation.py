"""Isolate a program from the rest of the machine, by the means of the host.

In every isolation a program can read /usr, the libraries, Python's own folder and a few devices, and write to /box, its
folder, and /dev/shm, both in memory and of limited size. It has no network, no other process, no /proc and no /etc but
those of a lenient job, and an environment of its own. It runs as an unprivileged user: an unused uid if we are root,
else nobody in a user namespace, so that its processes are counted separately.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rayrft.rewards.sandbox import seccomp

Files = Mapping[str, str | bytes]
PROGRAM_FOLDER = "/box"
"""The folder of a program and its files."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": PROGRAM_FOLDER,
    "TMPDIR": PROGRAM_FOLDER,
    "LANG": "C.UTF-8",
}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"  # also for OpenBLAS: a thread for each core may exceed the limit of processes
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_NOBODY = 65534


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a program."""

    wall_s: float = 10.0
    """Wall time, without waits for a core."""
    cpu_s: float = 10.0
    """Of all its processes together."""
    memory_mib: int = 512
    """Resident memory of all its processes together."""
    folder_mib: int = 16
    """Size of its folder, of /dev/shm and of a file."""
    processes: int = 16
    """Processes and threads."""
    open_files: int = 64
    output_bytes: int = 1 << 20
    """Of stdout, and of stderr."""
    address_space: bool = True
    """Whether the address space of each process is at most twice the memory: some runtimes, as Node's, reserve more."""

    def rlimits(self) -> dict[str, int]:
        """Limits that the kernel keeps for each process, by the names that end `resource.RLIMIT_…`."""
        return {
            **({"AS": 2 * self.memory_mib << 20} if self.address_space else {}),
            "CORE": 0,
            "CPU": int(self.cpu_s) + 2,  # the watch over the sum ends it first
            "FSIZE": self.folder_mib << 20,
            "NOFILE": self.open_files,
            "NPROC": self.processes + 1,  # process 1 is counted, too
        }


@dataclass(frozen=True)
class Root:
    """The files of the host that a program can read."""

    binds: tuple[str, ...]
    links: Mapping[str, str]

    @classmethod
    def of_host(cls, folders: Sequence[str]) -> Root:
        """Return /usr, the libraries, the folders of this Python and those given here."""
        binds, links = ["/usr"], dict[str, str]()
        for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            if os.path.islink(path):
                links[path] = os.readlink(path)
            elif os.path.isdir(path):
                binds.append(path)
        own = [os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix, *folders)]
        for path in sorted({"/etc/ld.so.cache", *own}):
            if os.path.exists(path) and not any(Path(path).is_relative_to(bind) for bind in binds):
                binds.append(path)
        if not any(Path(bind).is_relative_to("/tmp") for bind in binds):
            links["/tmp"] = PROGRAM_FOLDER
        return cls(tuple(binds), links)


@dataclass(frozen=True)
class Job:
    """A program to start: the files in its folder, and a command, whose first word is a path."""

    root: Root
    files: Mapping[str, bytes]
    command: Sequence[str]
    limits: SandboxLimits
    lenient: bool = False
    """Whether it finds what programs but for tests expect: its processes in /proc, its user in /etc, and IP between its
    processes."""

    def files_for(self, user: int) -> dict[str, bytes]:
        """Return the files to create, by their paths in the sandbox."""
        files = {f"{PROGRAM_FOLDER}/{name}": content for name, content in self.files.items()}
        if self.lenient:
            passwd, group = f"user:x:{user}:{user}::{PROGRAM_FOLDER}:/bin/sh\n", f"user:x:{user}:\n"
            files |= {"/etc/passwd": passwd.encode(), "/etc/group": group.encode()}
            files["/etc/hosts"] = b"127.0.0.1 localhost\n"
        return files


@dataclass
class Launch:
    """A program about to run. ``status`` reports its first process and its exit; a write to ``go`` starts it. Without
    these, ``process`` is its first process."""

    process: subprocess.Popen[bytes]
    status: int | None = None
    go: int | None = None
    clean: Callable[[], None] = field(default=lambda: None)


class Isolation(ABC):
    """A way to start programs."""

    name: str
    description: str

    def missing(self) -> str | None:
        """Return the tools that the host lacks, as far as can be seen without running a program."""
        return None

    @abstractmethod
    def start(self, job: Job) -> Launch:
        """Start a program, which waits for `Launch.go` if that is set."""


def _popen(command: Sequence[str], fds: Sequence[int], **options: Any) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    options = {"env": ENVIRONMENT, "cwd": "/", "bufsize": 0, "start_new_session": True, **options}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=fds, **options)


def _supervised(start: Callable[[int, int], tuple[Sequence[str], list[int]]]) -> Launch:
    """Start a command that reports on a descriptor and waits for another; ``start`` returns it and its other ones."""
    status, status_inside = os.pipe()
    go_inside, go = os.pipe()
    fds: list[int] = []
    try:
        command, fds = start(status_inside, go_inside)
        return Launch(_popen(command, [status_inside, go_inside, *fds]), status, go)
    except BaseException:
        os.close(status)
        os.close(go)
        raise
    finally:
        for fd in (status_inside, go_inside, *fds):
            os.close(fd)


def _in_memory(content: bytes) -> int:
    fd = os.memfd_create("rayrft", 0)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@lru_cache
def bytecode(script: str) -> bytes:
    """Return a script of Python compiled as a .pyc file."""
    code = compile(Path(script).read_text(), Path(script).name, "exec")
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def unused_user() -> int:
    """Return an unused uid of this process's user namespace."""
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    end = min(max(int(first) + int(count) for first, _, count in lines), 1 << 31)
    return end - 2 - secrets.randbelow(end // 8)


def _prlimit(limits: Mapping[str, int]) -> list[str]:
    return ["/usr/bin/prlimit", *(f"--{name.lower()}={limit}" for name, limit in limits.items())]


class Bubblewrap(Isolation):
    """Namespaces and mounts by `bwrap`, with a filter of system calls and limits."""

    name, description = "bwrap", "bubblewrap: namespaces, seccomp and limits"

    def missing(self) -> str | None:
        tools = ["bwrap", "prlimit", *(["setpriv"] if os.geteuid() == 0 else [])]
        lacking = [tool for tool in tools if shutil.which(tool, path=ENVIRONMENT["PATH"]) is None]
        return f"there is no {' and no '.join(lacking)}" if lacking else None

    def start(self, job: Job) -> Launch:
        def command(status: int, go: int) -> tuple[list[str], list[int]]:
            fds = [_in_memory(seccomp.program(lenient=job.lenient))]
            words = ["bwrap", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
            words += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
            inside = [*_prlimit(job.limits.rlimits()), *job.command]
            user = _NOBODY
            if os.geteuid() == 0:
                # In a user namespace root stays root outside, and may have any number of processes.
                user = unused_user()
                words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
                ids = ["--reuid", str(user), "--regid", str(user), "--clear-groups"]
                inside = ["/usr/bin/setpriv", *ids, *inside]
            else:
                words += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
            # The shell is process 1: the host may not reap bwrap's, and a change of user loses the death signal.
            words += ["--as-pid-1"]
            inside = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *inside]
            # bwrap creates folders that only root can enter.
            for path in sorted({str(parent) for bind in job.root.binds for parent in Path(bind).parents} - {"/"}):
                words += ["--perms", "0755", "--dir", path]
            for path in job.root.binds:
                words += ["--ro-bind", path, path]
            for path, target in job.root.links.items():
                words += ["--symlink", target, path]
            words += ["--perms", "0755", "--dir", "/dev"]
            for path in _DEVICES:
                words += ["--dev-bind-try", path, path]
            if job.lenient:
                words += ["--proc", "/proc"]
            for path in (PROGRAM_FOLDER, "/dev/shm"):
                words += ["--perms", "1777", "--size", str(job.limits.folder_mib << 20), "--tmpfs", path]
            for path, content in job.files_for(user).items():
                fds.append(_in_memory(content))
                words += ["--perms", "0755", "--file", str(fds[-1]), path]
            words += ["--remount-ro", "/", "--chdir", PROGRAM_FOLDER, "--seccomp", str(fds[0])]
            words += ["--json-status-fd", str(status), "--block-fd", str(go), "--"]
            return words + inside, fds

        return _supervised(command)


class Namespaces(Isolation):
    """Namespaces and mounts by a launcher in Python, with Landlock as a second barrier around files."""

    name, description = "unshare", "namespaces, Landlock, seccomp and limits"

    def start(self, job: Job) -> Launch:
        def command(status: int, go: int) -> tuple[list[str], list[int]]:
            size = job.limits.folder_mib << 20
            devices = [path for path in _DEVICES if os.path.exists(path)]
            user = unused_user() if os.geteuid() == 0 else None
            folders = {PROGRAM_FOLDER: size, "/dev/shm": size}
            orders: dict[str, Any] = {"status": status, "go": go, "user": user, "nobody": _NOBODY}
            orders |= {"rlimits": job.limits.rlimits(), "seccomp": seccomp.program(lenient=job.lenient)}
            orders["lenient"] = job.lenient
            orders |= {"binds": [*job.root.binds, *devices], "links": dict(job.root.links), "folders": folders}
            orders |= {"files": job.files_for(user or _NOBODY)}
            orders |= {"folder": PROGRAM_FOLDER, "writable": [*folders, *devices]}
            orders |= {"command": list(job.command), "environment": ENVIRONMENT}
            launcher = bytecode(str(Path(__file__).with_name("launcher.py")))
            fds = [_in_memory(marshal.dumps(orders)), _in_memory(launcher)]
            return [sys.executable, "-I", "-S", f"/proc/self/fd/{fds[1]}", str(fds[0])], fds

        return _supervised(command)


class Runsc(Isolation):
    """gVisor: a separate kernel for each program, by `runsc` and an OCI bundle."""

    name, description = "runsc", "gVisor"

    def missing(self) -> str | None:
        return None if shutil.which("runsc") else "there is no runsc"

    def start(self, job: Job) -> Launch:
        bundle = Path(tempfile.mkdtemp(prefix="rayrft-sandbox-"))
        (bundle / "rootfs").mkdir()
        (bundle / "files").mkdir(mode=0o755)
        for name, content in job.files.items():
            (bundle / "files" / name).write_bytes(content)
            (bundle / "files" / name).chmod(0o755)
        (bundle / "config.json").write_text(json.dumps(self._config(job, bundle)))
        flags = ["--network=none", "--host-uds=none", *(["--rootless"] if os.geteuid() else [])]
        process = _popen(["runsc", *flags, "run", "--bundle", str(bundle), bundle.name], [], env=dict(os.environ))

        def clean() -> None:
            subprocess.run(["runsc", "delete", "--force", bundle.name], capture_output=True)
            shutil.rmtree(bundle, ignore_errors=True)

        return Launch(process, clean=clean)

    @staticmethod
    def _config(job: Job, bundle: Path) -> dict[str, Any]:
        size = job.limits.folder_mib << 20
        read = [*job.root.binds, *(target for target in job.root.links if os.path.isdir(target) and target != "/tmp")]
        options = ["nosuid", "nodev", "mode=1777", f"size={size}"]
        in_memory: dict[str, Any] = {"type": "tmpfs", "source": "tmpfs", "options": options}
        mounts = [{"destination": path, **in_memory} for path in (PROGRAM_FOLDER, "/tmp")]
        for path in read:  # after /tmp, in which they may lie
            source = os.path.realpath(path)
            mounts.append({"destination": path, "type": "bind", "source": source, "options": ["rbind", "ro"]})
        for name in job.files:
            file = {"type": "bind", "source": str(bundle / "files" / name), "options": ["bind", "ro"]}
            mounts.append({"destination": f"{PROGRAM_FOLDER}/{name}", **file})
        limits, memory = job.limits.rlimits().items(), job.limits.memory_mib << 20
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": _NOBODY, "gid": _NOBODY},
                "args": list(job.command),
                "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
                "cwd": PROGRAM_FOLDER,
                "noNewPrivileges": True,
                "capabilities": {},
                "rlimits": [{"type": f"RLIMIT_{name}", "hard": limit, "soft": limit} for name, limit in limits],
            },
            "root": {"path": "rootfs", "readonly": True},
            "hostname": "sandbox",
            "mounts": mounts,
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
                "resources": {"memory": {"limit": memory}, "pids": {"limit": job.limits.processes}},
            },
        }


class Nothing(Isolation):
    """No isolation, only limits and a folder: for trusted code."""

    name, description = "none_i_trust_the_code", ""

    def start(self, job: Job) -> Launch:
        folder = tempfile.mkdtemp(prefix="rayrft-code-")
        for name, content in job.files.items():
            Path(folder, name).write_bytes(content)
            Path(folder, name).chmod(0o755)
        limits = {name: limit for name, limit in job.limits.rlimits().items() if name != "NPROC"}  # it is per user
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        process = _popen([*_prlimit(limits), *job.command], [], cwd=folder, env=environment)
        return Launch(process, clean=lambda: shutil.rmtree(folder, ignore_errors=True))


ISOLATIONS: dict[str, Isolation] = {each.name: each for each in (Bubblewrap(), Namespaces(), Runsc(), Nothing())}
