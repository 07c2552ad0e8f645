"""The HTTP application of the endpoint: its routes, and what holds for every request."""

from __future__ import annotations

import asyncio
import hmac
import math
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rayrft.errors import DataError, FeedbackRefused
from rayrft.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    FeedbackRequest,
    ResponsesRequest,
    Sampled,
    key_digest,
    parse,
)
from rayrft.serve.replies import EventStream, api_error
from rayrft.serve.responder import Responder


class Endpoint:
    """The API over what answers."""

    def __init__(self, responder: Responder, count: Callable[[str], None] = lambda outcome: None) -> None:
        """``count`` is told how every request ended: its status and code."""
        self._responder = responder
        self._sessions, self._settings = responder.sessions, responder.settings
        self._config = self._settings.config
        self._count = count
        self._open = 0
        self.outcomes: Counter[str] = Counter()
        """Requests by how they ended."""

    def app(self) -> FastAPI:
        """Build the application."""
        app = FastAPI(openapi_url=None)
        answers: dict[str, tuple[type[Sampled], str]] = {
            "/v1/chat/completions": (ChatRequest, "chatcmpl-"),
            "/v1/completions": (CompletionRequest, "cmpl-"),
            "/v1/responses": (ResponsesRequest, "resp_"),
        }
        # An application that can be given nothing but a base URL has its session there.
        for base in ("", "/sessions/{session}"):
            for path, (model, prefix) in answers.items():
                handle = self._route(self._answering(model, prefix), self._config.max_requests)
                app.add_api_route(base + path, handle, methods=["POST"])
            app.add_api_route(f"{base}/v1/feedback", self._route(self._feedback), methods=["POST"])
            app.add_api_route(f"{base}/v1/models", self._route(self._models), methods=["GET"])
            app.add_api_route(base + "/v1/models/{name:path}", self._route(self._model), methods=["GET"])
            app.add_api_route(f"{base}/v1/stats", self._route(self._stats), methods=["GET"])
        app.add_api_route("/health", self._health, methods=["GET"])
        return app

    # Every request.

    def _route(
        self, handle: Callable[[Request], Awaitable[Response]], at_most: float = math.inf
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a route: with the key checked, and errors in the form of the API. It refuses requests
        while ``at_most`` are open."""

        async def route(request: Request) -> Response:
            try:
                self._check_key(request)
                if self._open >= at_most:
                    raise ApiError(
                        429,
                        f"The server has {self._open} open requests, which is its limit.",
                        code="rate_limit_exceeded",
                        kind="requests",
                        headers={"Retry-After": "1"},
                    )
                self._open += 1
                try:
                    response = await handle(request)
                except BaseException:
                    self._open -= 1
                    raise
                if isinstance(response, EventStream):
                    response.ended = self._stream_ended
                else:
                    self._open -= 1
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
        self._open -= 1
        self._end(outcome)

    def _end(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._count(outcome)

    def _check_key(self, request: Request) -> None:
        digests = self._settings.key_digests
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key_digest(key.strip()) if scheme.lower() == "bearer" else ""
        # All are compared, each in constant time: the time tells nothing of the keys.
        known = [hmac.compare_digest(given, digest) for digest in digests]
        if digests and not any(known):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """Read the body. Raises ApiError 413 as soon as it is known to be too large."""
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

    # Answers.

    def _answering(self, model: type[Sampled], prefix: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            body = parse(model, await self._body(request))
            if body.model != self._settings.model and not self._settings.any_model:
                raise ApiError(
                    404,
                    f"The model {body.model!r} does not exist; there is {self._settings.model!r}.",
                    code="model_not_found",
                    param="model",
                )
            response = f"{prefix}{uuid.uuid4().hex}"
            named = request.path_params.get("session") or request.headers.get("x-session-id")
            session = named or body.metadata.session_id or body.user or response
            task = request.headers.get("x-task-id") or body.metadata.task_id
            headers = {"X-Session-Id": session} if session.isascii() and session.isprintable() else {}
            ask = await self._responder.begin(body, response, session, task)
            if body.stream:
                return EventStream(self._responder.events(ask), headers)
            return JSONResponse(await self._responder.whole(ask, request), headers=headers)

        return handle

    # Other routes.

    async def _feedback(self, request: Request) -> Response:
        body = parse(FeedbackRequest, await self._body(request))
        if self._sessions is None:
            raise ApiError(400, "This endpoint records no sessions: serve.record is false.", code="not_recorded")
        try:
            session = await self._sessions.feedback(body.id, body.reward, body.components)
        except DataError as error:
            unknown = error.field == "id"
            code = "session_not_found" if unknown else "invalid_value"
            raise ApiError(404 if unknown else 400, str(error), code=code, param=error.field) from None
        except FeedbackRefused as error:
            code = "already_rewarded" if error.value == "rewarded" else "too_late"
            headers = {"x-should-retry": "false"}  # OpenAI's client would send it again
            raise ApiError(409, str(error), code=code, param="id", headers=headers) from None
        return JSONResponse({"object": "feedback", "session_id": session, "reward": body.reward})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._settings.model:
            raise ApiError(404, f"The model {name!r} does not exist.", code="model_not_found", param="model")
        return JSONResponse(self._card())

    async def _stats(self, request: Request) -> Response:
        sessions = asdict(await self._sessions.stats()) if self._sessions is not None else None
        return JSONResponse({"open": self._open, "requests": dict(self.outcomes), "sessions": sessions})

    async def _health(self) -> Response:
        return Response()

    def _card(self) -> dict[str, Any]:
        size = self._settings.max_length
        return {
            "id": self._settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "rayrft",
            "max_model_len": size,
        }
