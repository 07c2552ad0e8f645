"""The filter of system calls in a sandbox, as the BPF program that seccomp takes (linux/seccomp.h, linux/filter.h).

What can reach beyond a process fails with EPERM; calls newer than the table fail with ENOSYS, for what they reach is
not known. A call in the form of another architecture (int 0x80 and x32 on x86-64) ends the process, for its number
means something else.
"""

from __future__ import annotations

import errno
import platform
import struct

from rayrft.errors import ConfigError

# Numbers on x86-64 and on aarch64; None for a missing call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438), "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # file systems and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225),
    # parts of the kernel that a program does not need, and that have had holes
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "lookup_dcookie": (212, 18),
    "personality": (135, 92), "syslog": (103, 116), "modify_ldt": (154, None), "uselib": (134, None),
    "_sysctl": (156, None),
    # memory that belongs to no process, which the watch would not see
    "memfd_create": (319, 279), "memfd_secret": (447, None), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # the machine
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "settimeofday": (164, 170),
    "adjtimex": (159, 171), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "iopl": (172, None),
    "ioperm": (173, None),
}  # fmt: skip
_CLONE, _SOCKET, _PRLIMIT, _CLONE3 = (56, 220), (41, 198), (302, 261), 435
_LAST = 450
"""set_mempolicy_home_node, of Linux 5.17: libc does without later ones."""
_X32, _AF_UNIX, _AF_INET = 0x40000000, 1, 2
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME, which clone cannot take."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def program(machine: str = platform.machine(), *, lenient: bool = False) -> bytes:
    """Return the filter: an array of ``struct sock_filter``. With ``lenient``, IPv4 is allowed, for programs whose
    network has nothing else. Raises ConfigError for an unknown architecture."""
    if machine not in _ARCHITECTURES:
        problem = "there is no filter of system calls for this architecture"
        remedy = f"score code on one of {', '.join(_ARCHITECTURES)}"
        raise ConfigError(problem, remedy, field="reward.options.isolation", value=machine)
    column, architecture = _ARCHITECTURES[machine]
    denied = sorted(number for numbers in _DENIED.values() if (number := numbers[column]) is not None)
    # A test jumps to one of the four ends, which follow in this order, to the next step (None), or over two steps.
    allow, fail, absent, kill, over = range(5)
    steps: list[tuple[int, int, int | None, int | None]] = [  # code, value, where to if true, where to if false
        (_LOAD, _ARCHITECTURE_AT, None, None),
        (_EQUAL, architecture, None, kill),
        (_LOAD, _NUMBER_AT, None, None),
        (_ANY_BIT, _X32, kill, None),
        (_GREATER, _LAST, absent, None),
        (_EQUAL, _CLONE3, absent, None),  # its flags lie in memory, where a filter cannot read; libc then takes clone
        *((_EQUAL, number, fail, None) for number in denied),
    ]
    for number, test in (
        (_CLONE[column], (_ANY_BIT, _NEW_NAMESPACES, fail, allow)),
        (_SOCKET[column], (_GREATER, _AF_INET if lenient else _AF_UNIX, fail, allow)),
        (_PRLIMIT[column], (_EQUAL, 0, allow, fail)),  # its own limits only, not those of process 1
    ):
        steps += [(_EQUAL, number, None, over), (_LOAD, _ARGUMENT_AT, None, None), test]
    steps.append((_ANY_BIT, 0, allow, allow))
    packed = b""
    for to_ends, (code, value, *ways) in zip(reversed(range(len(steps))), steps, strict=True):
        if_true, if_false = (0 if way is None else 2 if way == over else to_ends + way for way in ways)
        packed += struct.pack("=HBBI", code, if_true, if_false, value)
    ends = [_ALLOW, _FAIL | errno.EPERM, _FAIL | errno.ENOSYS, _KILL]
    return packed + b"".join(struct.pack("=HBBI", _RETURN, 0, 0, end) for end in ends)
