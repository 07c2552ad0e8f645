"""What a sandbox keeps in, how it ends what it runs, and when it refuses. `attacks.py` has what code may try."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rayrft.errors import ConfigError, SandboxFailed
from rayrft.rewards import sandbox as module
from rayrft.rewards.sandbox import ISOLATIONS, Process, ProgramOutcome, Sandbox, SandboxLimits, isolate, seccomp
from rayrft.rewards.sandbox.isolation import Job, Root
from rayrft.runtime.processes.run_clock import Usage
from tests.conftest import ROOT
from tests.errors import about
from tests.rewards.scored import sandbox_of


@pytest.fixture(scope="module", params=["bwrap", "unshare"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return sandbox_of(request.param)


def run(sandbox: Sandbox, source: str, stdin: bytes = b"", **limits: Any) -> ProgramOutcome:
    return sandbox.run({"program.py": source}, [*sandbox.python, "program.py"], stdin, SandboxLimits(**limits))


def test_a_program_gets_its_input_and_files_and_gives_its_output_and_status(sandbox: Sandbox) -> None:
    source = "import sys\nprint(input() + open('data').read())\nprint('error', file=sys.stderr)\nsys.exit(3)"
    files: dict[str, str | bytes] = {"program.py": source, "data": b"\xc3\xa9"}
    outcome = sandbox.run(files, [*sandbox.python, "program.py"], b"caf")
    assert (outcome.ended, outcome.exit_code, outcome.stderr) == ("exit", 3, b"error\n")
    assert outcome.stdout.decode() == "café\n" and 0 < outcome.seconds < 10
    assert run(sandbox, "import os\nos.abort()").exit_code == 128 + signal.SIGABRT
    assert sandbox.run({}, ["/bin/sh", "-c", "kill -PIPE $$"]).exit_code == 128 + signal.SIGPIPE
    source = "import sys\nfor line in sys.stdin:\n    print(line * 3, end='')"
    data = b"x" * 999 + b"\n"
    outcome = run(sandbox, source, data * 3000, output_bytes=10 << 20)
    assert outcome.exit_code == 0 and outcome.stdout == data * 9000
    source = "import sys\nfor line in sys.stdin:\n    print(int(line) ** 2, flush=True)"
    with sandbox.start({"program.py": source}, [*sandbox.python, "program.py"]) as process:
        for number in range(50):
            process.send(f"{number}\n".encode())
            assert process.line(10) == str(number**2).encode()
        assert process.line(0.01) is None
        process.end_input()
        assert process.wait().exit_code == 0 and process.line(10) is None


def test_it_sees_nothing_but_what_it_needs(sandbox: Sandbox) -> None:
    source = """
import os, sys
print(sorted(os.listdir("/")), sorted(os.environ), os.getpid() < 10, os.getppid(), os.uname().nodename, os.listdir())
for fd in range(3, 200):
    try:
        os.fstat(fd)
        print("open", fd)
    except OSError:
        pass
for path in ("/", "/usr", "/usr/bin", sys.prefix, "/dev", "/etc"):
    try:
        open(f"{path}/new", "w")
        print("writable", path)
    except OSError:
        pass
for path in ("/proc/self", "/sys/kernel", "/home", "/etc/passwd", "/run", "/var", "HERE", "/dev/tty", "/dev/ptmx"):
    if os.path.exists(path):
        print("there", path)
