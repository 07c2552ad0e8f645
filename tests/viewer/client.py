"""Requests of a page to a viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from rayrft.config.serve import ViewerConfig
from rayrft.runtime.serving import key_digest
from rayrft.viewer.app import Viewer
from rayrft.viewer.folders import Reports
from tests.viewer.recorded import KEY


class Client:
    """A page's requests to a viewer over a storage."""

    def __init__(self, storage: Path, key: str = KEY, reports: Reports | None = None) -> None:
        app = Viewer(storage, ViewerConfig(), (key_digest(KEY),), reports=reports).app()
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page", headers=headers)

    async def ask(self, query: str, expected: int = 200, **asked: Any) -> dict[str, Any]:
        response = await self.http.get(f"/v1/{query}", params=asked, timeout=60)
        assert response.status_code == expected, response.text
        found: dict[str, Any] = response.json()
        return found

    async def rows(self, **asked: Any) -> dict[str, Any]:
        """The rows of a run once its whole log is read."""
        while (found := await self.ask("rows", **{"run": "words", **asked}))["log"]["lags"]:
            pass
        return found

    async def refused(self, query: str, expected: int = 400, **asked: Any) -> tuple[str, str]:
        """The parameter and the message of an error."""
        error = (await self.ask(query, expected, **asked))["error"]
        return error["param"], error["message"]
