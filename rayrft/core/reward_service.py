"""Rewards as a service, without a run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rayrft.config.serve import RewardServiceConfig
from rayrft.core.cluster import connect
from rayrft.core.placement import NAMESPACE, Part, actor_name, check_room, reward_replicas, show_plan
from rayrft.core.preflight import read_keys
from rayrft.core.reward_checks import check_reward
from rayrft.runtime.handle import Handle

if TYPE_CHECKING:
    from rayrft.runtime.serving.applications import Anchor


@contextlib.contextmanager
def serve_rewards(
    config: RewardServiceConfig, say: Callable[[str], None] = print
) -> Iterator[tuple[str, Handle[Anchor]]]:
    """Serve rewards inside a ``with``; gives their base URL, and the actor with which they end.

    ``say`` receives the placement plan. Raises a RayrftError, before anything starts, if config or cluster are
    unsuitable.
    """
    for model in config.reward.models.values():
        for part in model.scored_by:
            check_reward(part, model)
    keys = read_keys(config.serve)
    connect()
    from rayrft.endpoint.rewards import RewardFront, open_reward_front
    from rayrft.rewards.service import RewardService, rewards_open
    from rayrft.runtime.serving.applications import Owner, delete_applications

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    http = config.serve
    parts = [
        *reward_replicas(config.reward),
        Part("http", http.replicas, http.cpus, 0, 0.25, "on Ray Serve: HTTP", served=True),
    ]
    say(show_plan(config.name, parts))
    check_room(parts)
    service = RewardService.of(config.name, config.reward, config.plugins)
    owner = Owner(NAMESPACE, actor_name(config.name, "rewards"))
    front = RewardFront(config, keys, service, owner)
    with rewards_open(service, config.reward, config.plugins, owner, (http.host, http.port), http=True) as anchor:
        try:
            yield asyncio.run(open_reward_front(front)), anchor
        finally:
            delete_applications(front.application)
