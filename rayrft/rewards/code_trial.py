"""The tests of a solution, run in sandboxes: what reward `code` takes its components from."""

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
from typing import Any, Literal

from rayrft.errors import ConfigError, DataError, NoLocks, SandboxFailed
from rayrft.experience import Task
from rayrft.files import lock_file
from rayrft.rewards import code_runner
from rayrft.rewards.base import task_value
from rayrft.rewards.code_values import literal, same_text, same_value
from rayrft.rewards.sandbox import Files, Process, ProgramOutcome, Sandbox, SandboxLimits, bytecode

CodeLanguage = Literal["python", "cpp"]

_RUNNER = "runner.pyc"
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


def kind_of(test: Any) -> str | None:
    """Return the kind of a test; None for what is none."""
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
        language: CodeLanguage = "python",
        *,
        until_failure: bool = False,
    ) -> Verdict:
        """Run the tests, or up to the first failure. Raises DataError or SandboxFailed if there is no verdict."""
        kind = kind_of(tests[0])
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
        self, task: Task, candidates: Sequence[Any], solutions: Sequence[str], language: CodeLanguage = "python"
    ) -> list[Any]:
        """Return the candidates for tests that run and that every solution passes; without solutions, none."""
        kept = [test for test in candidates if solutions and kind_of(test)]
        for solution in solutions:
            kept = [test for test in kept if self._passes(task, solution, test, language)]
        return kept

    def _passes(self, task: Task, solution: str, test: Any, language: CodeLanguage) -> bool:
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

    def results(self, tests: Sequence[Any], language: CodeLanguage) -> Generator[str | None]:
        """Yield for each test None, or why the solution failed it."""
        if kind_of(tests[0]) == "run":
            yield from self._runs(tests, language)
            return
        with contextlib.closing(_Solution(self)) as solution:
            solution.load()
            yield from (self._statements if kind_of(tests[0]) == "statement" else self._calls)(tests, solution)

    # Programs

    def _runs(self, tests: Sequence[Any], language: CodeLanguage) -> Generator[str | None]:
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

    def _compiled(self, language: CodeLanguage) -> tuple[Files, list[str]]:
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
        before, source = (task_value(self._task, each, str, "") for each in ("prompt", "test"))
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
