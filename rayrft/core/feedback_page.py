"""The feedback page of a run under way, or of one that ended."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayrft.config import load_run_config
from rayrft.config.serve import FeedbackConfig
from rayrft.core.cluster import connect
from rayrft.core.placement import BUFFER, NAMESPACE, Part, actor_name, check_room
from rayrft.core.preflight import read_keys
from rayrft.core.shared_buffer import shared_actor_name
from rayrft.endpoint.protocol import key_digest
from rayrft.feedback.journal import feedback_folder
from rayrft.runtime.handle import Handle

if TYPE_CHECKING:
    from rayrft.runtime.serving.applications import Anchor


@dataclass(frozen=True)
class OpenPage:
    """A feedback page that is served. In a notebook it is shown as a link.

    ``key_file`` holds the key that people enter, if one was made: it is neither printed nor part of the ``url``, since
    notebooks and logs are kept. The page ends with the actor ``anchor``, which ends with this process.
    """

    url: str
    anchor: Handle[Anchor]
    application: str
    key_file: Path | None

    def stop(self) -> None:
        """End the page. What people said stays in the run's folder."""
        from rayrft.runtime.serving.applications import delete_applications

        delete_applications(self.application)
        self.anchor.kill()

    def _repr_html_(self) -> str:
        return f'<a href="{self.url}" target="_blank" rel="noopener">{self.url}</a>{self.key_hint}'

    @property
    def key_hint(self) -> str:
        """Where the page's key is, as the end of a sentence."""
        return f"; its key is in {self.key_file}" if self.key_file else ""


def open_page(folder: Path, settings: FeedbackConfig) -> OpenPage:
    """Serve the page of the run in a folder, until it is stopped.

    Raises ConfigError for keys that cannot be read, if the run has a page already, and as `start_serve`; PlacementError
    if there is no room.
    """
    folder = folder.absolute()
    config = load_run_config(folder)
    digests, key = read_keys(settings), secrets.token_urlsafe(24)
    key_file = None if digests else feedback_folder(folder) / "key"
    connect()
    from rayrft.feedback.deployment import FeedbackFront, open_feedback
    from rayrft.runtime.serving.applications import Owner, create_anchor, delete_applications

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    check_room([Part("http", 1, settings.cpus, 0, 0.25, "on Ray Serve: HTTP", served=True)])
    shared = config.buffer.name
    buffer = shared_actor_name(shared) if shared is not None else actor_name(config.name, BUFFER.name)
    # Not one of the run's actors, which end with it: people go on with its log.
    owner = Owner(NAMESPACE, f"feedback/{config.name}")
    front = FeedbackFront(config, folder, settings, digests or (key_digest(key),), buffer, owner)
    anchor = create_anchor(owner)
    try:
        delete_applications(front.application)  # of an owner that was killed
        if key_file is not None:
            _write_key(key_file, key)
        url = open_feedback(front)
    except BaseException:
        anchor.kill()
        raise
    return OpenPage(url, anchor, front.application, key_file)


def _write_key(path: Path, key: str) -> None:
    """Write a key to a file that only its owner can read, in the place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
