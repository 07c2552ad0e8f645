"""Pages in the Chromium of the distribution, by Playwright."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra 'test'")
expect = playwright.expect
expect.set_options(timeout=30_000)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium, which tests/run.sh does where it may"
)


@contextmanager
def launched() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an application, in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


class Window:
    """A window of a page, opened by a link with a key."""

    def __init__(self, browser: Any, url: str, query: str = "", *, key: str, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        self.context.set_default_timeout(30_000)
        self.page, self.url = self.context.new_page(), url
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.goto(f"{url}{query}#key={key}")

    def see(self, selector: str) -> Any:
        return expect(self.page.locator(selector))

    def click(self, selector: str) -> None:
        self.page.click(selector)

    def ready(self) -> None:
        self.see("#main").to_have_attribute("aria-busy", "false")

    def leave(self) -> None:
        self.context.close()
        assert self.errors == []
