"""People with windows of the feedback page open, and what they said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayrft.feedback.items import ShownGroup
from rayrft.feedback.journal import FILE, read_journal
from rayrft.feedback.judgements import Judgement, JudgementAdded
from tests.browser import Window
from tests.feedback.scripted import KEY, group


class Person(Window):
    """Someone with a window of the page open, who has come by the link with the key."""

    def __init__(self, browser: Any, url: str, name: str = "Ann", *, key: str = KEY, **context: Any) -> None:
        super().__init__(browser, url, key=key, **{"viewport": {"width": 1280, "height": 800}, **context})
        self.page.fill("#login-name", name)
        self.page.press("#login-name", "Enter")

    def key(self, *keys: str) -> None:
        for each in keys:
            self.page.keyboard.press(each)

    def write(self, text: str) -> None:
        """Type into the text that has the focus."""
        self.page.keyboard.insert_text(text)

    def ready(self) -> None:
        """Wait until answers are there to be judged."""
        super().ready()
        self.see("#answers .answer >> nth=0").to_be_visible()

    @property
    def shown(self) -> list[str]:
        """The ids of the answers that are shown."""
        self.ready()
        return [card.get_attribute("data-id") for card in self.page.locator("#answers .answer").all()]

    def saved(self, count: int) -> None:
        """Wait until so many judgements of the person count, and the next item is there."""
        self.see("#person").to_contain_text(f"· {count}")
        self.see("#main").to_have_attribute("aria-busy", "false")


Serve, Arrive = Callable[..., str], Callable[..., Person]


def said(folder: Path) -> list[Judgement]:
    return [entry.judgement for entry in read_journal(folder / FILE) if isinstance(entry, JudgementAdded)]


def spoken(count: int) -> list[ShownGroup]:
    return [group(f"g{number}", f"First {number}.", f"Second {number}.", f"Third {number}.") for number in range(count)]
