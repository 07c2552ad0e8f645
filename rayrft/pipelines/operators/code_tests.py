"""Tests of code that a model has proposed, checked against solutions that are known to be right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section
from rayrft.experience import Task
from rayrft.pipelines.operator import AnyColumn, Applied, Operator, register_operator, with_column
from rayrft.rewards.code_trial import TestRunner
from rayrft.rewards.sandbox import Sandbox, SandboxLimits


class CheckedTestsOptions(Section):
    candidates: AnyColumn = "candidate_tests"
    solutions: AnyColumn = "solutions"
    """The columns: of proposed tests, as reward `code` takes them, and of right solutions; lists, or JSON of them."""
    language: Literal["python", "cpp"] = "python"
    least: int = Field(1, ge=0)
    """A row that keeps fewer tests is left out."""
    isolation: str = "auto"
    packages: bool = False
    test_s: float = Field(4.0, gt=0)
    budget_s: float = Field(8.0, gt=0)
    """Seconds of a test, and of all tests of a solution; a pipeline's ``deadline_s`` is for a whole batch."""
    memory_mib: int = Field(512, gt=0)


@register_operator("checked_tests")
class CheckedTests(Operator[CheckedTestsOptions]):
    """Write to ``tests``, as JSON, those candidates that all solutions of the row pass, in reward `code`'s sandbox.
    Columns ``entry_point`` and ``prompt`` say what they say there. A candidate that cannot be run is not kept."""

    kind = "clean"
    writes: ClassVar[Mapping[str, pa.DataType]] = {"tests": pa.string()}

    def prepare(self) -> None:
        options = self.options
        limits = SandboxLimits(options.test_s, options.test_s, options.memory_mib)
        self._runner = TestRunner(Sandbox(options.isolation, packages=options.packages), limits, options.budget_s)

    def apply(self, rows: pa.RecordBatch) -> Applied:
        kept = [self._kept(row) for row in rows.to_pylist()]
        column = pa.array([json.dumps(tests) for tests in kept], pa.string())
        reasons = ["too few tests hold" if len(tests) < self.options.least else None for tests in kept]
        return Applied(with_column(rows, "tests", column), reasons)

    def _kept(self, row: dict[str, Any]) -> list[Any]:
        metadata = {name: row[name] for name in ("entry_point", "prompt") if row.get(name)}
        task = Task.create("rows", "", "", metadata=metadata)
        candidates, solutions = (_listed(row[name]) for name in (self.options.candidates, self.options.solutions))
        return self._runner.confirmed(task, candidates, solutions, self.options.language)


def _listed(value: Any) -> list[Any]:
    found = json.loads(value) if isinstance(value, str) else value
    return list(found or ())
