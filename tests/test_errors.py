"""How an error reads that holds the words of another one, or a long value."""

from __future__ import annotations

from rayrft.errors import RayrftError


def test_the_sentence_of_an_inner_error_ends_once() -> None:
    inner = RayrftError("the server is full", field="reset")
    assert str(RayrftError(f"the last: {inner}", "try again")) == "the last: reset: the server is full. Try again."
    assert str(RayrftError(str(inner))) == "reset: the server is full."


def test_a_long_value_is_shown_in_part_and_kept_whole() -> None:
    error = RayrftError("is too long", "shorten it", field="name", value="x" * 5000)
    assert len(str(error)) < 400 and str(error).endswith("…). Shorten it.") and error.value == "x" * 5000