print(len(os.listdir(os.path.dirname(sys.prefix))), os.getuid() > 0, os.geteuid() > 0, os.getgroups())
""".replace("HERE", str(ROOT))
    outcome = run(sandbox, source)
    seen, *rest = outcome.stdout.decode().splitlines()
    top = {"bin", "box", "dev", "etc", "lib", "lib32", "lib64", "sbin", "tmp", "usr"}
    assert set(eval(seen.partition("]")[0] + "]")) <= top | {Path(sys.base_prefix).parts[1]}
    assert seen.endswith(" True 1 sandbox ['program.py']")
    names = {"HOME", "LANG", "OMP_NUM_THREADS", "PATH", "PWD", "TMPDIR"}
    assert set(eval(seen.partition("] ")[2].partition("]")[0] + "]")) <= names
    alone = "1" if not sys.base_prefix.startswith("/usr") else rest[-1].split()[0]
    assert rest[-1].startswith(f"{alone} True True") and len(rest) == 1, rest


def test_what_takes_too_much_is_ended_and_it_is_said_why(sandbox: Sandbox) -> None:
    for source, ended in (
        ("while True: pass", "cpu"),
        ("import os\nfor _ in range(3): os.fork()\nwhile True: pass", "cpu"),
        ("import time\ntime.sleep(1000)", "wall"),
        ("import signal, time\nfor n in range(1, 32): n in (9, 19) or signal.signal(n, 1)\ntime.sleep(1000)", "wall"),
        ("import time\nx = bytearray(b'x') * 100_000_000\ntime.sleep(1000)", "memory"),
        ("import os, time\nfor _ in range(3): os.fork()\nx = bytearray(b'x') * 20_000_000\ntime.sleep(1000)", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    ):
        limits = {"cpu": {"cpu_s": 0.3, "wall_s": 30}, "wall": {"wall_s": 0.5}, "memory": {"memory_mib": 90}}
        outcome = run(sandbox, source, **limits.get(ended, {}))
        assert (outcome.ended, outcome.exit_code) == (ended, None), outcome
        assert len(outcome.stdout) <= 1 << 20 and len(outcome.stderr) <= 1 << 20


def test_packages_may_lie_in_tmp_and_where_a_program_does_not_see_them_it_is_refused(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "planted.py").write_text("value = 42")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    packaged = Sandbox(sandbox.isolation.name, packages=True)
    source = f"import sys\nsys.path.append({packaged.paths[0]!r})\nimport planted\nprint(planted.value)"
    assert run(packaged, source).stdout == b"42\n"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as hidden:
        monkeypatch.setattr(module.sysconfig, "get_path", lambda name: hidden)
        with pytest.raises(ConfigError, match="does not see"):
            Sandbox(sandbox.isolation.name, packages=True)


def test_a_wait_for_a_core_is_none_of_its_time(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Usage, "of", lambda *_, **__: Usage(1, waited_s=time.monotonic()))
    slow = "import time\ntime.sleep(0.4)\nprint('done')"
    outcome = run(sandbox, slow, wall_s=0.1)
    assert (outcome.ended, outcome.stdout) == ("exit", b"done\n") and outcome.waited_s > 0.2
    monkeypatch.setattr(Usage, "of", lambda *_, **__: Usage(1))
    assert run(sandbox, slow, wall_s=0.1).ended == "wall"


def test_the_kernel_refuses_what_is_beyond_a_limit(sandbox: Sandbox) -> None:
    for source, said in (
        ("x = bytearray(10**9)", "MemoryError"),
        ("import os\nfor n in range(100): os.fork() or os._exit(os.system('sleep 100'))", "BlockingIOError"),
        (
            "import threading as t, time\nfor n in range(100): t.Thread(target=time.sleep, args=(1,)).start()",
            "RuntimeE",
        ),
        ("import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nopen('x', 'w').truncate(1 << 40)", "too large"),
        ("for n in range(100): open(f'/box/{n}', 'wb').write(bytes(1 << 20))", "No space left"),
        ("for n in range(100): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))", "No space left"),
        ("import os\nfor n in range(100): os.dup(0)", "Too many open files"),
    ):
        limits = {"memory_mib": 128, "processes": 8, "folder_mib": 4, "wall_s": 30}
        outcome = run(sandbox, source, **limits)
        assert outcome.exit_code == 1 and said in outcome.stderr.decode(), outcome


def test_processes_are_counted_for_each_program_alone(sandbox: Sandbox) -> None:
    """Also where it has the same user as others: a neighbour with many processes takes nobody's."""
    source = "import subprocess as s\nps = [s.Popen(['/bin/cat']) for _ in range(6)]\nprint('up', flush=True)\ninput()"
    started = {"p.py": source}, [*sandbox.python, "p.py"], SandboxLimits(processes=8)
    with sandbox.start(*started) as one, sandbox.start(*started) as other:
        assert one.line(20) == other.line(20) == b"up"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
