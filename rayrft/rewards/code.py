"""Code against tests, in a sandbox.

A solution is a Python function that tests call, or a program in Python or C++ that reads stdin and writes stdout. The
task's metadata has its tests:

* ``tests``: a list, or JSON of it, of one of these kinds: calls of the function ``entry_point``, ``{"args": [3, 4],
  "expected": 7}``, also with ``kwargs``; runs of the program, ``{"stdin": "3 4", "stdout": "7"}``; or statements that
  call the function, ``"assert add(3, 4) == 7"`` (MBPP).
* ``test``: source that defines ``check(candidate)``, which is the only test (HumanEval); with statements in ``tests``,
  it runs before them.
* ``prompt``: source that a function continues or may use; it runs before both solution and tests.
* ``language``: ``python`` or, for programs, ``cpp``; by default the option's.

``entry_point`` names a function, a class, or a method of class ``Solution`` (``add`` or ``Solution().add``), each call
of which has a new object.

Expected values never enter the sandbox of the solution. Calls are sent there one by one, and their values are compared
outside. Statements run in another sandbox, where the function that they call stands for the solution. So a solution
gains only by returning the right values.

Values travel as plain data: None, numbers, strings, bytes, lists, tuples, sets and dictionaries, types derived from
them, and numpy's. ``expected`` values come from JSON: a tuple is a list, 1.0 is 1, keys are strings; True is not 1.
Arguments travel by value: tests cannot see that a function changed them. Other objects, such as functions and
iterators, stay in the solution's sandbox, where statements can use their attributes, methods and items. They equal
nothing; the reward is unknown if tests of a class compare them or pass them on. Tests that run a returned text, by
``eval``, are not protected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

from rayrft.errors import ConfigError, DataError, NoLocks, SandboxFailed
from rayrft.experience import Task
from rayrft.files import lock_file
from rayrft.rewards import code_runner
from rayrft.rewards.base import RewardResult, register_reward
from rayrft.rewards.code_values import literal, same_text, same_value
from rayrft.rewards.sandbox import Files, Process, ProgramOutcome, Sandbox, SandboxLimits, bytecode

_Language = Literal["python", "cpp"]

_RUNNER = "runner.pyc"
_FENCE = re.compile(
    r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\2[ \t]*+$|\Z)", re.MULTILINE | re.DOTALL
)
_TAGS = {"python": {"python", "py", "python3"}, "cpp": {"cpp", "c++", "cc", "cxx"}}
_CPP = ("-O2", "-std=c++17")
_BINARY_MIB = 32
_CONVERSATION_BYTES = 8 << 20  # all answers of a function, or of its tests
_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """The result of a solution: for each test that ran, None if it passed, else why it failed."""

    failures: list[str | None]
    problem: str | None = None
    """Why the solution did not compile or load, if it did not."""


@register_reward("code")
class Code:
    """1 if the code passes all of the task's tests, else 0; with ``partial`` the share that it passes.

    The code is the last fenced block of the response that defines the function, else the last block in the language or
    without one; without any fence, it is the response. Components: ``passed``, the share of tests, which stop at the
    first failure unless ``partial``; ``compiled``, 1 if the code compiles and, for a function, its module loads.

    ``isolation`` and ``packages`` are those of `Sandbox`. ``tolerance``, relative or absolute, is for expected floats
    of a function and for numbers but integers on stdout, whose lines are compared without trailing white space.
    ``test_s`` is the wall time of a test, and the CPU time of a program; ``budget_s`` is the wall time of a response,
    below ``reward.deadline_s``; neither counts waits for a core. A test that exceeds its time or ``memory_mib`` fails.
    The reward is unknown if the tests cannot run, or pass in time and are too many for the budget.
    """

    def __init__(
        self,
        language: _Language = "python",
        *,
        partial: bool = False,
        isolation: str = "auto",
        packages: bool = False,
        tolerance: float = 1e-6,
        test_s: float = 4.0,
        budget_s: float = 8.0,
        memory_mib: int = 512,
    ) -> None:
        sandbox = Sandbox(isolation, packages=packages, folders=headers() if language == "cpp" else ())
        self._runner = TestRunner(sandbox, SandboxLimits(test_s, test_s, memory_mib), budget_s, tolerance)
        self._language, self._partial = language, partial
        self.longest_s, self.notice = budget_s, sandbox.describe()

    def __call__(self, task: Task, response: str) -> RewardResult:
        language = task.metadata.get("language", self._language)
        tests = tests_of(task)
        if not isinstance(name := task.metadata.get("entry_point") or "", str):
            raise DataError("is not the name of a function", field="metadata.entry_point", value=name)
        function = re.sub(r"^Solution(?:\(\))?\.", "", name)
        source = extract(response, language, re.escape(function))
        verdict = self._runner(task, source, tests, language, until_failure=not self._partial)
        share = verdict.failures.count(None) / len(tests)
        components = {"passed": share, "compiled": float(verdict.problem is None)}
        reasons = [verdict.problem, *(why and f"test {number}: {why}" for number, why in enumerate(verdict.failures))]
        reason = next((why for why in reasons if why), None)
        return RewardResult(share if self._partial else float(share == 1), components, reason)


def extract(response: str, language: _Language, function: str = "") -> str:
    """Return the last fenced block that defines the function, else the last one in this language, without a language,
    or in another; without any block, the response."""
    blocks = list[tuple[str, str]]()
    for indent, _, tag, text in _FENCE.findall(response := response.replace("\r\n", "\n")):
        blocks.append((tag.lower(), re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", text, flags=re.M) if indent else text))
    fitting = [text for tag, text in blocks if not tag or tag in _TAGS[language]]
    if function and (defining := [text for text in fitting if re.search(_DEFINES.format(function), text, re.M)]):
        own = dedent(defining[-1])  # but keep the indentation of a continued prompt
        return own if re.search(rf"^(?:async def|def|class)\s+(?:{function}|Solution)\b", own, re.M) else defining[-1]
    tagged = [text for tag, text in blocks if tag in _TAGS[language]]
    return (tagged or fitting or [text for _, text in blocks] or [response])[-1]


_DEFINES = r"^[ \t]*(?:(?:async\s+def|def|class)\s+{0}\b|{0}\s*=[^=])"


def tests_of(task: Task) -> list[Any]:
    """Return the task's tests. Raises DataError unless they are of one kind."""
    tests = task.metadata.get("tests")
    if tests is None and "test" in task.metadata:
        return ["check(candidate)"]
    if isinstance(tests, str):
        tests = json.loads(tests)
    kinds = {_kind(test) for test in tests or ()}
    if len(kinds) != 1 or None in kinds:
        problem = "the task has no tests of one kind"
        remedy = "give a list of calls (args, expected), runs (texts stdin, stdout) or assertions"
        raise DataError(problem, remedy, field="metadata.tests", value=tests and str(tests)[:200])
    return list(tests or ())


