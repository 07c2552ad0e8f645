"""Pages of a service: their files, which need no key, and the policy under which a browser shows them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_HEADERS = {
    # A model's text never runs: only the page's own scripts do, and none in the text of elements.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, package: str) -> None:
    """Add the page in the folder ``static`` of a package, at the root of the application: the files of types in
    `_KINDS`, and those that all pages share."""
    for folder in (files(__package__) / "static", files(package) / "static"):
        for path, file in _files_in(folder):
            if kind := _KINDS.get(path.rpartition(".")[2]):
                _add_file(app, "/" if path == "/index.html" else path, file.read_bytes(), kind)


def _files_in(folder: Traversable, path: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        inner = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _files_in(entry, inner)
        else:
            yield inner, entry


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    async def serve(request: Request) -> Response:
        if path == "/" and not request.url.path.endswith("/"):  # relative addresses would miss the page's files
            return RedirectResponse(request.url.path + "/")
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    app.add_api_route(path, serve, methods=["GET"])
