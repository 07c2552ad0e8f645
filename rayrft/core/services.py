"""Services of a process that is not a run: the feedback page of a run, and rewards over HTTP."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayrft.config import load_run_config
from rayrft.config.serve import FeedbackConfig, RewardServiceConfig
from rayrft.core.cluster import connect
from rayrft.core.placement import BUFFER, NAMESPACE, Part, actor_name, check_room, reward_replicas, show_plan
from rayrft.core.preflight import read_keys
from rayrft.core.reward_checks import check_reward
from rayrft.core.shared_buffer import shared_actor_name
from rayrft.feedback.journal import feedback_folder
from rayrft.runtime.handle import Handle
from rayrft.runtime.serving import key_digest

if TYPE_CHECKING:
    from rayrft.runtime.serving.applications import Anchor


@dataclass(frozen=True)
class OpenService:
    """A service that is open until it is stopped, or the actor ``anchor`` ends, which ends with this process.

    In a notebook it is shown as a link. ``key_file`` holds the key that people enter, if one was made: it is neither
    printed nor part of the ``url``, since notebooks and logs are kept.
    """

    url: str
    anchor: Handle[Anchor]
    closing: contextlib.ExitStack
    key_file: Path | None = None

    def stop(self) -> None:
        """End the service. What people wrote on a feedback page stays in the run's folder."""
        self.closing.close()

    def _repr_html_(self) -> str:
        return f'<a href="{self.url}" target="_blank" rel="noopener">{self.url}</a>{self.key_hint}'

    @property
    def key_hint(self) -> str:
        """The place of the service's key, as the end of a sentence."""
        return f"; its key is in {self.key_file}" if self.key_file else ""


def serve_rewards(config: RewardServiceConfig, say: Callable[[str], None] = print) -> OpenService:
    """Serve rewards over HTTP. ``say`` receives the placement plan.

    Raises a RayrftError, before anything starts, if config or cluster are unsuitable.
    """
    for model in config.reward.models.values():
        for part in model.scored_by:
            check_reward(part, model)
    keys, http = read_keys(config.serve), config.serve
    connect()
    from rayrft.endpoint.rewards import build_reward_endpoint
    from rayrft.rewards.service import RewardService, rewards_open
    from rayrft.runtime.serving.applications import Owner, delete_applications
    from rayrft.runtime.serving.deploy import HttpApplication

    parts = [
        *reward_replicas(config.reward),
        Part("http", http.replicas, http.cpus, 0, 0.25, "on Ray Serve: HTTP", served=True),
    ]
    say(show_plan(config.name, parts))
    _prepare(parts)
    service = RewardService.of(config.name, config.reward, config.plugins)
    owner = Owner(NAMESPACE, actor_name(config.name, "rewards"))
    name, arguments = f"{config.name}:http", (config, keys, service)
    application = HttpApplication(name, config.name, http, owner, build_reward_endpoint, arguments)
    opened = rewards_open(service, config.reward, config.plugins, owner, (http.host, http.port), http=True)
    with contextlib.ExitStack() as closing:
        anchor = closing.enter_context(opened)
        closing.callback(delete_applications, name)
        return OpenService(f"{application.open()}/v1", anchor, closing.pop_all())


def serve_feedback(folder: Path, settings: FeedbackConfig) -> OpenService:
    """Serve the feedback page of the run in a folder, which is running or has ended.

    Raises ConfigError for keys that cannot be read, if the run has a page already, and as `HttpApplication.open`;
    PlacementError if there is no room.
    """
    folder = folder.absolute()
    config = load_run_config(folder)
    digests, key = read_keys(settings), secrets.token_urlsafe(24)
    key_file = None if digests else feedback_folder(folder) / "key"
    connect()
    from rayrft.feedback.app import build_page
    from rayrft.runtime.serving.applications import Owner, create_anchor, delete_applications
    from rayrft.runtime.serving.deploy import HttpApplication

    _prepare([Part("http", 1, settings.cpus, 0, 0.25, "on Ray Serve: HTTP", served=True)])
    shared = config.buffer.name
    buffer = shared_actor_name(shared) if shared is not None else actor_name(config.name, BUFFER.name)
    # Not one of the run's actors, which end with it: people continue with its log.
    owner = Owner(NAMESPACE, f"feedback/{config.name}")
    name = f"{config.name}:feedback"
    arguments = (config, folder, settings, digests or (key_digest(key),), NAMESPACE, buffer)
    application = HttpApplication(name, f"feedback/{config.name}", settings, owner, build_page, arguments)
    with contextlib.ExitStack() as closing:
        anchor = create_anchor(owner)
        closing.callback(anchor.kill)
        closing.callback(delete_applications, name)
        delete_applications(name)  # of an owner that was killed
        if key_file is not None:
            _write_key(key_file, key)
        return OpenService(f"{application.open()}/", anchor, closing.pop_all(), key_file)


def _prepare(parts: list[Part]) -> None:
    """Check that the cluster has room, and silence Serve's log of every request."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    check_room(parts)


def _write_key(path: Path, key: str) -> None:
    """Write a key to a file that only its owner can read, in the place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
