"""Deployment of a service over HTTP on Ray Serve: an application that ends with its owner."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.util.metrics import Counter

from rayrft.errors import ConfigError
from rayrft.runtime.serving.applications import (
    WATCHED_CLOSELY,
    Owner,
    delete_applications,
    delete_with,
    on_head,
    start_serve,
)
from rayrft.runtime.serving.http import HttpService, HttpSettings

_ANSWER_S = 30.0
"""Seconds in which an application must answer once it is deployed."""


@dataclass(frozen=True)
class HttpApplication:
    """A service over HTTP at ``/<route>``; ``build(count, *arguments)`` builds each replica, in its event loop. The
    application is deleted when its owner has died, since nobody else may be left to do so."""

    name: str
    route: str
    config: HttpSettings
    owner: Owner
    build: Callable[..., HttpService]
    arguments: tuple[Any, ...]

    def open(self) -> str:
        """Deploy it on the cluster's head node; block until it answers, and return its base URL. Raises ConfigError if
        it does not answer, if another program uses the port, or if Ray Serve has another address on this cluster."""
        return on_head(_open, self)


class HttpReplica:
    """A process that answers requests."""

    def __init__(self, application: HttpApplication) -> None:
        name = application.name
        counter = Counter("rayrft_endpoint_requests", "Requests by how they ended", tag_keys=("app", "outcome"))

        def count(outcome: str) -> None:
            counter.inc(tags={"app": name, "outcome": outcome})

        self._service = application.build(count, *application.arguments)
        self._watching = asyncio.create_task(delete_with(application.owner, name))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._service.app()


def _open(application: HttpApplication) -> str:
    config, name, route = application.config, application.name, application.route
    start_serve(config.host, config.port)
    deployment = serve.deployment(serve.ingress()(HttpReplica)).options(
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": config.cpus},
        # Requests above the service's own bound must reach it, to be answered with status 429.
        max_ongoing_requests=100 * config.max_requests,
        **WATCHED_CLOSELY,
    )
    serve.run(deployment.bind(application), name=name, route_prefix=f"/{route}")
    reached_at = {"0.0.0.0": ray.util.get_node_ip_address(), "::": "[::1]", "::1": "[::1]"}
    url = f"http://{reached_at.get(config.host, config.host)}:{config.port}/{route}"
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows this machine
        direct.open(f"{url}/health", timeout=_ANSWER_S).close()
    except (urllib.error.URLError, TimeoutError) as error:
        delete_applications(name)
        problem = f"the application does not answer at {url}: {error}"
        remedy = "give the port of the run that started Ray Serve, which has one port, or run: serve shutdown"
        raise ConfigError(problem, remedy, field="serve.port", value=config.port) from None
    return url
