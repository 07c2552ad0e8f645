"""The HTTP application of the viewer: its page, the queries of its views, and a wait for changes; and its server."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic_core import to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from rayrft.config import FolderConfig, load_folder_config
from rayrft.config.serve import FeedbackConfig, ViewerConfig, read_keys
from rayrft.errors import ConfigError, RayrftError
from rayrft.feedback.app import FeedbackPage
from rayrft.feedback.journal import feedback_folder
from rayrft.feedback.run_rows import RunRows
from rayrft.runtime.serving import key_digest, write_key
from rayrft.runtime.serving.http import ApiError, HttpService, Route, add_page, parse, unless_gone
from rayrft.viewer.folders import Reports, RunFolder, Runs
from rayrft.viewer.index import cache_folder, remove_unused
from rayrft.viewer.views import Query, StorageRequest, advice, before, experiences, run, tasks, timeline
from rayrft.viewer.views import runs as all_runs

VIEWS = (all_runs, run, experiences, tasks, timeline, advice, before)

_LOOK_MS = 2000
"""Milliseconds after which files are looked at without an event: mounted folders of other machines have none."""
_WAIT_S = 25.0
"""Longest wait of a request for a change."""


class ChangesRequest(StorageRequest):
    """Parameters of ``changes``: a run, or none for all, and the state of it that the page has seen."""

    run: str = ""
    seen: str = ""


class Viewer(HttpService):
    """The page over the run folders in a storage, with the feedback page of each run. ``buffers`` returns the name
    of the actor of a run's Buffer, to which judgements go; None where no cluster can be reached."""

    def __init__(
        self,
        storage: Path,
        config: ViewerConfig,
        key_digests: tuple[str, ...],
        buffers: Callable[[FolderConfig], str | None] = lambda run: None,
        reports: Reports | None = None,
    ) -> None:
        super().__init__(config, key_digests)
        self._runs, self._buffers = Runs(storage, reports), buffers
        self._feedback: dict[tuple[Path, int], FastAPI] = {}
        """The applications of feedback pages by run folder and its inode, as another run may take the name; each reads
        its journal at the first request with a key."""

    def routes(self) -> Iterator[Route]:
        for view in VIEWS:
            for name, query in view.QUERIES.items():
                yield "GET", f"/v1/{name}", self._handler(query), True
        yield "GET", "/v1/changes", self._changes, True

    def app(self) -> FastAPI:
        """Build the application; the page's files need no key."""
        app = super().app()
        add_page(app, __package__)
        app.mount("/feedback/{run}", self._feedback_of_run)
        return app

    async def _feedback_of_run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to the feedback page of a run. Plug-ins of its folder are not run, and as the page's files
        need no key, an error does not say which runs there are."""
        try:
            app: ASGIApp = await asyncio.to_thread(self._feedback_page, str(scope["path_params"]["run"]))
        except (ApiError, RayrftError):  # no such run, or its config cannot be read
            app = PlainTextResponse("There is no such page.", 404)
        await app(scope, receive, send)

    def _feedback_page(self, name: str) -> FastAPI:
        folder = self._runs.get(name).path
        known = folder, folder.stat().st_ino
        if known not in self._feedback:
            run, settings = load_folder_config(folder), FeedbackConfig()
            rows = RunRows(folder, run, self._buffers(run), settings.max_groups, settings.demonstrations)
            page = FeedbackPage(name, settings, self._key_digests, rows, feedback_folder(folder))
            page.count = self.count
            self._feedback.setdefault(known, page.app())
        return self._feedback[known]

    def _handler(self, query: Query) -> Callable[[Request], Any]:
        model, function = query

        async def handle(request: Request) -> Response:
            asked = _parameters(model, request)
            try:
                found = await unless_gone(request, asyncio.to_thread(function, self._runs, asked))
            except ConfigError as error:  # of a run's folder
                raise ApiError(409, str(error), code="unreadable_run", param="run") from None
            return found if isinstance(found, Response) else _json(found)

        return handle

    async def _changes(self, request: Request) -> Response:
        """Answer once a file of the run, or of any run, has changed since ``seen``, or after a while."""
        from watchfiles import awatch

        asked = _parameters(ChangesRequest, request)
        runs = [self._runs.get(asked.run)] if asked.run else self._runs.all()
        folders = {path for each in runs for path in each.watched} | ({self._runs.storage} if not asked.run else set())

        async def change() -> str:
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            ends = loop.time() + _WAIT_S
            try:
                # Looked at for the first time once the folders are watched, so that no change is missed.
                watch = awatch(
                    *folders,
                    recursive=False,
                    stop_event=stop,
                    debounce=300,
                    rust_timeout=_LOOK_MS,
                    yield_on_timeout=True,
                )
                async for _ in watch:
                    seen = await asyncio.to_thread(_seen, runs)
                    if seen != asked.seen or loop.time() > ends:
                        return seen
            finally:
                stop.set()
            return asked.seen

        first = await asyncio.to_thread(_seen, runs)
        return _json({"seen": first if first != asked.seen else await unless_gone(request, change())})


def _seen(runs: list[RunFolder]) -> str:
    return "/".join(each.seen() for each in runs)


def _parameters(model: type[Any], request: Request) -> Any:
    """Return the parameters of a request. Raises ApiError 400, which names one that is unknown or wrong."""
    return parse(model, json.dumps(dict(request.query_params)).encode())


def _json(value: Any) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")


def check_storage_folder(storage: Path) -> None:
    """Raise ConfigError if there is no such folder."""
    if not storage.is_dir():
        remedy = "give the folder of run folders, or one of these"
        raise ConfigError("there is no such folder", remedy, field="storage", value=str(storage))


def serve_viewer(
    storage: Path, config: ViewerConfig, say: Callable[[str], None] = print, reports: Reports | None = None
) -> None:
    """Serve the viewer in this process until SIGINT or SIGTERM.

    Raises ConfigError if there is no such folder, the port is taken, or keys cannot be read.
    """
    import uvicorn

    check_storage_folder(storage)
    digests, key = read_keys(config), secrets.token_urlsafe(24)
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listening = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        problem = f"the port cannot be used: {error.strerror}"
        raise ConfigError(problem, "give another one: port=8101", field="port", value=config.port) from None
    url, hint = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{config.port}/", ""
    if not digests:
        write_key(key_file := cache_folder() / f"key-{config.port}", key)
        # A terminal shows the key; logs and notebooks are kept.
        hint = f"#key={key}" if sys.stdout.isatty() else f"; its key is in {key_file}"
    remove_unused()
    viewer = Viewer(storage, config, digests or (key_digest(key),), reports=reports)
    say(f"viewer at {url}{hint}")
    settings = uvicorn.Config(viewer.app(), log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(settings).run([listening])
