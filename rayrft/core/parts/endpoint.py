"""The endpoint, with the keeper of its sessions."""

from __future__ import annotations

import asyncio
import contextlib

from rayrft.config import RunConfig
from rayrft.core.bundles import Bundles
from rayrft.core.parts.base import Part
from rayrft.core.parts.buffer import BufferPart
from rayrft.core.placement import actor_name
from rayrft.endpoint.keeper import SessionKeeper
from rayrft.endpoint.settings import EndpointSettings
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle

_CLOSE_S = 5.0


class KeeperPart(Part[SessionKeeper]):
    """The keeper of a run whose endpoint records sessions, and the endpoint of any run that has one."""

    name = "keeper"
    on_death = "restart"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        return [Bundles(cls.name, 1, 0.05, 0, 0.3, "sessions of the endpoint")] if config.records_sessions else []

    def create(self) -> list[Handle[SessionKeeper]]:
        config, run = self.config, self.run
        assert config.endpoint is not None  # it records sessions
        stages = [stage for stage in config.stages if stage.groups]
        [size] = {stage.group_size for stage in stages}
        equal_teach = any(not stage.algorithm.build().zero_advantage_is_noop for stage in stages)
        keeper = run.placement.actor(SessionKeeper, self.name, name=self.name, restarts=-1)(
            config.endpoint,
            config.name,
            size,
            run[BufferPart].actor,
            config.folder / "open_rows",
            drop_equal=config.explorer.drop_zero_variance and not equal_teach,
            mask_truncated=config.reward.truncated == "mask",
        )
        return [self.track(keeper)]

    async def start(self) -> None:
        for keeper in self.actors:
            await keeper.call(SessionKeeper.start)

    async def restarted(self, actor: Handle[SessionKeeper]) -> None:
        """Start the keeper again. The sessions that were open are lost, and counted: their next call begins another."""
        await actor.call(SessionKeeper.start)

    async def open(self) -> str | None:
        """Open the endpoint, if the run has one; return its URL."""
        config, prepared = self.config, self.run.prepared
        if config.endpoint is None:
            return None
        from rayrft.endpoint.app import build_endpoint
        from rayrft.runtime.serving.applications import HttpApplication, applications

        name = actor_name(config.name, "serve")
        if self.run.taken_over and (await asyncio.to_thread(applications, name)) != []:
            return None
        settings = EndpointSettings.of(config, prepared.key_digests, config.trace_folder)
        pool = actor_name(config.name, "engine_pool")
        keeper = actor_name(config.name, self.name) if self.actors else None
        arguments = (prepared.model, settings, pool, keeper)
        application = HttpApplication(name, config.name, config.endpoint, pool, build_endpoint, arguments)
        return f"endpoint at {await asyncio.to_thread(application.open)}/v1"

    async def close(self) -> None:
        """Take no more requests, and let the Buffer count the rows that were not trained, if it is able to."""
        if self.config.endpoint is None:
            return
        from rayrft.runtime.serving.applications import delete_applications

        await asyncio.to_thread(delete_applications, actor_name(self.config.name, "serve"))
        for keeper in self.actors:
            with contextlib.suppress(*ray_api.ACTOR_ERRORS, TimeoutError):
                await asyncio.wait_for(keeper.call(SessionKeeper.close), _CLOSE_S)
