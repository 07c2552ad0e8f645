from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.feedback.people import Arrive, Serve


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A function that serves a page of a running run, with its journal in ``tmp_path``; gives its address."""
    from tests.browser import served
    from tests.feedback.scripted import page

    (tmp_path / "running").touch()
    with ExitStack() as ends:
        yield lambda *groups, **settings: ends.enter_context(served(page(tmp_path, list(groups), **settings).app()))


@pytest.fixture
def arrive(browser: Any) -> Iterator[Arrive]:
    """A function that opens the page for a person; at the end no window may have written an error."""
    from tests.feedback.people import Person

    with ExitStack() as ends:

        def come(*args: Any, **kwargs: Any) -> Person:
            person = Person(browser, *args, **kwargs)
            ends.callback(person.leave)
            return person

        yield come
