"""Operators on rows of data: one interface, for tasks, for experiences and for files."""

from rayrft.pipelines import (
    batches,
    clean,
    code_tests,
    columns,
    decontaminate,
    diversity,
    duplicates,
    filters,
    judged,
    juicer,
    priorities,
    rewriting,
    solving,
    synthesis,
)
from rayrft.pipelines.operator import Applied, Context, Operator, operators, register_operator
from rayrft.pipelines.runner import Pipeline

_PIECES = (
    batches,
    clean,
    code_tests,
    columns,
    decontaminate,
    diversity,
    duplicates,
    filters,
    judged,
    juicer,
    priorities,
    rewriting,
    solving,
    synthesis,
)
"""Modules that register operators."""

__all__ = ["Applied", "Context", "Operator", "Pipeline", "operators", "register_operator"]