def _kind(test: Any) -> str | None:
    match test:
        case str():
            return "statement"
        case {"args": _, "expected": _}:
            return "call"
        case {"stdin": str(), "stdout": str()}:
            return "run"
    return None


class _OutOfTime(Exception):
    """The budget is spent."""


@dataclass(frozen=True)
class TestRunner:
    """Runs the tests of solutions; ``limits`` are those of one test, ``budget_s`` is the wall time of all."""

    sandbox: Sandbox
    limits: SandboxLimits
    budget_s: float
    tolerance: float = 1e-6

    def __call__(
        self,
        task: Task,
        source: str,
        tests: Sequence[Any],
        language: _Language = "python",
        *,
        until_failure: bool = False,
    ) -> Verdict:
        """Run the tests, or up to the first failure. Raises DataError or SandboxFailed if there is no verdict."""
        kind = _kind(tests[0])
        if language == "cpp" and kind != "run":
            raise DataError("C++ is tested by stdin and stdout", field="metadata.tests", value=kind)
        trial = _Trial(self, task, source, time.monotonic() + self.budget_s)
        failures: list[str | None] = []
        try:
            with contextlib.closing(trial.results(tests, language)) as results:
                for failure in results:
                    failures.append(failure)
                    if failure and until_failure:
                        break
        except _NotLoaded as problem:
            return Verdict(failures, str(problem))
        except _OutOfTime:
            mean = self.budget_s / (len(failures) + 1)
            if failures and not any(failures) and mean < self.limits.wall_s / 4:
                remedy = "raise reward.options.budget_s and reward.deadline_s, or take fewer tests"
                ran = f"{len(failures)} of {len(tests)} in {self.budget_s:g} s"
                raise DataError("the tests do not fit the budget", remedy, field="metadata.tests", value=ran) from None
            failures.append(f"time: {self.budget_s:g} s are over after {len(failures)} of {len(tests)} tests")
        return Verdict(failures)

    def confirmed(
        self, task: Task, candidates: Sequence[Any], solutions: Sequence[str], language: _Language = "python"
    ) -> list[Any]:
        """Return the candidates for tests that run and that every solution passes; without solutions, none."""
        kept = [test for test in candidates if solutions and _kind(test)]
        for solution in solutions:
            kept = [test for test in kept if self._passes(task, solution, test, language)]
        return kept

    def _passes(self, task: Task, solution: str, test: Any, language: _Language) -> bool:
        with contextlib.suppress(DataError):
            return self(task, solution, [test], language) == Verdict([None])
        return False


