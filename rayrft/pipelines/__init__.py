"""Operators on rows of data: one interface, for tasks, for experiences and for files."""

import rayrft.pipelines.operators  # noqa: F401
from rayrft.pipelines.operator import Applied, Context, Operator, register_operator
from rayrft.pipelines.run.process import Pipeline

__all__ = ["Applied", "Context", "Operator", "Pipeline", "register_operator"]
