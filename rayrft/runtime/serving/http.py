"""HTTP services: their keys, limits, streams and errors; and the files of pages, which need no key, with the policy
under which a browser shows them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.datastructures import URL

from rayrft.errors import ActorDied, ActorUnreachable, DataError, EngineFailed, RequestRefused, StorageError
from rayrft.runtime.serving import LOCAL, HttpSettings, key_digest
from rayrft.runtime.waits import cancel, unless

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
R = TypeVar("R")
Handler = Callable[[Request], Awaitable[Response]]
Route = tuple[str, str, Handler, bool]
"""Method, path and handler, and whether requests are refused while ``max_requests`` are open."""

_PAGE_FILES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_PAGE_HEADERS = {
    # A model's text never runs: only the page's own scripts do, and none in the text of elements.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class ApiError(Exception):
    """An error of the API: an HTTP status and a body. ``param`` is the field of the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class UnsupportedParameter(ValueError):
    """A validator's error for a ``param`` of the request."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(problem)
        self.param, self.problem = param, problem


class HttpService:
    """The base of services over HTTP. No ``key_digests``: no key is needed."""

    def __init__(self, config: HttpSettings, key_digests: tuple[str, ...]) -> None:
        self._config, self._key_digests = config, key_digests
        self.count: Callable[[str], None] = lambda outcome: None
        """Receives status and code of each response."""
        self.open = 0
        """Requests that are open."""
        self.outcomes: Counter[str] = Counter()
        """Requests by outcome."""

    def routes(self) -> Iterable[Route]:
        """Return the routes that need a key."""
        raise NotImplementedError

    def app(self) -> FastAPI:
        """Build the application: the routes, and ``/health``, which needs no key."""
        app = FastAPI(openapi_url=None)
        for method, path, handle, bounded in self.routes():
            at_most = self._config.max_requests if bounded else math.inf
            app.add_api_route(path, self._guarded(handle, at_most), methods=[method])

        async def health() -> Response:
            return Response()

        app.add_api_route("/health", health, methods=["GET"])
        return app

    def _guarded(self, handle: Handler, at_most: float) -> Handler:
        """Return a handler that checks the key and the bound, counts the outcome, and answers errors as the API."""

        async def route(request: Request) -> Response:
            try:
                self._check_key(request)
                self._check_sender(request)
                if self.open >= at_most:
                    problem, retry = f"The server has {self.open} open requests, its limit.", {"Retry-After": "1"}
                    raise ApiError(429, problem, code="rate_limit_exceeded", kind="requests", headers=retry)
                self.open += 1
                try:
                    response = await handle(request)
                except BaseException:
                    self.open -= 1
                    raise
                if isinstance(response, EventStream):
                    response.ended = self._stream_ended
                else:
                    self._stream_ended("200")
                return response
            except asyncio.CancelledError:
                self._end("499 client_gone")
                raise
            except Exception as error:  # whatever went wrong is an answer to this request
                answer = self.in_form(request, api_error(error))
                self._end(f"{answer.status} {answer.code}")
                return JSONResponse(answer.body, answer.status, answer.headers)

        return route

    def in_form(self, request: Request, error: ApiError) -> ApiError:
        """Return an error in the form of the API that a request is made to."""
        return error

    def _stream_ended(self, outcome: str) -> None:
        self.open -= 1
        self._end(outcome)

    def _end(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self.count(outcome)

    def _check_key(self, request: Request) -> None:
        key = key_of(request)
        given = key_digest(key) if key else ""
        # All are compared, each in constant time: the time tells nothing of the keys.
        known = [hmac.compare_digest(given, digest) for digest in self._key_digests]
        if known and not any(known):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    def _check_sender(self, request: Request) -> None:
        """Without keys, refuse requests that a web page in the user's browser can send, also by a name that it made
        lead to this machine (DNS rebinding). Raises ApiError 403, or 415 for a body that is not declared as JSON."""
        if self._key_digests:
            return
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        name = URL(f"//{host}").hostname
        if name not in LOCAL or origin not in (None, f"http://{host}"):
            where, value = ("Host", host) if name not in LOCAL else ("Origin", origin)
            problem = f"{where} {value!r} is not this machine's; give serve.keys_env or serve.keys_file."
            raise ApiError(403, problem, code="foreign_request", param=where)
        if request.method == "POST" and request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise ApiError(415, "Content-Type must be application/json.", code="invalid_content_type")

    async def body(self, request: Request) -> bytes:
        """Read the body. Raises ApiError 413 as soon as it is known to be too large, and 408 if it comes too slowly."""
        limit, headers = self._config.max_body_kib << 10, {"Connection": "close"}  # the rest of the body is not read
        declared, body = request.headers.get("content-length", ""), bytearray()
        too_large = ApiError(413, f"The body has more than {limit} bytes.", code="request_too_large", headers=headers)
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._config.body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            problem = f"The body did not arrive within {self._config.body_s:g} s."
            raise ApiError(408, problem, code="body_timeout", headers=headers) from None
        return bytes(body)


def key_of(request: Request) -> str:
    """Return the API key of a request, as clients of OpenAI or of Anthropic send it; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def parse(model: type[Body], body: bytes) -> Body:
    """Parse a request's body. Raises ApiError 400, which names the first field that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        # Of the errors of a union's members, the deepest one says most.
        first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        if first["type"] == "json_invalid":
            raise ApiError(400, f"The body is not JSON: {first['msg']}.", code="invalid_json") from None
        cause = first.get("ctx", {}).get("error")
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        # The types by which members of a union are called are not part of the field's name.
        path = [str(key) for key in first["loc"] if isinstance(key, int) or (key.isidentifier() and key != "str")]
        param, problem = ".".join(path), first["msg"].removeprefix("Value error, ")
        if isinstance(cause, UnsupportedParameter):
            code, inner, problem = "unsupported_parameter", cause.param, cause.problem
            param = inner if param in ("", inner) else f"{param}.{inner}"
        where = param or None
        raise ApiError(400, f"{where or 'The body'}: {problem}.", code=code, param=where) from None


class EventStream(Response):
    """A response of server-sent events, which ends when its client goes away; ``last`` is sent after all others."""

    def __init__(self, events: AsyncIterator[str], headers: dict[str, str], last: str = "data: [DONE]\n\n") -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._last = events, last
        self.ended: Callable[[str], None] = lambda outcome: None
        """Receives the outcome of the stream."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        outcome = "499 client_gone"
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                outcome = sending.result()
        finally:
            self.ended(outcome)  # before anything is awaited: Serve may cancel this task at any time
            await cancel(sending, gone)

    async def _send(self, send: Any) -> str:
        """Send all events; return the outcome."""
        outcome = "200"
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            except ApiError as error:  # it was sent as an event
                outcome = f"{error.status} {error.code}"
            except OSError:
                return "499 client_gone"
        await send({"type": "http.response.body", "body": self._last.encode()})
        return outcome


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """Return the result of ``work``; abandon it if the client goes away."""
    return await unless(_until_gone(request.receive), client_gone, work)


