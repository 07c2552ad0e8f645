"""The endpoint on Ray Serve: an application of its own for each run, which ends with the run."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable
from contextvars import Context
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayTaskError
from ray.util.metrics import Counter

from rayrft.config.serve import HttpConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.app import Endpoint
from rayrft.endpoint.keeper import SessionKeeper
from rayrft.endpoint.responder import Responder
from rayrft.endpoint.settings import EndpointActors, EndpointSettings
from rayrft.errors import ConfigError
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.pool import EnginePool
from rayrft.runtime.handle import Handle
from rayrft.runtime.serving.applications import (
    WATCHED_CLOSELY,
    Owner,
    delete_applications,
    delete_with,
    on_head,
    start_serve,
)
from rayrft.runtime.waits import Waits

_ANSWER_S = 30.0
"""Seconds in which the endpoint must answer once it is deployed."""


class _Keeper:
    """The sessions, in the keeper's actor. Its calls are in no request's context, or Ray would cancel them with the
    request, of which the keeper must know the end; their errors are without Ray's wrappers."""

    def __init__(self, keeper: Handle[SessionKeeper]) -> None:
        self._keeper = keeper

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            try:
                return await Context().run(self._keeper.call, getattr(SessionKeeper, name), *args)
            except RayTaskError as error:
                raise error.cause from None

        return call


class EndpointReplica:
    """One process that answers requests. The application ``app_name`` is deleted when the run's engine pool has died,
    for then nobody else may be left to do so."""

    def __init__(self, app_name: str, model: str, settings: EndpointSettings, actors: EndpointActors) -> None:
        def handle(name: str) -> Handle[Any]:
            return Handle(name.rpartition(":")[2], ray.get_actor(name, namespace=actors.namespace))

        pool: Handle[EnginePool] = handle(actors.engine_pool)
        responder = Responder(
            EngineClient(pool, Waits("endpoint"), 1 / settings.config.replicas),
            _Keeper(handle(actors.keeper)) if actors.keeper else None,
            ChatTokenizer(model, template=settings.template),
            settings,
        )
        self._endpoint = Endpoint(responder, request_counter(app_name))
        self._watching = asyncio.create_task(delete_with(Owner(actors.namespace, actors.engine_pool), app_name))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._endpoint.app()


async def open_endpoint(
    app_name: str, route: str, model: str, settings: EndpointSettings, actors: EndpointActors
) -> str:
    """Deploy the endpoint as the application ``app_name``; return its base URL, for clients, once it answers.

    It listens on the cluster's head node. Raises ConfigError if the port is in use there by another program, or if Ray
    Serve has another port on this cluster.
    """
    return await asyncio.to_thread(on_head, _open, app_name, route, model, settings, actors)


def _open(app_name: str, route: str, model: str, settings: EndpointSettings, actors: EndpointActors) -> str:
    config = settings.config
    start_serve(config.host, config.port)
    return deploy(EndpointReplica, (app_name, model, settings, actors), config, app_name, route)


def deploy(replica: type, arguments: tuple[Any, ...], config: HttpConfig, app_name: str, route: str) -> str:
    """Deploy an application whose replicas answer HTTP requests at ``/<route>``; return its base URL, for clients, once
    it answers. Raises ConfigError if it does not."""
    deployment = serve.deployment(serve.ingress()(replica)).options(
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": config.cpus},
        # Requests above the service's own bound must reach it, to be answered with status 429.
        max_ongoing_requests=100 * config.max_requests,
        **WATCHED_CLOSELY,
    )
    serve.run(deployment.bind(*arguments), name=app_name, route_prefix=f"/{route}")
    reached_at = {"0.0.0.0": ray.util.get_node_ip_address(), "::": "[::1]", "::1": "[::1]"}
    reached = reached_at.get(config.host, config.host)
    url = f"http://{reached}:{config.port}/{route}"
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows this machine
        direct.open(f"{url}/health", timeout=_ANSWER_S).close()
    except (urllib.error.URLError, TimeoutError) as error:
        delete_applications(app_name)
        raise ConfigError(
            f"the endpoint does not answer at {url}: {error}",
            "Ray Serve has one port in a cluster: give that of the run which started it, or shut Serve down",
            field="serve.port",
            value=config.port,
        ) from None
    return f"{url}/v1"


def request_counter(app_name: str) -> Callable[[str], None]:
    """Return what counts an application's requests in Ray's metrics, by how they ended."""
    counter = Counter("rayrft_endpoint_requests", "Requests by how they ended", tag_keys=("app", "outcome"))
    return lambda outcome: counter.inc(tags={"app": app_name, "outcome": outcome})
