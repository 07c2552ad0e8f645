"""What holds for every request over HTTP: keys, bounds, and errors in one form, counted."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections import Counter
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import URL

from rayrft.config.serve import LOCAL, HttpConfig
from rayrft.endpoint.protocol import ApiError, key_digest
from rayrft.endpoint.replies import EventStream, api_error


class HttpService:
    """The base of what is served over HTTP."""

    def __init__(self, config: HttpConfig, key_digests: tuple[str, ...], count: Callable[[str], None]) -> None:
        """Without digests of API keys, requests need no key. ``count`` is told how every request ended: its status and
        code."""
        self._config, self._key_digests, self._count = config, key_digests, count
        self.open = 0
        """Requests that are open."""
        self.outcomes: Counter[str] = Counter()
        """Requests by how they ended."""

    def add_health(self, app: FastAPI) -> None:
        """Add the route that says that all is well, without a key."""

        async def health() -> Response:
            return Response()

        app.add_api_route("/health", health, methods=["GET"])

    def route(
        self, handle: Callable[[Request], Awaitable[Response]], at_most: float = math.inf
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a route: with the key checked, and errors in the form of the API. It refuses requests
        while ``at_most`` are open."""

        async def route(request: Request) -> Response:
            try:
                self._check_key(request)
                self._check_sender(request)
                if self.open >= at_most:
                    raise ApiError(
                        429,
                        f"The server has {self.open} open requests, which is its limit.",
                        code="rate_limit_exceeded",
                        kind="requests",
                        headers={"Retry-After": "1"},
                    )
                self.open += 1
                try:
                    response = await handle(request)
                except BaseException:
                    self.open -= 1
                    raise
                if isinstance(response, EventStream):
                    response.ended = self._stream_ended
                else:
                    self.open -= 1
                    self._end("200")
                return response
            except asyncio.CancelledError:
                self._end("499 client_gone")
                raise
            except Exception as error:  # whatever went wrong is an answer to this request
                problem = api_error(error)
                self._end(f"{problem.status} {problem.code}")
                return JSONResponse(problem.body, problem.status, problem.headers)

        return route

    def _stream_ended(self, outcome: str) -> None:
        self.open -= 1
        self._end(outcome)

    def _end(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._count(outcome)

    def _check_key(self, request: Request) -> None:
        digests = self._key_digests
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key_digest(key.strip()) if scheme.lower() == "bearer" else ""
        # All are compared, each in constant time: the time tells nothing of the keys.
        known = [hmac.compare_digest(given, digest) for digest in digests]
        if digests and not any(known):
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
        try:
            async with asyncio.timeout(self._config.body_s):
                return await self._bounded_body(request)
        except TimeoutError:
            problem = f"The body was not there within {self._config.body_s:g} s."
            raise ApiError(408, problem, code="body_timeout", headers={"Connection": "close"}) from None

    async def _bounded_body(self, request: Request) -> bytes:
        limit = self._config.max_body_kib << 10
        declared, body = request.headers.get("content-length", ""), bytearray()
        if not declared.isdecimal() or int(declared) <= limit:
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        # What the client goes on sending is not read.
        headers = {"Connection": "close"}
        raise ApiError(413, f"The body has more than {limit} bytes.", code="request_too_large", headers=headers)