class _NotLoaded(Exception):
    """The solution does not compile, or cannot be loaded."""


class _Trial:
    """One solution and its tests."""

    def __init__(self, runner: TestRunner, task: Task, source: str, deadline: float) -> None:
        self._sandbox, self.limits, self._tolerance = runner.sandbox, runner.limits, runner.tolerance
        self._task, self._source, self._deadline = task, source, deadline
        self._conversations = list[Process]()

    def left(self, at_most: float = math.inf) -> float:
        left = self._deadline + sum(each.waited_s for each in self._conversations) - time.monotonic()
        if left <= 0:
            raise _OutOfTime
        return min(left, at_most)

    def results(self, tests: Sequence[Any], language: _Language) -> Generator[str | None]:
        """Yield for each test None, or why the solution failed it."""
        if _kind(tests[0]) == "run":
            yield from self._runs(tests, language)
            return
        with contextlib.closing(_Solution(self)) as solution:
            solution.load()
            yield from (self._statements if _kind(tests[0]) == "statement" else self._calls)(tests, solution)

    # Programs

    def _runs(self, tests: Sequence[Any], language: _Language) -> Generator[str | None]:
        files, command = self._compiled(language)
        for test in tests:
            outcome = self._run(files, command, self.limits, test["stdin"].encode())
            if outcome.ended == "wall":
                self.left()  # raises if the budget is spent, not the test's time
            if not outcome.succeeded:
                yield outcome.describe()
            else:
                same = same_text(test["stdout"], outcome.stdout.decode(errors="replace"), self._tolerance)
                yield None if same else f"it wrote {outcome.stdout[:100].decode(errors='replace')!r}"

    def _run(self, files: Files, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> ProgramOutcome:
        outcome = self._sandbox.run(files, command, stdin, replace(limits, wall_s=self.left(limits.wall_s)))
        self._deadline += outcome.waited_s
        return outcome

    def _compiled(self, language: _Language) -> tuple[Files, list[str]]:
        """Compile the solution in a sandbox; return the files and the command that run it in another."""
        if language == "python":
            files: Files = {_RUNNER: bytecode(code_runner.__file__), "solution.py": self._source}
            python = [*self._sandbox.python, _RUNNER]
            self._compile(files, [*python, "compile", "solution.py"], self.limits)
            return files, [*python, "program", "solution.py", *self._sandbox.paths]
        include = [f"-I{folder}" for folder in self._sandbox.folders]
        command = f"{' '.join([compiler(), *_CPP, *include])} -o program solution.cpp && cat program"
        more = SandboxLimits(cpu_s=60, memory_mib=2048, folder_mib=2 * _BINARY_MIB, output_bytes=_BINARY_MIB << 20)
        program = self._compile({"solution.cpp": self._source}, ["/bin/sh", "-c", command], more).stdout
        return {"program": program}, ["./program"]

    def _compile(self, files: Files, command: list[str], limits: SandboxLimits) -> ProgramOutcome:
        outcome = self._run(files, command, replace(limits, wall_s=math.inf))
        if outcome.ended == "wall":
            raise SandboxFailed("the solution was not compiled in time", value=f"{outcome.seconds:.1f} s")
        if not outcome.succeeded:
            errors = [line for line in outcome.stderr.decode(errors="replace").splitlines() if "error" in line.lower()]
            raise _NotLoaded(f"it does not compile: {errors[0][:200] if errors else outcome.describe()}")
        return outcome

    # Functions

    def _calls(self, tests: Sequence[Any], solution: _Solution) -> Generator[str | None]:
        for test in tests:
            wanted, args, kwargs = map(_tree, (test["expected"], tuple(test["args"]), dict(test.get("kwargs", {}))))
            match solution.call(None, "", args, kwargs):
                case {"value": value}:
                    same = same_value(wanted, value, self._tolerance)
                    yield None if same else f"it returned {literal(value)[:100]}"
                case {"object": [_, kind]}:
                    yield f"it returned a {kind}"
                case {"raised": [kind, message]}:
                    yield f"{kind}: {message}"
                case {"wrong": why}:
                    yield why

    def _statements(self, tests: Sequence[str], solution: _Solution) -> Generator[str | None]:
        """Run statements whose calls the solution answers."""
        with self.start("check", tests) as tester:
            for _ in tests:
                while "call" in (message := self._next(tester, solution)):
                    answer = solution.call(*message["call"])
                    reply = {name: literal(each) if name == "value" else repr(each) for name, each in answer.items()}
                    tester.send(("{" + ", ".join(f"{name!r}: {each}" for name, each in reply.items()) + "}\n").encode())
                if "broken" in message:
                    raise DataError("the tests cannot be run", field="metadata.tests", value=message["broken"])
                yield message.get("failed")

    def start(self, mode: Literal["check", "solve"], tests: Sequence[str] = ()) -> Process:
        """Start the tests, or the solution, with the time of all tests together."""
        if not isinstance(name := self._task.metadata.get("entry_point"), str):
            raise DataError("the task does not name its function", field="metadata.entry_point", value=name)
        before, source = (self._task.metadata.get(each) or "" for each in ("prompt", "test"))
        if not isinstance(before, str) or not isinstance(source, str):
            problem = "the code before the solution and the code of the tests are not texts"
            raise DataError(problem, "give texts, or rename the columns", field="metadata", value=[before, source])
        if mode == "solve":
            source = self._source
            if re.match(r"(?:[ \t]*\n)*[ \t]+\S", source):  # it continues the prompt in the middle of a function
                before, source = "", f"{before}\n{source}"
        orders = {"before": before, "source": source, "name": name, "statements": list(tests)}
        command = [*self._sandbox.python, _RUNNER, mode, *self._sandbox.paths]
        limits = replace(self.limits, wall_s=self.left(), cpu_s=self.left(), output_bytes=_CONVERSATION_BYTES)
        process = self._sandbox.start({_RUNNER: bytecode(code_runner.__file__)}, command, limits)
        process.send(repr(orders).encode() + b"\n")
        self._conversations.append(process)
        return process

    def _next(self, tester: Process, solution: _Solution) -> dict[str, Any]:
        """Return the next message of the tests, which are trusted except for the solution's values."""
        line = tester.line(self.left(), beside=solution.process)
        if line is not None:
            return json.loads(line)
        self.left()
        return {"failed": f"the tests: {tester.finish().describe()}"}


class _Solution:
    """A function in a sandbox, which restarts after a call that ended it."""

    def __init__(self, trial: _Trial) -> None:
        self._trial = trial
        self.process: Process | None = None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()

    def load(self) -> Process:
        """Start the process and wait until the function can be called. Raises _NotLoaded if it cannot."""
        trial = self._trial
        self.process = process = trial.start("solve")
        if process.line(trial.left()) != b'{"ready": true}':
            trial.left()
            raise DataError("the prompt cannot be run", field="metadata.prompt", value=process.finish().describe())
        message = _parsed(process.line(trial.left(trial.limits.wall_s)))
        if message != {"loaded": True}:
            raise _NotLoaded(str(message.get("failed") or process.finish().describe())[:500])
        return process

    def call(self, owner: int | None, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        """Call the function or a returned object, or look up the object's attribute if ``args`` are None.

        Returns ``value`` (still encoded), ``object`` (number and type), ``raised`` (name and message) or ``wrong``."""
        trial = self._trial
        process = self.process or self.load()
        process.send(f"({owner}, {name!r}, {literal(args)}, {literal(kwargs)})\n".encode())
        line = process.line(trial.left(trial.limits.wall_s))
        answer = _parsed(line) if len(line or b"") <= _ANSWER_BYTES else {"wrong": "it returned more than 1 MiB"}
        if answer.keys() & {"value", "object", "raised", "wrong"}:
            return answer
        self.process, outcome = None, process.finish()
        trial.left()
        return {"wrong": outcome.describe() if line is None else "it returned something else than a value"}


def _parsed(line: bytes | None) -> dict[str, Any]:
    """Return a message of a solution in the form of `code_runner`; an empty one for other output."""
    try:
        message = json.loads(line or b"{}")
        if not isinstance(message, dict) or len(message) != 1:
            return {}
        [(kind, content)] = message.items()
        if kind == "value":
            literal(content)
        elif kind == "object":
            number, name = content
            return {kind: [int(number), str(name)[:100]]}
        elif kind == "raised":
            name, text = map(str, content)
            return {kind: [name[:100], text[:500]]}
        elif message != {"loaded": True}:
            return {kind: str(content)[:500]}
    except (ValueError, TypeError, RecursionError):
        return {}
    return message


def _tree(value: Any) -> Any:
    """Return a value of a test in the form of `code_runner`."""
    try:
        return json.loads(code_runner.encode_value(value))
    except code_runner.NotPlain as error:
        raise DataError("a test has a value that cannot be sent", field="metadata.tests", value=str(error)) from None


@lru_cache
def compiler() -> str:
    """Return the path of a C++ compiler. Raises ConfigError if none is installed."""
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name, path="/usr/local/bin:/usr/bin"):
            return os.path.realpath(found)
    raise ConfigError("there is no C++ compiler", "apt-get install g++", field="reward.options.language", value="cpp")


@lru_cache
def headers() -> tuple[str, ...]:
    """Return the folder of a precompiled <bits/stdc++.h>, which cuts compile time to a third; none if the compiler
    lacks it, or the home folder has no file locks. It is built once for a compiler, in seconds, and has 100 MB."""
    digest = hashlib.blake2b(subprocess.run([compiler(), "-v"], capture_output=True).stderr + repr(_CPP).encode())
    folder = Path.home() / ".cache" / "rayrft" / f"cpp-{digest.hexdigest()[:16]}"
    header = folder / "bits" / "stdc++.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            lock_file(lock.fileno(), folder / "lock")
        except NoLocks:
            return ()
        if not (made := header.with_name("stdc++.h.gch")).exists():
            header.write_text("#include_next <bits/stdc++.h>\n")
            command = [compiler(), *_CPP, "-x", "c++-header", str(header), "-o", str(new := made.with_suffix(".new"))]
            if subprocess.run(command, capture_output=True).returncode:
                return ()
            new.rename(made)
    return (str(folder),)
