"""What an error is about, for `pytest.raises(DataError, check=about("columns"))`: its words may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayrft.errors import RayrftError

_ANY = object()


def about(field: str, value: Any = _ANY) -> Callable[[RayrftError], bool]:
    """Checks that an error names that field (of a path: its end) and, where it is given, found that value there."""

    def check(error: RayrftError) -> bool:
        named = error.field == field or error.field.endswith(f"/{field}")
        assert named, f"about {error.field!r}, not {field!r}: {error}"
        assert value is _ANY or error.value == value, f"found {error.value!r}, not {value!r}: {error}"
        return True

    return check
