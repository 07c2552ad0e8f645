"""The endpoint on Ray Serve: an application for each run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.app import PolicyEndpoint
from rayrft.endpoint.keeper import SessionKeeper
from rayrft.endpoint.responder import Responder
from rayrft.endpoint.settings import EndpointActors, EndpointSettings
from rayrft.explorer.engines.client import EngineClient
from rayrft.runtime.handle import Handle
from rayrft.runtime.serving.applications import Owner
from rayrft.runtime.serving.deploy import HttpApplication
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

        return call


def build_endpoint(
    count: Callable[[str], None], model: str, settings: EndpointSettings, actors: EndpointActors
) -> PolicyEndpoint:
    """Build the API over a run's actors."""

    def handle(name: str) -> Handle[Any]:
        return Handle(name.rpartition(":")[2], ray.get_actor(name, namespace=actors.namespace))

    responder = Responder(
        EngineClient(handle(actors.engine_pool), Waits("endpoint"), 1 / settings.config.replicas),
        _RemoteSessions(handle(actors.keeper)) if actors.keeper else None,
        ChatTokenizer(model, template=settings.template),
        settings,
    )
    return PolicyEndpoint(responder, count)


async def open_endpoint(
    app_name: str, route: str, model: str, settings: EndpointSettings, actors: EndpointActors
) -> str:
    """Deploy the endpoint as the application ``app_name``, which ends with the run's engine pool; return its base URL
    for clients once it answers. Raises ConfigError as `HttpApplication.open`."""
    owner = Owner(actors.namespace, actors.engine_pool)
    arguments = (model, settings, actors)
    application = HttpApplication(app_name, route, settings.config, owner, build_endpoint, arguments)
    return f"{await asyncio.to_thread(application.open)}/v1"
