"""Operators on rows of data: one interface, for tasks, for experiences and for files."""

import rayrft.pipelines.operators  # noqa: F401
from rayrft.pipelines.operator import AnyColumn, Applied, Context, NumberColumn, Operator, TextColumn, register_operator
from rayrft.pipelines.run.process import Pipeline

__all__ = ["AnyColumn", "Applied", "Context", "NumberColumn", "Operator", "Pipeline", "TextColumn", "register_operator"]
