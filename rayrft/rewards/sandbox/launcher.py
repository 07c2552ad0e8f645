"""Starts a program in namespaces of its own, without bubblewrap: a script that the sandbox runs by itself.

It takes the number of a file descriptor that holds its orders (`marshal`, from the process that starts it), and says
what bubblewrap says with ``--json-status-fd``. It imports little, for every program waits for it.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import struct
import sys

TYPE_CHECKING = False  # typing takes as long to import as all the others
if TYPE_CHECKING:
    from typing import Any

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000
_NEWPID, _NEWNET = 0x20000000, 0x40000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE, _DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 0x2
_PDEATHSIG, _SECCOMP, _NO_NEW_PRIVS, _FILTER = 1, 22, 38, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CLOSE_RANGE, _MOUNT_SETATTR = 436, 442  # these, and the three of Landlock, on both
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = -100, 0x8000, 0x1
_SIOCSIFFLAGS, _UP = 0x8914, 0x1
_SIGKILL, _IGNORED_BY_PYTHON = 9, (13, 25)  # SIGPIPE, SIGXFSZ

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def _call(what: str, number: int, *arguments: int | bytes | None) -> int:
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in (number, *arguments)]
    return _checked(what, _libc.syscall(*wide))


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [each.encode() if each is not None else None for each in (source, target, kind, data)]
    done = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(f"mount {source} at {target}", done)


def _read_only(path: str, *, recursive: bool) -> None:
    attributes = struct.pack("=QQQQ", _READ_ONLY, 0, 0, 0)  # struct mount_attr
    where = _AT_FDCWD, path.encode(), _AT_RECURSIVE * recursive
    _call(f"make {path} read-only", _MOUNT_SETATTR, *where, attributes, len(attributes))


def _build_root(orders: dict[str, Any]) -> None:
    """Replace the root by one that holds only what the program needs."""
    sources = [os.open(path, os.O_PATH) for path in orders["binds"]]
    _mount("none", "/", None, _REC | _PRIVATE)
    staging = "/tmp"  # it may hide what is bound, which is open by now
    _mount("tmpfs", staging, "tmpfs", _NOSUID, "size=1m,mode=755")
    for path, descriptor in zip(orders["binds"], sources, strict=True):
        inside, source = staging + path, f"/proc/self/fd/{descriptor}"
        os.makedirs(os.path.dirname(inside), 0o755, exist_ok=True)
        if os.path.isdir(source):
            os.mkdir(inside, 0o755)
        else:
            os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(source, inside, None, _BIND | _REC)
        _read_only(inside, recursive=True)
        os.close(descriptor)
    for path, target in orders["links"].items():
        os.symlink(target, staging + path)
    for path, size in orders["folders"].items():
        os.makedirs(staging + path, 0o755, exist_ok=True)
        _mount("tmpfs", staging + path, "tmpfs", _NOSUID | _NODEV, f"size={size},mode=1777")
    if orders["lenient"]:
        os.mkdir(f"{staging}/proc", 0o755)
        _mount("proc", f"{staging}/proc", "proc", _NOSUID | _NODEV)
    for path, content in orders["files"].items():
        os.makedirs(staging + os.path.dirname(path), 0o755, exist_ok=True)
        with open(staging + path, "wb") as file:
            file.write(content)
        os.chmod(staging + path, 0o755)
    os.chdir(staging)
    _call("pivot_root", _PIVOT_ROOT[os.uname().machine], b".", b".")
    _checked("leave the old root", _libc.umount2(b".", _DETACH))
    os.chdir("/")
    _read_only("/", recursive=False)


def _raise_loopback() -> None:
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP))  # struct ifreq


def _confine_files(writable: list[str], lenient: bool) -> None:
    """A second barrier, by Landlock: only these folders can be written and, unless lenient, there is no TCP."""
    version = _call("Landlock", _LANDLOCK_CREATE, None, 0, 1)
    everything = (1 << 13 + (version >= 2) + (version >= 3) + (version >= 5)) - 1
    reading = 0b1101  # execute, read a file, read a folder
    handled = struct.pack("=QQQ", everything, 3 if version >= 4 and not lenient else 0, 3 if version >= 6 else 0)
    rules = _call("Landlock", _LANDLOCK_CREATE, handled, 8 if version < 4 else 16 if version < 6 else 24, 0)
    for path, allowed in [("/", reading), *((path, everything) for path in writable)]:
        folder = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            allowed &= 0b111 | (1 << 14 if version >= 3 else 0)
        _call(f"Landlock for {path}", _LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, folder), 0)
        os.close(folder)
    _call("Landlock", _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _drop(orders: dict[str, Any]) -> None:
    """Give up what the builder of the root could do."""
    if orders["user"] is not None:
        os.setgroups([])
        os.setresgid(*[orders["user"]] * 3)
        os.setresuid(*[orders["user"]] * 3)
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3, this process
    _call("drop capabilities", _CAPSET[os.uname().machine], header, bytes(24))
    _checked("prctl", _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _confine_files(orders["writable"], orders["lenient"])
    for name, limit in orders["rlimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    code = ctypes.create_string_buffer(orders["seccomp"], len(orders["seccomp"]))
    program = struct.pack("@HP", len(orders["seccomp"]) // 8, ctypes.addressof(code))  # struct sock_fprog
    _checked("seccomp", _libc.prctl(_SECCOMP, _FILTER, ctypes.c_char_p(program), 0, 0))


def _init(orders: dict[str, Any]) -> None:
    """Process 1: starts the program and ends with it, whereupon the kernel kills whatever it left."""
    os.setsid()
    _build_root(orders)
    if orders["lenient"]:
        _raise_loopback()
    _checked("set the host's name", _libc.sethostname(b"sandbox", 7))
    _drop(orders)
    _die_with_parent(orders["go"])
    os.set_inheritable(orders["status"], False)
    child = os.fork()
    if child == 0:
        for number in _IGNORED_BY_PYTHON:
            _libc.signal(number, None)
        os.chdir(orders["folder"])
        _call("close_range", _CLOSE_RANGE, 3, 0xFFFFFFFF, 0)
        os.execve(orders["command"][0], orders["command"], orders["environment"])
    for fd in (0, 1, 2):
        os.close(fd)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os.write(orders["status"], b'{"exit-code": %d}\n' % (code if code >= 0 else 128 - code))
            return


def _die_with_parent(go: int) -> None:
    """Be killed when the parent dies, and end at once if it is dead already: then ``go`` is at its end, for who holds
    the other one is the launcher's parent. A process that becomes another user forgets this."""
    _checked("prctl", _libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0))
    ready = select.poll()  # select() takes no descriptor above 1023, and a parent that holds many hands one on
    ready.register(go, select.POLLIN)
    if ready.poll(0) and not os.read(go, 1):
        os._exit(1)


def _map_user(inside: int, user: int, group: int) -> None:
    """Be the unprivileged user ``inside`` in the new user namespace, and nobody else."""
    for name, text in ("uid_map", f"{inside} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{inside} {group} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def main() -> int:
    with open(int(sys.argv[1]), "rb") as file:
        orders = marshal.load(file)
    user, group = os.geteuid(), os.getegid()
    _die_with_parent(orders["go"])
    spaces = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
    _checked("unshare", _libc.unshare(spaces | (_NEWUSER if orders["user"] is None else 0)))
    if orders["user"] is None:
        _map_user(orders["nobody"], user, group)
    child = os.fork()
    if child == 0:
        try:
            os.read(orders["go"], 1)
            _init(orders)
        except OSError as error:
            os.write(2, f"launcher: {error.filename or 'cannot start the program'}: {error.strerror}\n".encode())
        os._exit(0)
    os.write(orders["status"], b'{"child-pid": %d}\n' % child)
    os.close(orders["status"])
    os.close(orders["go"])
    os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
