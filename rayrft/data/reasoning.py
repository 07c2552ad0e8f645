"""Where a model's text ends its reasoning and begins its answer."""

from __future__ import annotations

_OPENING, _CLOSING = "<think>", "</think>"
REASONING_MARKS = (_OPENING, _CLOSING)


def split_reasoning(text: str) -> tuple[str, str]:
    """Split a model's text into its reasoning, with the marks and the line breaks after them, and its answer.

    The answer follows the last ``</think>``. Reasoning that is cut off has none, whatever stands before it.
    """
    start = text.rfind(_CLOSING) + len(_CLOSING) if _CLOSING in text else 0
    if _OPENING in text[start:]:
        return text, ""
    answer = text[start:].lstrip("\n") if start else text
    return text[: len(text) - len(answer)], answer


def opened_reasoning(prompt: str) -> str:
    """Return the end of a prompt from the ``<think>`` on that it leaves open; an empty text if it opens none."""
    _, mark, after = prompt.rpartition(_OPENING)
    return mark + after if mark and _CLOSING not in after else ""
