"""The HTTP application of the endpoint: its routes, and how a replica of Ray Serve builds it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import ray
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.anthropic import MessagesRequest, as_anthropic
from rayrft.endpoint.keeper import RemoteSessions
from rayrft.endpoint.protocol import ChatRequest, CompletionRequest, FeedbackRequest, Sampled
from rayrft.endpoint.responder import Responder
from rayrft.endpoint.responses import ResponsesRequest
from rayrft.endpoint.settings import EndpointSettings
from rayrft.errors import DataError, FeedbackRefused
from rayrft.explorer.engines.client import EngineClient
from rayrft.runtime.handle import NAMESPACE, Handle
from rayrft.runtime.serving.http import ApiError, EventStream, Handler, HttpService, Route, key_of, parse
from rayrft.runtime.trace import Trace
from rayrft.runtime.waits import Waits

_PRIVATE = "private-"
"""Prefix of API keys whose requests are neither kept nor trained on."""
_PATIENCE_S = 15.0
"""Time for an engine to join, or the keeper to be restarted, before requests are answered by 503."""


class PolicyEndpoint(HttpService):
    """The API over a responder."""

    def __init__(self, responder: Responder) -> None:
        settings = responder.settings
        super().__init__(settings.config, settings.key_digests)
        self._responder = responder
        self._settings = settings

    def routes(self) -> Iterator[Route]:
        answers: dict[str, tuple[type[Sampled], str]] = {
            "/v1/chat/completions": (ChatRequest, "chatcmpl-"),
            "/v1/completions": (CompletionRequest, "cmpl-"),
            "/v1/responses": (ResponsesRequest, "resp_"),
            "/v1/messages": (MessagesRequest, "msg_"),
        }
        # An application that is configured by a base URL alone names its session there.
        for base in ("", "/sessions/{session}"):
            for path, (model, prefix) in answers.items():
                yield "POST", base + path, self._answering(model, prefix), True
                yield "DELETE", base + path + "/{id}", self._forget, False
            yield "POST", f"{base}/v1/messages/count_tokens", self._count_tokens, True
            yield "POST", f"{base}/v1/feedback", self._feedback, False
            yield "GET", f"{base}/v1/models", self._models, False
            yield "GET", base + "/v1/models/{name:path}", self._model, False
            yield "GET", f"{base}/v1/stats", self._stats, False

    def in_form(self, request: Request, error: ApiError) -> ApiError:
        return as_anthropic(error) if "/v1/messages" in request.url.path else error

    # Answers.

    def _answering(self, model: type[Sampled], prefix: str) -> Handler:
        async def handle(request: Request) -> Response:
            body = parse(model, await self.body(request))
            if body.model != self._settings.model and not self._settings.any_model:
                remedy = f"The model {body.model!r} does not exist; there is {self._settings.model!r}."
                raise ApiError(404, remedy, code="model_not_found", param="model")
            response = f"{prefix}{uuid.uuid4().hex}"
            named = request.path_params.get("session") or request.headers.get("x-session-id")
            session = named or body.metadata.session_id or body.user or response
            task = request.headers.get("x-task-id") or body.metadata.task_id
            for param, name in (("X-Session-Id", session), ("X-Task-Id", task or "")):
                if len(name) > 256:
                    raise ApiError(400, f"{param}: has more than 256 characters.", code="invalid_value", param=param)
            headers = {"X-Session-Id": session} if session.isascii() and session.isprintable() else {}
            key = key_of(request)
            record = self._settings.any_model or (body.store and not key.startswith(_PRIVATE))
            asks = await self._responder.begin(body, response, session, task, record=record)
            if body.stream:
                last = {"last": ""} if model is MessagesRequest else {}
                return EventStream(self._responder.events(asks), headers, **last)
            return JSONResponse(await self._responder.whole(asks, request), headers=headers)

        return handle

    # Other routes.

    async def _count_tokens(self, request: Request) -> Response:
        body = parse(MessagesRequest, await self.body(request))
        [ask] = await self._responder.begin(body, "msg_", "", None, record=False)
        return JSONResponse({"input_tokens": len(ask.prompt)})

    async def _feedback(self, request: Request) -> Response:
        body = parse(FeedbackRequest, await self.body(request))
        if (sessions := self._responder.sessions) is None:
            raise ApiError(400, "This endpoint records no sessions: serve.record is false.", code="not_recorded")
        try:
            session = await sessions.feedback(body.id, body.reward, body.components)
        except DataError as error:
            unknown = error.field == "id"
            code = "session_not_found" if unknown else "invalid_value"
            raise ApiError(404 if unknown else 400, str(error), code=code, param=error.field) from None
        except FeedbackRefused as error:
            code = "already_rewarded" if error.value == "rewarded" else "too_late"
            headers = {"x-should-retry": "false"}  # OpenAI's client would send it again
            raise ApiError(409, str(error), code=code, param="id", headers=headers) from None
        return JSONResponse({"object": "feedback", "session_id": session, "reward": body.reward})

    async def _forget(self, request: Request) -> Response:
        name, sessions = request.path_params["id"], self._responder.sessions
        rows, leased = await sessions.forget(name) if sessions is not None else (0, 0)
        if not rows + leased:
            raise ApiError(404, f"Nothing is kept of {name!r}.", code="not_found", param="id")
        return JSONResponse({"id": name, "deleted": not leased, "rows": rows, "rows_in_training": leased})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._settings.model:
            raise ApiError(404, f"The model {name!r} does not exist.", code="model_not_found", param="model")
        return JSONResponse(self._card())

    async def _stats(self, request: Request) -> Response:
        sessions = self._responder.sessions
        counts = asdict(await sessions.stats()) if sessions is not None else None
        found = {"open": self.open, "requests": dict(self.outcomes), "malformed_calls": self._responder.malformed_calls}
        return JSONResponse({**found, "sessions": counts})

    def _card(self) -> dict[str, Any]:
        about = {"object": "model", "created": 0, "owned_by": "rayrft"}
        return {"id": self._settings.model, **about, "max_model_len": self._settings.max_length}


def build_endpoint(model: str, settings: EndpointSettings, pool: str, keeper: str | None) -> PolicyEndpoint:
    """Build the API over a run's engine pool and its keeper, by their names; without a keeper, nothing is recorded."""

    def handle(name: str) -> Handle[Any]:
        return Handle(name.rpartition(":")[2], ray.get_actor(name, namespace=NAMESPACE))

    waits = Waits("endpoint", Trace(settings.trace, f"endpoint-{ray.get_runtime_context().get_worker_id()[:8]}"))
    responder = Responder(
        EngineClient(handle(pool), waits, 1 / settings.config.replicas, _PATIENCE_S),
        RemoteSessions(handle(keeper), _PATIENCE_S) if keeper is not None else None,
        ChatTokenizer(model, template=settings.template),
        settings,
    )
    return PolicyEndpoint(responder)
