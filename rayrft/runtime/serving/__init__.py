"""Ray Serve: applications and their owners, and what holds for every request over HTTP."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal, NamedTuple

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""

Proxy = Literal["ray", "haproxy"]

HAPROXY_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
"""Addresses at which Ray's HAProxy reaches replicas on its node: it asks them at the loopback address of IPv4."""


class Address(NamedTuple):
    """Where Ray Serve listens, and what accepts its connections: None for what does so already, or HAProxy."""

    host: str
    port: int
    proxy: Proxy | None = None


def key_digest(key: str) -> str:
    """Return the digest by which an API key is known."""
    return hashlib.sha256(key.encode()).hexdigest()


def write_key(path: Path, key: str) -> None:
    """Write a key to a file that only its owner can read, in the place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
