"""The endpoint in a replica of Ray Serve."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.app import PolicyEndpoint
from rayrft.endpoint.keeper import SessionKeeper
from rayrft.endpoint.responder import Responder
from rayrft.endpoint.settings import EndpointSettings
from rayrft.explorer.engines.client import EngineClient
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, root_cause
from rayrft.runtime.serving.applications import Owner
from rayrft.runtime.waits import Waits


class _RemoteSessions:
    """The sessions in the keeper's actor. Calls run outside of the request's context, or Ray would cancel them with the
    request, whose end the keeper must know; their errors are without Ray's wrappers."""

    def __init__(self, keeper: Handle[SessionKeeper]) -> None:
        self._keeper = keeper

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            try:
                return await Context().run(self._keeper.call, getattr(SessionKeeper, name), *args)
            except RayTaskError as error:
                raise error.cause from None
            except ray_api.ACTOR_ERRORS as error:
                raise root_cause(error, "keeper") from None

        return call


def build_endpoint(
    count: Callable[[str], None], model: str, settings: EndpointSettings, pool: Owner, keeper: str | None
) -> PolicyEndpoint:
    """Build the API over a run's engine pool and its keeper, an actor in the same namespace; without a keeper, nothing
    is recorded."""

    def handle(name: str) -> Handle[Any]:
        return Handle(name.rpartition(":")[2], ray.get_actor(name, namespace=pool.namespace))

    responder = Responder(
        EngineClient(handle(pool.name), Waits("endpoint"), 1 / settings.config.replicas),
        _RemoteSessions(handle(keeper)) if keeper is not None else None,
        ChatTokenizer(model, template=settings.template),
        settings,
    )
    return PolicyEndpoint(responder, count)
