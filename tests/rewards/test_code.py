"""Code against tests: what passes, what fails, what is unknown, and what code may try instead of solving its task."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from rayrft.experience import Task
from rayrft.rewards import RewardResult
from rayrft.rewards import code_trial as module
from rayrft.rewards.code import extract
from rayrft.rewards.code_runner import encode_value
from rayrft.rewards.code_trial import headers
from rayrft.rewards.code_values import literal, same_text, same_value
from rayrft.rewards.sandbox import Process, Sandbox, SandboxLimits
from tests.rewards import scored
from tests.rewards.attacks import ATTACKS, ON_THE_JUDGE
from tests.rewards.scored import pairs, real_rows, sandbox_of

ISOLATIONS = ["bwrap", "unshare"]


@pytest.fixture(scope="module", params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> str:
    return sandbox_of(request.param).isolation.name


def result(response: str, settings: dict[str, Any] | None = None, /, **metadata: Any) -> RewardResult:
    return scored.result("code", "", response, {"test_s": 10, "budget_s": 60, **(settings or {})}, **metadata)


ADD = "def add(a, b):\n    return a + b\n"
CALLS = [{"args": [1, 2], "expected": 3}, {"args": ["a", "b"], "expected": "ab"}]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\n"
ASSERTIONS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
TASKS: dict[str, dict[str, Any]] = {
    "calls": {"entry_point": "add", "tests": CALLS},
    "json": {"entry_point": "add", "tests": json.dumps(CALLS)},
    "check": {"entry_point": "add", "test": CHECK},
    "assertions": {"entry_point": "add", "tests": ASSERTIONS},
}


@pytest.mark.parametrize("kind", TASKS)
def test_a_function_is_right_if_it_passes_all_tests(kind: str) -> None:
    right = result(f"So:\n```python\n{ADD}```\n", **TASKS[kind])
    assert (right.value, right.components, right.reason) == (1.0, {"passed": 1.0, "compiled": 1.0}, None)
    wrong = result(ADD.replace("a + b", "a - b"), **TASKS[kind])
    assert wrong.value == 0.0 and wrong.components["compiled"] == 1.0 and wrong.reason


@pytest.mark.parametrize(("kind", "share"), [("calls", 0.5), ("assertions", 0.5), ("check", 0.0)])
def test_partial_credit_is_the_share_of_tests(kind: str, share: float) -> None:
    half = "def add(a, b):\n    return a + b if isinstance(a, str) else 0\n"
    found = result(half, {"partial": True}, **TASKS[kind])
    assert found.value == found.components["passed"] == share
    assert result(half, **TASKS[kind]).value == 0.0


@pytest.mark.parametrize("kind", ["calls", "assertions"])
def test_a_call_that_ends_the_program_does_not_take_the_others_along(kind: str) -> None:
    crashing = "import os\ndef add(a, b):\n    return a + b if isinstance(a, str) else os._exit(0)\n"
    found = result(crashing, {"partial": True}, **TASKS[kind])
    assert found.value == 0.5 and "exit status 0" in str(found.reason)


def test_what_the_solution_did_wrong_is_zero_with_a_reason() -> None:
    for solution, compiled, reason in (
        ("def add(a, b:", 0.0, "SyntaxError"),
        ("", 0.0, "name 'add' is not defined"),
        ("import nothing_of_this_name", 0.0, "ModuleNotFoundError"),
        ("\0", 0.0, "null bytes"),
        ("def add(a, b):\n    raise ValueError('no')", 1.0, "ValueError: no"),
        ("def add(a, b):\n    while True: pass", 1.0, "limit of"),
        ("def add(a, b):\n    return [0] * 10**9", 1.0, "MemoryError"),
        ("def add(a, b):\n    return object()", 1.0, "it returned a object"),
        ("def add(a, b):\n    return a + b == 3", 1.0, "it returned True"),
        ("def add(a, b):\n    return a + b + 1e-9", 1.0, "it returned 3.000000001"),
        ("def add(a, b):\n    return (a, b)", 1.0, "it returned (1, 2, )"),
    ):
        found = result(f"```\n{solution}\n```", {"test_s": 2}, **TASKS["calls"])
        assert found.value == 0.0 and found.components == {"passed": 0.0, "compiled": compiled}
        assert reason in str(found.reason), solution


def test_what_is_wrong_with_the_task_is_unknown() -> None:
    for metadata in (
        {},
        {"entry_point": "add", "tests": []},
        {"entry_point": 7, "tests": ASSERTIONS},
        {"entry_point": "add", "tests": [*CALLS, {"stdin": "", "stdout": ""}]},
        {"tests": CALLS},
        {"tests": [{"stdin": "3", "stdout": 3}]},
        {"entry_point": "add", "tests": CALLS, "prompt": [{"role": "user", "content": "Add."}]},
        {"entry_point": "add", "tests": [{"args": [object()], "expected": 1}]},
        {"entry_point": "add", "test": "def check(candidate:"},
        {"entry_point": "add", "test": "def check(candidate):\n    assert undefined(candidate(1, 2))"},
        {"entry_point": "add", "test": "def check(candidate):\n    assert 1 == 2"},
        {"entry_point": "add", "test": "def check(candidate):\n    candidate(lambda: 1)"},
        {"entry_point": "add", "tests": CALLS, "prompt": "1 / 0"},
        {"entry_point": "add", "tests": CALLS, "language": "cpp"},
    ):
        found = result(ADD, **metadata)
        assert found.value is None and found.reason, metadata


def test_too_many_tests_for_the_budget_are_unknown_and_slow_ones_are_wrong() -> None:
    many = {"entry_point": "add", "tests": CALLS * 100_000}
    assert "do not fit" in str(result(ADD, {"budget_s": 2}, **many).reason)
    sleeper = "import time\ndef add(a, b):\n    time.sleep(0.9)\n    return a + b"
    slow = result(sleeper, {"budget_s": 2, "test_s": 1}, **many)
    assert slow.value == 0.0 and "2 s are over" in str(slow.reason)


PROGRAM = [{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "-1 1", "stdout": "0"}]


def test_a_program_reads_and_writes() -> None:
    for solution, value in (
        ("print(sum(map(int, input().split())))", 1.0),
        ("import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b, '  \\n\\n')\nexit()", 1.0),
        ("if __name__ == '__main__':\n    print(sum(int(each) for each in open(0).read().split()))", 1.0),
        ("a, b = map(int, input().split())\ndef f(): return a + b\nclass A:\n    x = f()\nprint(A.x)", 1.0),
        ("print(7)", 0.0),
        ("print('7\\n0')", 0.0),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
        ("print(sum(map(int, input().split())), end='')\nprint(1 / 0)", 0.0),
        ("print(7\n", 0.0),
    ):
        found = result(f"```py\n{solution}\n```", tests=PROGRAM)
        broken = solution == "print(7\n"
        assert found.value == value and found.components["compiled"] == (not broken), found
        assert ("SyntaxError" in str(found.reason)) == broken


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_program_in_cpp_is_compiled_inside_and_run(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.rewards.code.headers", tuple)  # which takes seconds to make
    settings = {"language": "cpp", "isolation": isolation}
    source = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }"
    assert result(f"```cpp\n{source}\n```\nIn Python: `x`", settings, tests=PROGRAM).value == 1.0
    wrong = result(source.replace("+", "*"), settings, tests=PROGRAM)
    assert wrong.value == 0.0 and wrong.components["compiled"] == 1.0
    broken = result(source.replace(";", ""), settings, tests=PROGRAM)
    assert broken.components["compiled"] == 0.0 and "error" in str(broken.reason)
    stolen = result('#include "/etc/passwd"\nint main() {}', settings, tests=PROGRAM)
    assert stolen.components["compiled"] == 0.0 and "root" not in str(stolen.reason)


@pytest.mark.slow
def test_the_header_of_everything_is_compiled_once_for_all_solutions(isolation: str) -> None:
    if shutil.which("g++", path="/usr/bin") is None:
        pytest.skip("there is no g++")
    source = "#include <bits/stdc++.h>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
    runner = module.TestRunner(Sandbox(isolation, folders=headers()), SandboxLimits(), 60)
    task = Task.create("test", "question", "")
    assert runner(task, source, PROGRAM, "cpp").failures == [None, None]
    shown = source.replace("int main", "#if !__has_include(<bits/stdc++.h.gch>)\n#error not there\n#endif\nint main")
    assert runner(task, shown, PROGRAM, "cpp").failures == [None, None]
    made = [path.stat().st_mtime_ns for path in Path(headers()[0]).rglob("*.gch")]
    headers.cache_clear()
    assert [path.stat().st_mtime_ns for path in Path(headers()[0]).rglob("*.gch")] == made != []


def test_a_home_without_file_locks_costs_the_compiled_header_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(module, "compiler", lambda: "true")
    assert headers.__wrapped__() == ()


def test_a_solution_continues_its_prompt_or_uses_it() -> None:
    prompt = 'from math import tau\n\ndef helper(x):\n    return x + 1\n\ndef add(a, b):\n    """Add."""\n'
    check = "def check(candidate):\n    assert candidate(1, 2) == helper(2)"
    for response in ("\n  \n    # so:\n    return a + b\n", "def add(a, b):\n    return helper(a) + b - 1", ADD):
        assert result(response, entry_point="add", prompt=prompt, test=check).value == 1.0
    future = "from __future__ import annotations\n" + ADD
    assert result(future, entry_point="add", prompt=prompt, test=check).value == 1.0
    assert result("x = 1", entry_point="add", prompt=prompt, test=check).value == 0.0, "what the prompt leaves open"


def test_tests_may_expect_an_exception() -> None:
    raises = "def check(f):\n    try:\n        f(1)\n    except ValueError as error:\n        assert str(error) == 'no'"
    task = {"entry_point": "f", "test": f"{raises}\n    else:\n        assert False\n"}
    assert result("def f(x):\n    raise ValueError('no')", **task).value == 1.0
    for other in ("TypeError('no')", "ValueError('yes')", "SystemExit", "UnicodeDecodeError('a', b'', 0, 0, 'no')"):
        assert result(f"def f(x):\n    raise {other}", **task).value == 0.0
    assert result("import os\ndef f(x):\n    os._exit(0)", **task).value == 0.0


def test_installed_packages_are_there_when_asked_for() -> None:
    solution = "import numpy\ndef add(a, b):\n    return numpy.array([a, b]).sum()"
    tests = [{"args": [1, 2], "expected": 3}]
    assert result(solution, {"packages": True}, entry_point="add", tests=tests).value == 1.0
    assert "ModuleNotFoundError" in str(result(solution, entry_point="add", tests=tests).reason)


# The code, and responses in which it is the last block; at the end of a block, but not of a response, a line ends.
BLOCKS = """
x = 1      x = 1  ```python⏎x = 1
x = 1⏎     Text⏎```python⏎x = 1⏎```⏎more  ```python⏎x = 1⏎```⏎It prints⏎```text⏎1⏎```  ```⏎x = 1⏎```  ~~~py⏎x = 1⏎~~~
x = 1⏎     ````md⏎```⏎x⏎```⏎````⏎```python⏎x = 1⏎```  ```python⏎x = 1⏎```⏎It prints⏎```⏎1⏎```
x = 2⏎     ```python⏎x = 1⏎```⏎```python⏎x = 2⏎```
s = '```'⏎  ```python⏎s = '```'⏎```
"""
INDENTED = ("x = 1\n  y\n", "- so\n  ```python\n  x = 1\n    y\n  ```")


@pytest.mark.parametrize(("code", "response"), [*pairs(BLOCKS), INDENTED])
def test_the_code_is_the_last_block(response: str, code: str) -> None:
    assert extract(response, "python") == extract(response.replace("\n", "\r\n"), "python") == code


METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b\n"


def test_the_code_is_the_block_that_defines_the_function() -> None:
    for response, code in (
        (f"```python\n{ADD}```\nUsage:\n```python\nprint(add(1, 2))\n```", ADD),
        (f"```python\n{ADD}```\nIt gives\n```\n3\n```", ADD),
        (f"```python\ndef add(a, b): ...\n```\nBetter:\n```python\n{ADD}```\n```python\nadd(1, 2)\n```", ADD),
        (f"```python\n{METHOD}```\n```python\nprint(Solution().add(1, 2))\n```", METHOD),
        ("```python\nadd = sum\n```\n```python\nassert add == sum\n```", "add = sum\n"),
        ("1. So:\n\n    ```python\n" + indent(ADD, "    ") + "    ```", ADD),
        ("```python\n" + indent(ADD, "    ") + "```", ADD),
        ("```python\ndef adds(a): pass\n```\n```python\n    return a + b\n```", "    return a + b\n"),
        (f"```text\n{ADD}```\n```python\nx = 1\n```", "x = 1\n"),
    ):
        assert extract(response, "python", "add") == code


OBJECTS = """
class Stack:
    def __init__(self, *items):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        return self.items.pop()
    def __len__(self):
        return len(self.items)