def test_denied_system_calls_fail_and_those_of_other_architectures_end_the_program(sandbox: Sandbox) -> None:
    source = """
import ctypes, mmap
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes.fromhex("CODE"))
print("before", flush=True)
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
    # getpid in the ways of i386, int 0x80, and of x32, syscall
    for code in ("b8 14 00 00 00 cd 80 c3", "b8 27 00 00 40 0f 05 c3"):
        outcome = run(sandbox, source.replace("CODE", code))
        assert (outcome.stdout, outcome.exit_code) == (b"before\n", 128 + signal.SIGSYS)
    numbers = [pair[0] for pair in seccomp._DENIED.values() if pair[0] is not None]
    source = f"""
import ctypes, errno, threading
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        print("not denied", number)
for number in (435, 451, 1000):
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:
        print("known", number)
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    if libc.syscall(56, flag | 17, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        print("new namespace", flag)
if libc.syscall(302, 1, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
    print("limits of others")
thread = threading.Thread(target=print, args=("threads work",))
thread.start()
thread.join()
"""
    for each in (sandbox, Sandbox(sandbox.isolation.name, lenient=True)):
        assert run(each, source).stdout == b"threads work\n"


def test_every_filter_is_a_program_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in ("x86_64", "aarch64"):
        code = seccomp.program(machine)
        steps = [code[at : at + 8] for at in range(0, len(code), 8)]
        for number, step in enumerate(steps):
            kind, yes, no = int.from_bytes(step[:2], "little"), step[2], step[3]
            assert kind == 0x06 or number + 1 + max(yes, no) < len(steps)
        assert steps[-1][:2] == steps[-4][:2] == b"\x06\x00"
    with pytest.raises(ConfigError, check=about("reward.options.isolation", "riscv64")):
        seccomp.program("riscv64")


def test_landlock_alone_keeps_writing_to_the_folder(tmp_path: Path) -> None:
    sandbox_of("unshare")
    (tmp_path / "folder").mkdir()
    code = """
import sys
from rayrft.rewards.sandbox import launcher
launcher._libc.prctl(38, 1, 0, 0, 0)
launcher._confine_files([sys.argv[1] + "/folder"], lenient=False)
open(sys.argv[1] + "/folder/file", "w").write("inside")
print(open(sys.argv[1] + "/folder/file").read())
open(sys.argv[1] + "/file", "w")
"""
    result = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "inside\n" and "PermissionError" in result.stderr


def descendants(pid: int) -> set[int]:
    found, todo = set[int](), [pid]
    while todo:
        for children in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            new = {int(each) for each in children.read_text().split()}
            found |= new
            todo += new
    return found


def test_nothing_stays_when_the_caller_is_killed(sandbox: Sandbox) -> None:
    caller = f"""
import sys
from rayrft.rewards.sandbox import Sandbox
sandbox = Sandbox({sandbox.isolation.name!r})
source = "import os, time\\nos.fork()\\nos.fork()\\nprint('up', flush=True)\\ntime.sleep(1000)"
process = sandbox.start({{"p.py": source}}, [*sandbox.python, "p.py"])
for _ in range(4):
    print(process.line(30), flush=True)
process.wait()
"""
    with subprocess.Popen([sys.executable, "-c", caller], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(4)] == [b"b'up'\n"] * 4
        pids = descendants(process.pid)
        handles = [os.pidfd_open(pid) for pid in pids]
        process.kill()
        process.wait()
    assert len(pids) >= 5
    for handle in handles:
        poller = module.select.poll()
        poller.register(handle, module.select.POLLIN)
        assert poller.poll(20_000), "it is still there"
        os.close(handle)


def test_nothing_is_left_open_or_unreaped(sandbox: Sandbox) -> None:
    def left() -> tuple[int, set[int]]:
        return len(os.listdir("/proc/self/fd")), descendants(os.getpid())

    run(sandbox, "print(1)")
    before = left()
    for source in ("import os\nos._exit(1)", "while True: print(1)", "import os\nos.fork()\nos.closerange(0, 9)"):
        run(sandbox, source)
    with sandbox.start({}, [*sandbox.python, "-c", "input()"]) as process:
        pass
    # What nobody reaps would fill a container whose own process 1 reaps nobody.
    assert not os.path.exists(f"/proc/{process.first_pid}")
    with sandbox.start({}, [*sandbox.python, "-c", "print()"]) as process:
        process.wait()
    assert not os.path.exists(f"/proc/{process.first_pid}")
    with pytest.raises(ZeroDivisionError), sandbox.start({}, [*sandbox.python, "-c", "input()"]):
        _ = 1 / 0
    assert left() == before


def test_a_sandbox_that_is_killed_from_outside_says_nothing_of_its_program(sandbox: Sandbox) -> None:
    with sandbox.start({}, [*sandbox.python, "-c", "print('up', flush=True)\ninput()"]) as process:
        assert process.line(20) == b"up"
        process._process.kill()
        with pytest.raises(SandboxFailed):
            process.wait()


def test_several_threads_may_use_one_in_a_process_that_holds_many_files(sandbox: Sandbox) -> None:
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # select() takes no descriptor above 1023
    try:
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda n: run(sandbox, f"print({n})", wall_s=60).stdout, range(6)))
    finally:
        for fd in held:
            os.close(fd)
    assert found == [f"{n}\n".encode() for n in range(6)]


ORDINARY = """
import os
from rayrft.rewards.sandbox import SandboxLimits, Sandbox
sandbox = Sandbox("ISOLATION")
outcome = sandbox.run({"p.py": '''
import os, subprocess
ps = []
try:
    while True:
        ps.append(subprocess.Popen(["/bin/cat"]))
except OSError as error:
    print(len(ps) < 10, error.errno)
print(os.listdir("/box"), os.path.exists("/proc/self"), os.path.exists("FILE"))
for path in ("FILE", "/usr/new", "/new", "/etc/new", "/dev/new"):
    for change in (lambda: os.chmod(path, 0), lambda: open(path, "w")):
        try:
            change()
            print("changed", path)
        except OSError:
            pass
'''}, [*sandbox.python, "p.py"], limits=SandboxLimits(processes=8))
print(outcome.stdout.decode(), outcome.stderr.decode())
assert sandbox.run({}, [*sandbox.python, "-c", "while True: pass"], limits=SandboxLimits(cpu_s=0.2)).ended == "cpu"
"""


def test_an_ordinary_user_is_served_as_well(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> None:
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or not python or shutil.which("setpriv") is None:
        pytest.skip("needs root to become another user, setpriv, and a Python that every user can read")
    # The package without what it imports, which that Python may lack.
    folder = Path(tmp_path_factory.mktemp("ordinary"))
    for parent in [folder, *folder.parents]:
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    shutil.copytree(ROOT / "rayrft/rewards/sandbox", folder / "rayrft/rewards/sandbox")
    for package in ("rayrft", "rayrft/rewards", "rayrft/runtime", "rayrft/runtime/processes"):
        (folder / package).mkdir(exist_ok=True)
        (folder / package / "__init__.py").touch()
    for name in ("errors.py", "runtime/processes/run_clock.py"):
        shutil.copy(ROOT / "rayrft" / name, folder / "rayrft" / name)
    file = folder / "file"
    file.touch()
    os.chown(file, 65534, 65534)
    code = ORDINARY.replace("ISOLATION", sandbox.isolation.name).replace("FILE", str(file))
    become = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    result = subprocess.run([*become, python, "-B", "-c", code], cwd=folder, capture_output=True, text=True)
    if "cannot be isolated" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert result.stdout.split("\n")[:3] == ["True 11", "['p.py'] False False", " "], result.stdout + result.stderr
    assert result.returncode == 0, result.stderr
    assert file.stat().st_mode & 0o777 == 0o644


# Which isolation


def test_the_first_that_works_is_taken_and_said(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    name = sandbox.isolation.name
    for other in {"bwrap", "unshare"} - {name}:
        monkeypatch.setattr(type(ISOLATIONS[other]), "missing", lambda self: "it is not there")
    isolate.cache_clear()
    taken = Sandbox()
    isolate.cache_clear()
    assert taken.isolation.name == name
    means = {
        "bwrap": "bubblewrap: namespaces, seccomp and limits",
        "unshare": "namespaces, Landlock, seccomp and limits",
    }
    assert taken.describe() == f"code runs isolated by {means[name]}"


def test_without_any_it_refuses_and_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ISOLATIONS["bwrap"]), "missing", lambda self: "there is no bwrap")
    # What a launcher says where it may not make namespaces.
    monkeypatch.setattr(module.isolation.seccomp, "program", lambda **_: b"\0" * 8)
    isolate.cache_clear()
    with pytest.raises(ConfigError, check=about("reward.options.isolation", "auto")) as refused:
        Sandbox()
    isolate.cache_clear()
    for part in ("there is no bwrap", "unshare: ", "apt-get install bubblewrap", "none_i_trust_the_code"):
        assert part in str(refused.value)
    with pytest.raises(ConfigError, check=about("reward.options.isolation", "none")):
        Sandbox("none")


def test_trusted_code_runs_with_limits_only_if_so_named() -> None:
    trusting = Sandbox("none_i_trust_the_code")
    assert "without isolation" in trusting.describe()
    outcome = run(trusting, "import os\nprint(os.path.exists('/proc/self'), input(), os.listdir())", b"x\n")
    assert outcome.stdout == b"True x ['program.py']\n"
    assert run(trusting, "while True: pass", cpu_s=0.3).ended == "cpu"
    assert run(trusting, "import time\ntime.sleep(1000)", wall_s=0.3).ended == "wall"
    assert run(trusting, "x = bytearray(10**9)", memory_mib=128).exit_code == 1
    assert run(trusting, "import sys\nsys.exit(3)").exit_code == 3
    sleeper = "import os, time\nif os.fork(): print('x', flush=True)\nelse: time.sleep(1000)"
    assert run(trusting, sleeper).stdout == b"x\n", "what it leaves behind in its group holds nobody up"


def test_gvisor_is_given_the_same_view_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what it is asked for: there is no runsc here."""
    fake = tmp_path / "runsc"
    shown = 'cat "$5/config.json" 2>/dev/null || cat "$6/config.json"'
    fake.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n{shown}\nexit 7\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    limits, gvisor = SandboxLimits(memory_mib=100, processes=5, folder_mib=3), ISOLATIONS["runsc"]
    job = Job(Root.of_host([]), {"p.py": b"print(1)"}, ["/usr/bin/python3", "p.py"], limits)
    assert gvisor.missing() is None
    with Process(gvisor.start(job), limits) as process:
        outcome = process.wait()
    assert outcome.exit_code == 7
    first, last = (tmp_path / "calls").read_text().splitlines()
    assert "--network=none" in first and " run --bundle " in first
    bundle = Path(first.split()[first.split().index("--bundle") + 1])
    assert first.endswith(bundle.name) and last == f"delete --force {bundle.name}" and not bundle.exists()
    config = json.loads(outcome.stdout)
    assert config["process"]["args"] == ["/usr/bin/python3", "p.py"] and config["process"]["user"]["uid"] == 65534
    assert config["process"]["noNewPrivileges"] and config["process"]["capabilities"] == {}
    assert config["root"]["readonly"]
    assert config["linux"]["resources"] == {"memory": {"limit": 100 << 20}, "pids": {"limit": 5}}
    mounts = {each["destination"]: each for each in config["mounts"]}
    assert "size=3145728" in mounts["/box"]["options"] and "ro" in mounts["/usr"]["options"]
    assert mounts["/box/p.py"]["source"].startswith(str(bundle)) and "ro" in mounts["/box/p.py"]["options"]
    assert not {"/", "/home", "/etc", "/proc", "/root"} & mounts.keys()
    assert {"network", "pid", "mount", "ipc"} <= {each["type"] for each in config["linux"]["namespaces"]}
