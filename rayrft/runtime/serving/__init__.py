"""Ray Serve: applications and their owners, and what holds for every request over HTTP."""

from __future__ import annotations

import hashlib

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""


def key_digest(key: str) -> str:
    """Return the digest by which an API key is known."""
    return hashlib.sha256(key.encode()).hexdigest()
