"""Applications on Ray Serve: starting Serve, finding and deleting applications, and the owner with which they end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.config import ProxyLocation

from rayrft.errors import ConfigError
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, Watched, named_actor

P = ParamSpec("P")
R = TypeVar("R")

WATCHED_CLOSELY: dict[str, Any] = {
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_timeout_s": 2.0,
    "graceful_shutdown_wait_loop_s": 0.1,
}
"""Serve's options of a deployment: dead replicas are replaced at once, and replicas stop without waiting."""
_LOOK_S = 0.5
"""Seconds between looks at whether the name of a dead actor is free: Ray has no event for it."""


@dataclass(frozen=True)
class Owner:
    """The name of an actor with which applications end."""

    namespace: str
    name: str


def on_head(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function on the head node, where Serve listens, and block. Raises its errors without Ray's wrappers."""
    options = {"num_cpus": 0, "resources": {ray_api.HEAD_NODE_RESOURCE_NAME: 0.001}, "max_retries": 0}
    try:
        return cast(R, ray.get(ray.remote(function).options(**options).remote(*args, **kwargs)))
    except RayTaskError as error:
        raise error.cause from None


def start_serve(host: str, port: int, *, http: bool = True) -> None:
    """Start Ray Serve, unless it runs; call it on the head node.

    Serve has one address in a cluster. Without ``http`` the address is reserved for later applications, if it is free.
    Raises ConfigError if another program has the port, or if Serve is running at another address, or at none.
    """
    with contextlib.suppress(ValueError):  # Serve is not running
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        if http:
            running, location = ray.get([controller.get_http_config.remote(), controller.get_proxy_location.remote()])
            _check_running(running, location, host, port)
        return
    reason = _taken(host, port)
    if reason is not None and http:
        problem = f"the port cannot be used: {reason}"
        raise ConfigError(problem, "another program uses it: give another port", field="serve.port", value=port)
    location = ProxyLocation.HeadOnly if reason is None else ProxyLocation.Disabled
    serve.start(http_options={"host": host, "port": port}, proxy_location=location)


def applications(prefix: str = "") -> list[str]:
    """Return the names of the applications with this prefix; none if Serve is not running."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        return [name for name in serve.status().applications if name.startswith(prefix)]
    except (ValueError, RayActorError):
        return []


def delete_applications(prefix: str) -> None:
    """Delete the applications with this prefix, with their replicas."""
    for name in applications(prefix):
        with contextlib.suppress(Exception):  # Serve raises errors of any type if it or the application has ended
            serve.delete(name)


def create_anchor(owner: Owner) -> Handle[Watched]:
    """Create an owner for a process that is not an actor; it ends with it. Raises ConfigError for a taken name."""
    try:
        actor = ray.remote(Watched).options(num_cpus=0, name=owner.name, namespace=owner.namespace).remote()
    except ValueError:
        remedy, name = "choose another name (name=…), or end the other service", owner.name.partition(":")[0]
        raise ConfigError("is served on the cluster already", remedy, field="name", value=name) from None
    return Handle(owner.name, actor)


async def delete_with(owner: Owner, application: str) -> None:
    """Delete an application once no actor has its owner's name."""
    while (actor := await asyncio.to_thread(named_actor, owner.name, owner.namespace)) is not None:
        with contextlib.suppress(RayError):  # the owner has died, failed or cannot be reached
            await actor.call(Watched.watch)
        await asyncio.sleep(_LOOK_S)
    await asyncio.to_thread(serve.delete, application, _blocking=False)


def _check_running(running: serve.HTTPOptions, location: ProxyLocation, host: str, port: int) -> None:
    """Raise ConfigError unless Serve runs at this address."""
    if location == ProxyLocation.Disabled:
        problem = "Ray Serve is running without HTTP: its port was taken when a run's rewards started it"
        raise ConfigError(problem, "end that run, then run: serve shutdown", field="serve.port", value=port)
    for field, theirs, ours in (("host", running.host, host), ("port", running.port, port)):
        if theirs != ours:
            problem = f"Ray Serve is running on this cluster at {running.host}:{running.port}, and has one address"
            raise ConfigError(problem, "give that address, or run: serve shutdown", field=f"serve.{field}", value=ours)


def _taken(host: str, port: int) -> str | None:
    """Return why a server cannot use an address of this machine; None if it can."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
    except OSError as error:
        return error.strerror
    return None
