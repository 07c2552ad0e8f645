"""Where a model's text ends its reasoning and begins its answer.

Text has reasoning between ``<think>`` and ``</think>``, whatever the marks in the model's tokens: see `ReasoningMarks`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_OPENING, _CLOSING = "<think>", "</think>"
REASONING_MARKS = (_OPENING, _CLOSING)
_TAG = re.compile(r"<(?:\w+:)?think(?::[^\s<>]+)?>")
_PAIRS = {
    "[THINK]": ("[/THINK]", ""),
    "<|START_THINKING|>": ("<|END_THINKING|>", ""),
    "<|plamo:begin_think:plamo|>": ("<|plamo:end_think:plamo|>", ""),
    "<|channel>": ("<channel|>", "thought\n"),
}
_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_HEADER = re.compile(
    r"<\|end\|>|"
    r"(<\|start\|>assistant)?([^<]*)<\|channel\|>(\w+)([^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_UNFINISHED = re.compile(r"<\|(?:start|channel)\|>(?:(?!<\|message\|>).)*\Z", re.S)
_UNREAD = {
    "my thought process:": "granite",
    "<|content_thinking|>": "inkling",
    "<ifm|think": "k2_horizon",
    "<|open|>think": "kimi_k3",
    "to=self": "muse_glimmer",
}


@dataclass(frozen=True)
class ReasoningMarks:
    """The tokens between which a model writes reasoning, and the ``header`` after the first of them."""

    opening: str
    closing: str
    header: str = ""

    @classmethod
    def among(cls, tokens: Iterable[str]) -> ReasoningMarks | None:
        """Return the marks in a vocabulary's added tokens; None if they are ``<think>``, or several, or not there."""
        known = set(tokens)
        if {"<|start|>", "<|channel|>", "<|message|>"} <= known:
            return HarmonyMarks("<|channel|>analysis<|message|>", "<|end|>")
        pairs = _PAIRS | {tag: (tag.replace("<", "</", 1), "") for tag in known if _TAG.fullmatch(tag)}
        found = [cls(opening, *rest) for opening, rest in pairs.items() if {opening, rest[0]} <= known]
        return found[0] if len(found) == 1 and found[0].opening != _OPENING else None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tokens that `readable` needs."""
        return self.opening, self.closing

    def readable(self, text: str, before: str) -> str:
        """Return text with ``<think>`` and ``</think>`` for the marks. It follows the text ``before`` of the same
        answer; a mark that is incomplete at its end is left out."""
        opening, start = self.opening + self.header, text.rfind(self.opening)
        if start >= 0 and len(opening) > len(text) - start and opening.startswith(text[start:]):
            text = text[:start]
        for mark, plain in ((opening, _OPENING), (self.opening, _OPENING), (self.closing, _CLOSING)):
            text = text.replace(mark, plain)
        return text

    def written(self, reasoning: str, answer: str) -> str:
        """Return an answer with reasoning as the model writes it."""
        return f"{self.opening}{self.header}{reasoning}{self.closing}{answer}"


class HarmonyMarks(ReasoningMarks):
    """The channels of gpt-oss: ``analysis`` is reasoning, and a message to a tool begins with its recipient."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return _HARMONY

    def readable(self, text: str, before: str) -> str:
        inside = bool(opened_reasoning(before))

        def plain(found: re.Match[str]) -> str:
            nonlocal inside
            start, recipient, channel, rest = found.groups()
            if channel is None:
                return ""
            was, inside = inside, channel == "analysis"
            if inside:
                return "\n" if was else _OPENING
            called = recipient or (f" {rest.split()[0]}" if "to=" in rest else "")
            return (_CLOSING if was else "\n" if start and not called else "") + (called and f"{called} ")

        return _HEADER.sub(plain, _UNFINISHED.sub("", text))

    def written(self, reasoning: str, answer: str) -> str:
        return answer  # its templates take reasoning in a field, if at all


def unread_reasoning(template: str) -> str | None:
    """Return the form in which a chat template shows reasoning, if it is not read: vLLM's name of it, or its mark."""
    marks = [mark for mark in _TAG.findall(template) if mark != _OPENING]
    return next((name for text, name in _UNREAD.items() if text in template), marks[0] if marks else None)


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
