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

import json
import re
from textwrap import dedent
from typing import Any

from rayrft.errors import DataError
from rayrft.experience import Task
from rayrft.rewards.base import RewardResult, register_reward, task_value
from rayrft.rewards.code_trial import CodeLanguage, TestRunner, headers, kind_of
from rayrft.rewards.sandbox import Sandbox, SandboxLimits

_FENCE = re.compile(
    r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\2[ \t]*+$|\Z)", re.MULTILINE | re.DOTALL
)
_TAGS = {"python": {"python", "py", "python3"}, "cpp": {"cpp", "c++", "cc", "cxx"}}


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
        language: CodeLanguage = "python",
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
        language = task_value(task, "language", CodeLanguage, self._language)
        tests = tests_of(task)
        function = re.sub(r"^Solution(?:\(\))?\.", "", task_value(task, "entry_point", str, ""))
        source = extract(response, language, re.escape(function))
        verdict = self._runner(task, source, tests, language, until_failure=not self._partial)
        share = verdict.failures.count(None) / len(tests)
        components = {"passed": share, "compiled": float(verdict.problem is None)}
        reasons = [verdict.problem, *(why and f"test {number}: {why}" for number, why in enumerate(verdict.failures))]
        reason = next((why for why in reasons if why), None)
        return RewardResult(share if self._partial else float(share == 1), components, reason)


def extract(response: str, language: CodeLanguage, function: str = "") -> str:
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
    kinds = {kind_of(test) for test in tests or ()}
    if len(kinds) != 1 or None in kinds:
        problem = "the task has no tests of one kind"
        remedy = "give a list of calls (args, expected), runs (texts stdin, stdout) or assertions"
        raise DataError(problem, remedy, field="metadata.tests", value=tests and str(tests)[:200])
    return list(tests or ())
