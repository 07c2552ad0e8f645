"""Pages of a service: their files, which need no key, and the policy under which a browser shows them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
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
    for folder in (Path(__file__).parent / "static", Path(str(files(package))) / "static"):
        for file in folder.rglob("*"):
            if kind := _KINDS.get(file.suffix):
                path = file.relative_to(folder).as_posix()
                _add_file(app, "/" if path == "index.html" else f"/{path}", file.read_bytes(), kind)


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    async def serve(request: Request) -> Response:
        if path == "/" and not request.url.path.endswith("/"):  # relative addresses would miss the page's files
            return RedirectResponse(request.url.path + "/")
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    app.add_api_route(path, serve, methods=["GET"])