def client_gone() -> ApiError:
    """Return the error of a request whose client has gone away."""
    return ApiError(499, "The client has gone.", code="client_gone")


def api_error(error: BaseException) -> ApiError:
    """Convert an error to the one that the client sees."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ApiError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return client_gone()
    if isinstance(error, RequestRefused | DataError):
        return ApiError(400, str(error), code="invalid_value", param=error.field or None)
    if isinstance(error, TimeoutError):
        return ApiError(504, "The request was not answered in time.", code="timeout", kind="server_error")
    log.error("a request failed", exc_info=error)  # not for the client: it may name actors, addresses and files
    if isinstance(error, ActorDied | ActorUnreachable | EngineFailed):
        code = {ActorDied: "engine_died", ActorUnreachable: "unavailable"}.get(type(error), "engine_failed")
        text, headers = "A part of the server does not answer; try again.", {"Retry-After": "5"}
        return ApiError(503, text, code=code, kind="server_error", headers=headers)
    known = f"{error.field}: {error.problem}." if isinstance(error, StorageError) else "the server's log says why."
    return ApiError(500, f"The request failed: {known}", code="internal_error", kind="server_error")


def add_page(app: FastAPI, package: str) -> None:
    """Add the page in the folder ``static`` of a package, at the root of the application: the files of types in
    `_PAGE_FILES`, and those that all pages share."""
    for folder in (Path(__file__).parent / "static", Path(str(files(package))) / "static"):
        for file in folder.rglob("*"):
            if kind := _PAGE_FILES.get(file.suffix):
                path = file.relative_to(folder).as_posix()
                _add_file(app, "/" if path == "index.html" else f"/{path}", file.read_bytes(), kind)


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    async def serve(request: Request) -> Response:
        if path == "/" and not request.url.path.endswith("/"):  # relative addresses would miss the page's files
            return RedirectResponse(request.url.path + "/")
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=_PAGE_HEADERS)

    app.add_api_route(path, serve, methods=["GET"])
