"""Ray Serve: applications and their owners, and what holds for every request over HTTP."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""

Proxy = Literal["ray", "haproxy"]

HAPROXY_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
"""Addresses at which Ray's HAProxy reaches replicas on its node: it asks them at the loopback address of IPv4."""


class HttpSettings(BaseModel, frozen=True):
    """Address and limits of an HTTP service."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    """Ray Serve has one HTTP port in a cluster, which all services share, each under ``/<its name>``."""
    proxy: Proxy | None = None
    """What accepts connections, once in a cluster: HAProxy leads them straight to the replicas, which answer more
    requests than behind Ray Serve's own proxy. Clients must repeat a request whose connection ends, as the official
    ones do. ``null`` takes what accepts connections already, or HAProxy where Ray installs it, at ``127.0.0.1``,
    ``localhost`` and ``0.0.0.0``."""
    replicas: int = Field(1, ge=1)
    """Processes that answer HTTP requests."""
    cpus: float = Field(0.1, ge=0)
    """CPUs of one replica."""
    max_requests: int = Field(1024, ge=1)
    """Open requests of a replica; further requests for an answer get status 429."""
    max_body_kib: int = Field(4096, ge=1)
    """Largest request body; a larger one gets status 413."""
    body_s: float = Field(60.0, gt=0)
    """Seconds in which the body of a request must arrive, after which it gets status 408."""
    deadline_s: float = Field(600.0, gt=0, allow_inf_nan=True)
    """Seconds that a request may take, after which it gets status 504."""


def key_digest(key: str) -> str:
    """Return the digest by which an API key is known."""
    return hashlib.sha256(key.encode()).hexdigest()


def write_key(path: Path, key: str) -> None:
    """Write a key to a file that only its owner can read, in the place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    path.write_text(key + "\n")
