"""An operator that is named by its module."""

from __future__ import annotations

import rayrft


@rayrft.register_operator("whisper", "clean")
def whisper(question: str) -> str:
    return question.lower()
