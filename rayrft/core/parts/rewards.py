"""Rewards outside the Explorers: in actors, which Ray restarts when they die, or on Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rayrft.config import RunConfig
from rayrft.config.reward import RewardModelsConfig
from rayrft.core.bundles import Bundles
from rayrft.core.parts.base import Part, has_explorers
from rayrft.core.parts.engines import AuxiliaryEngines
from rayrft.core.placement import Placement, actor_name
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.explorer.engines.pool import EnginePool
from rayrft.rewards import where
from rayrft.rewards.scorer import ActorBackend, Models, RewardActor, ScoringBackend
from rayrft.runtime.handle import Handle
from rayrft.runtime.serving import HttpSettings

if TYPE_CHECKING:
    from rayrft.rewards.service import RewardService


class RewardsPart(Part[RewardActor]):
    """The rewards of a run, unless its Explorers score."""

    name = "reward"
    on_death = "restart"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        if not has_explorers(config) or config.reward.placement == "beside":
            return []
        if config.reward.placement == "serve":
            return reward_replicas(config.reward)
        scored_by = {part.name for model in config.reward.models.values() for part in model.scored_by}
        count = config.explorer.count * config.reward.actors
        return [Bundles(cls.name, count, 0.1, 0, 0.25, ", ".join(sorted(scored_by)))]

    def create(self) -> list[Handle[RewardActor]]:
        actors = reward_actors(self.config, self.run.placement, self.run[AuxiliaryEngines].pools)
        return [self.track(actor) for actor in actors]

    async def restarted(self, actor: Handle[RewardActor]) -> None:
        if not self.config.reward.stages:  # else it starts when it is needed
            await actor.call(RewardActor.open)

    async def deploy(self) -> None:
        """Deploy the rewards that are on Ray Serve. The start of the Explorers, which need them, begins with it."""
        config = self.config
        if (service := reward_service(config)) is None:
            return
        from rayrft.rewards.service import deploy_rewards
        from rayrft.runtime.serving.applications import applications, on_head

        if self.run.taken_over and (await asyncio.to_thread(applications, service.all_versions)) != []:
            return
        owner = actor_name(config.name, "master")
        http = config.endpoint or HttpSettings()
        serves, models = config.endpoint is not None, remote_models(config, self.run[AuxiliaryEngines].pools)
        with self.run.waits.on("rewards", "deployed"):
            await asyncio.to_thread(on_head, deploy_rewards, service, owner, http, serves, models)

    async def close(self) -> None:
        if (service := reward_service(self.config)) is not None:
            from rayrft.runtime.serving.applications import delete_applications

            await asyncio.to_thread(delete_applications, service.all_versions)


def reward_replicas(config: RewardModelsConfig) -> list[Bundles]:
    """Return the replicas of rewards on Ray Serve, by domain."""
    replicas = []
    for domain, model in config.models.items():
        count, scored_by = model.replicas, ", ".join(sorted(part.name for part in model.scored_by))
        processes = sum(model.workers * (where(part.name) == "process") for part in model.scored_by)
        note = f"on Ray Serve, {count.min} to {count.max}: {scored_by}"
        note += f", {processes} processes each" if processes else ""
        name = f"reward-{domain}" if domain else "reward"
        replicas.append(Bundles(name, count.max, count.cpus, count.gpus, count.memory_gib, note, served=True))
    return replicas


def reward_service(config: RunConfig) -> RewardService | None:
    """Return the applications on Ray Serve that score for the run, if it has them."""
    if config.reward.placement != "serve" or not has_explorers(config):
        return None
    from rayrft.rewards.service import RewardService

    name = f"{config.name}-bench" if config.mode == "bench" else config.name  # both may be on one cluster
    return RewardService.of(name, config.scoring, config.plugins)


def remote_models(config: RunConfig, pools: Mapping[str, Handle[EnginePool]]) -> Models | None:
    """Return a factory of the auxiliary models for remote scorers; None if there are no auxiliary models."""
    scorers = {
        "beside": config.explorer.count,
        "pool": config.explorer.count * config.reward.actors,
        "serve": sum(model.replicas.max for model in config.reward.models.values()),
    }[config.reward.placement]
    return partial(auxiliary_models, config.auxiliary, dict(pools), share=1 / scorers) if pools else None


def reward_actors(
    config: RunConfig, placement: Placement, pools: Mapping[str, Handle[EnginePool]]
) -> list[Handle[RewardActor]]:
    """Create the reward actors, if the run has them, which may ask these auxiliary models. They start when they are
    needed: a stage may train what scores."""
    if config.reward.placement != "pool":
        return []
    models, name = remote_models(config, pools), RewardsPart.name
    count = placement.count(name)
    placed = [placement.actor(RewardActor, name, name=f"{name}-{i}", bundle=i, restarts=-1) for i in range(count)]
    return [create(config.scoring, config.plugins, models) for create in placed]


def remote_scoring(config: RunConfig, actors: Sequence[Handle[RewardActor]]) -> Callable[[], ScoringBackend] | None:
    """Return a factory of an Explorer's remote scorers, by these actors if there are any; None if it scores."""
    if actors:
        return partial(ActorBackend, actors)
    if (service := reward_service(config)) is None:
        return None
    from rayrft.rewards.service import ServeBackend

    return partial(ServeBackend, service)
