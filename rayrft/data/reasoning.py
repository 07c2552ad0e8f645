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


class ReasoningSplit:
    """The reasoning and the content of an answer, as its text grows: text in ``<think>`` at the begin is reasoning,
    without the marks, and what follows it, without the line breaks between, is content."""

    def __init__(self) -> None:
        self.reasoning, self.content = "", ""
        self._held = ""
        """Text that may be a part of a mark."""
        self._inside: bool | None = None
        """Whether the text is in reasoning; None while it may still begin with it."""

    @classmethod
    def of(cls, text: str) -> ReasoningSplit:
        """Return the parts of a whole answer."""
        split = cls()
        split.add(text)
        split.end()
        return split

    def add(self, text: str) -> tuple[str, str]:
        """Append text; return what is new of reasoning and content."""
        self._held += text
        before = len(self.reasoning), len(self.content)
        if self._inside is None and not _OPENING.startswith(self._held):
            self._inside = self._held.startswith(_OPENING)
            self._held = self._held.removeprefix(_OPENING)
        if self._inside:
            reasoning, mark, rest = self._held.partition(_CLOSING)
            kept = 0 if mark else overlap(reasoning, _CLOSING)
            self.reasoning += reasoning[: len(reasoning) - kept]
            self._held = rest if mark else reasoning[len(reasoning) - kept :]
            self._inside = not mark
        if self._inside is False:
            self.content += self._held if self.content or not self.reasoning else self._held.lstrip("\n")
            self._held = ""
        return self.reasoning[before[0] :], self.content[before[1] :]

    def end(self) -> tuple[str, str]:
        """Take the text that was held for a part; return it as `add` does."""
        held, self._held = self._held, ""
        if self._inside:
            self.reasoning += held
            return held, ""
        self.content += held
        return "", held


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a proper beginning of ``mark``."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