def adder(a):
    return lambda b: a + b
def count(n):
    yield from range(n)
"""
STACK = ["s = Stack(1)\ns.push(2).push(3)\nassert len(s) == 3 and s.pop() == 3", "assert Stack(5, 6).items == [5, 6]"]


def test_classes_and_functions_that_are_returned_are_tested() -> None:
    for solution, name, tests in (
        (METHOD, "add", CALLS),
        (METHOD, "Solution().add", CALLS),
        (METHOD, "Solution().add", CHECK),
        (METHOD, "add", ["assert Solution().add(1, 2) == 3", "assert Solution().add('', '') == ''"]),
        (OBJECTS, "Stack", STACK),
        (OBJECTS, "adder", ["assert adder(1)(2) == 3", "f = adder('a')\nassert f('b') == 'ab'"]),
        (OBJECTS, "count", ["assert list(count(3)) == [0, 1, 2]", "assert sum(count(4)) == 6"]),
    ):
        metadata = {"entry_point": name, "test" if isinstance(tests, str) else "tests": tests}
        assert result(f"```python\n{solution}```", **metadata).value == 1.0
        wrong = solution.replace("a + b", "a * 2").replace("range(n)", "range(n + 1)").replace("pop()", "pop(0)")
        found = result(f"```python\n{wrong}```", **metadata)
        assert found.value == 0.0 and found.components["compiled"] == 1.0, found


def test_an_object_equals_nothing_and_where_a_class_is_tested_by_that_the_reward_is_unknown() -> None:
    liar = "class Stack:\n    __eq__ = __bool__ = lambda *_: True\n    push = lambda *_: 1\n"
    liar += "def add(a, b):\n    return Stack()\n"
    for kind in TASKS:
        found = result(liar, **TASKS[kind])
        assert found.value == 0.0 and "it returned a Stack" in str(found.reason)
    assert result(liar, entry_point="add", tests=["assert add(1, 2)"]).value == 0.0
    for test in ("assert Stack() == Stack()", "assert Stack()", "s = Stack()\nassert s.push(s)"):
        found = result(liar, entry_point="Stack", tests=[test])
        assert found.value is None and "passes on or compares a" in str(found.reason), test


@pytest.mark.parametrize("piece", ["```", "```\n", "`", "~~~ ", "```a", " ", "\n ", "```a\n```b\n", "````\n```\n"])
def test_the_code_of_a_long_response_is_found_at_once(piece: str) -> None:
    assert isinstance(extract("```" + piece * 100_000, "python"), str)
    assert isinstance(extract(piece * 100_000 + "a" * 100_000, "python"), str)


VALUES: list[Any] = [
    None, True, False, 0, 1, -(2**63), 2**63, 10**5000, 0.0, 1.0, 1.5, float("inf"), -float("inf"), 1j,
    "", "a'\"\n\0\ud800é", b"", b"\0\xff", [], [1], (), (1,), [[1, (2,)], {3}], set(), {1}, frozenset({(1, 2)}),
    {}, {1: 2}, {"1": 2}, {(1, "a"): [{}]},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_through_and_equal_only_those_of_their_type(value: Any) -> None:
    sys.set_int_max_str_digits(6000)
    tree = json.loads(encode_value(value))
    kinds = {"set": set, "frozenset": frozenset, "dict": dict, "complex": complex}
    names = {"__builtins__": kinds, "inf": float("inf")}
    assert eval(literal(tree), names) == value and type(eval(literal(tree), names)) is type(value)
    equal = [other for other in VALUES if same_value(json.loads(encode_value(other)), tree)]
    names_are_texts = [{"1": 2}] if value == {1: 2} else []
    same = [other for other in VALUES if _as_json(other) == _as_json(value) or other in names_are_texts]
    assert list(map(repr, equal)) == list(map(repr, same))


def _as_json(value: Any) -> str:
    """A text of what JSON makes of a value: tuples are lists, and whole numbers have no point."""
    items = value if type(value) in (list, tuple) else []
    return f"[{', '.join(map(_as_json, items))}]" if type(value) in (list, tuple) else re.sub(r"\.0$", "", repr(value))


def test_what_is_no_value_is_refused() -> None:
    for said in (
        *({"set": [[1]]}, {"dict": [[[1], 2]]}, {"dict": [[1]]}, {"int": "x"}, {"bytes": "zz"}, {"complex": [1]}, {}),
        *({"a": 1}, {"tuple": 1}, {"set": [{"tuple": [[1]]}]}, {"set": [1], "tuple": []}, {"int": "1); evil("}),
        *({"complex": ["a", 1]}, {"frozenset": [{"dict": []}]}),
    ):
        with pytest.raises((ValueError, TypeError)):
            literal(said)


def test_sets_and_dictionaries_have_no_order_and_floats_a_tolerance() -> None:
    def same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
        return same_value(json.loads(encode_value(one)), json.loads(encode_value(other)), tolerance)

    assert same({"a": {1, 2}, "b": 0}, {"b": 0, "a": {2, 1}})
    assert same({(1, frozenset({1, 2}))}, {(1, frozenset({2, 1}))})
    assert not same([1, 2], [2, 1]) and not same({1: 2}, {1: 3}) and not same({1}, {1, 2}) and not same({}, set())
    assert same([0.1 + 0.2], [0.3], 1e-6) and not same([0.1 + 0.2], [0.3]) and same([3.0], [3], 1e-6)
    assert not same([3], [3.0000001], 1e-6) and not same([1], [True]) and same([1, [2]], (1, (2,)))
    assert not same({"1": 2}, {2: 2}) and not same({1: 2}, {"1": 2}) and not same(10**20, 1e20 + 1e5)
    assert same({"a": 0.1 + 0.2}, {"a": 0.3}, 1e-6) and not same([1000000], [1000001], 1e-3)
    assert same(float("nan"), float("nan")) and not same(float("nan"), 1.0, 1.0)


def test_what_is_written_may_differ_at_the_ends_of_lines_and_in_the_last_digits() -> None:
    for wanted, found, same in (
        *(("1\n2", "1\n2\n\n", True), ("1 \n2\n", "1\n2", True), ("1\n2", "1 2", False), ("", "\n", True)),
        *(("0.30000000", "0.3", True), ("0.3 1", "0.3000000001 1", True), ("1000000", "1000000.1", False)),
        *(("0.3", "0.4", False), ("0.3", "x", False), ("0.3", "0.3 0.3", False), ("nan", "1", False)),
    ):
        assert same_text(wanted, found, 1e-6) == same, (wanted, found)


def test_tests_of_a_model_are_kept_where_all_solutions_agree() -> None:
    runner = module.TestRunner(Sandbox(), SandboxLimits(10, 10), 60)
    task = Task.create("test", "question", "", metadata={"entry_point": "add"})
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add('a', 'b') == 'ab'", "assert undefined", "("]
    sums = "def add(a, b):\n    return sum((a, b))"  # not of strings
    assert runner.confirmed(task, tests, [ADD]) == [tests[0], tests[2]]
    assert runner.confirmed(task, tests, [ADD, sums]) == [tests[0]]
    assert runner.confirmed(task, tests, []) == []
    calls: list[Any] = [*CALLS, {"args": [1, 2], "expected": 4}, {"args": [1]}, "nonsense"]
    assert runner.confirmed(task, calls, [ADD]) == CALLS
    assert runner.confirmed(task, PROGRAM, ["print(7)"]) == PROGRAM[:1]


# Attacks


@dataclass
class World:
    """What lies outside: a secret that must not come in, and what must not be harmed."""

    secret: str
    file: Path
    canary: subprocess.Popen[bytes]
    names: dict[str, object]

    def told(self, attack: str) -> str:
        """The attack with the world's values in place of their names."""
        for name, value in self.names.items():
            attack = attack.replace(name, str(value))
        return attack


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    secret, folder = f"secret-{secrets.token_hex(8)}", tmp_path_factory.mktemp("world")
    (folder / "secret").write_text(secret)
    (folder / "secret").chmod(0o666)
    abstract = f"rayrft-{secrets.token_hex(8)}"
    listeners = [socket.create_server(("127.0.0.1", 0))]
    for address in (f"\0{abstract}", str(folder / "socket")):
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(address)
        listeners[-1].listen()

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                with listener.accept()[0] as connection:
                    connection.sendall(secret.encode())
            except OSError:
                return

    for listener in listeners:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    with socket.create_connection(listeners[0].getsockname()) as connection:
        assert connection.recv(100).decode() == secret, "the secret is there to be had"
    inherited = os.open(folder / "secret", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    canary = subprocess.Popen(["sleep", "1000"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", secret)
        names: dict[str, object] = {"SECRET_FILE": folder / "secret", "PARENT": os.getpid(), "CANARY": canary.pid}
        names |= {"PORT": listeners[0].getsockname()[1], "ABSTRACT": abstract}
        names |= {"SOCKET": folder / "socket", "INHERITED": inherited}
        yield World(secret, folder / "secret", canary, names)
    canary.kill()
    canary.wait()
    os.close(inherited)
    for listener in listeners:
        listener.close()


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The process namespaces of all sandboxes that a test starts, held open so that none has the name of another."""
    seen, read_first = list[int](), Process._read_first

    def noting(self: Process) -> int:
        pid = read_first(self)
        seen.append(os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY))
        return pid

    monkeypatch.setattr(Process, "_read_first", noting)
    yield seen
    for space in seen:
        os.close(space)


def running(spaces: list[int]) -> list[int]:
    """Processes in one of these namespaces."""
    found, own = [], [os.fstat(space).st_ino for space in spaces]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}/ns/pid").st_ino in own:
                found.append(int(pid))
        except OSError:
            continue
    return found


EVERYWHERE = [(isolation, attack) for isolation in ISOLATIONS for attack in ATTACKS]


@pytest.mark.parametrize(
    ("isolation", "attack"), [*EVERYWHERE, *(("auto", attack) for attack in ON_THE_JUDGE)], indirect=["isolation"]
)
def test_an_attack_neither_scores_nor_harms_nor_stays(
    attack: str, isolation: str, world: World, spaces: list[int]
) -> None:
    program = world.told({**ATTACKS, **ON_THE_JUDGE}[attack])
    limits = {"test_s": 1, "budget_s": 3, "memory_mib": 128, "isolation": isolation, "partial": True}
    for test in ({"args": [3], "expected": world.secret}, f"assert f(3) == {world.secret!r}"):
        found = result(program, limits, entry_point="f", tests=[test])
        assert found.value == 0.0, found
        assert "HARM" not in str(found.reason) and world.secret not in str(found.reason)
    assert len(spaces) >= 2 and not running(spaces)
    assert world.canary.poll() is None and world.file.read_text() == world.secret


def test_a_right_answer_by_the_same_ways_scores(isolation: str, world: World) -> None:
    """The attacks fail for what they do, not because nothing of their form, or after them, could score."""
    told = f"def f(x):\n    return {world.secret!r}"
    for test in ({"args": [3], "expected": world.secret}, f"assert f(3) == {world.secret!r}"):
        assert result(told, {"isolation": isolation}, entry_point="f", tests=[test]).value == 1.0


FORGERIES = {
    "marker": "print('PASSED'); print('ok'); print({'passed': True})",
    "closes": "import os; os.closerange(0, 100)",
    "reads": "import os; print(open('runner.pyc', 'rb').read(), os.listdir('.'), os.environ)",
    "frames": "import sys, gc; print([o for o in gc.get_objects() if 'secret-' in str(o)[:1000]])",
    "background": "import os, time\nif os.fork():\n    os._exit(0)\nos.setsid()\ntime.sleep(1000)",
    "everything": "for n in range(10**9): print(f'secret-{n:016x}')",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_program_cannot_forge_what_is_expected_of_it(forgery: str, world: World, spaces: list[int]) -> None:
    settings = {"test_s": 2, "memory_mib": 128}
    tests = [{"stdin": "3", "stdout": world.secret}]
    found = result(world.told(FORGERIES[forgery]), settings, tests=tests)
    assert found.value == 0.0 and world.secret not in str(found.reason)
    assert not running(spaces)


# Real problems


def test_real_reference_solutions_pass_and_empty_ones_fail() -> None:
    rows = real_rows("humaneval", "problems.jsonl")
    found = {row["task_id"]: result(row["canonical_solution"], **row) for row in rows}
    assert [name for name, each in found.items() if each.value != 1.0] == []
    for row in rows[::10]:
        assert result("    return None\n", **row).value == 0.0, row["task_id"]
