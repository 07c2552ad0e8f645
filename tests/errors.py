"""What an error is about, for `pytest.raises(DataError, check=about("columns"))`: its words may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayrft.errors import RayrftError

_ANY = object()


def about(field: str, value: Any = _ANY) -> Callable[[RayrftError], bool]:
    """Whether an error names that field and, where it is given, found that value there."""
    return lambda error: error.field == field and (value is _ANY or error.value == value)
