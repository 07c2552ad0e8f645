"""How an error reads that holds the words of another one."""

from __future__ import annotations

from rayrft.errors import RayrftError


def test_the_sentence_of_an_inner_error_ends_once() -> None:
    inner = RayrftError("the server is full", field="reset")
    assert str(RayrftError(f"the last: {inner}", "try again")) == "the last: reset: the server is full. Try again."
    assert str(RayrftError(str(inner))) == "reset: the server is full."
