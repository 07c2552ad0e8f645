"""The endpoint, with the keeper of its sessions."""

from __future__ import annotations

import asyncio
import contextlib

from rayrft.config import RunConfig
from rayrft.core.parts.base import Part
from rayrft.core.parts.buffer import BufferPart
from rayrft.core.placement import NAMESPACE, Bundles, actor_name
from rayrft.endpoint.keeper import SessionKeeper
from rayrft.endpoint.settings import EndpointActors, EndpointSettings
from rayrft.runtime.handle import Handle

_CLOSE_S = 5.0


class KeeperPart(Part[SessionKeeper]):
    """The keeper of a run whose endpoint records sessions, and the endpoint of any run that has one."""

    name = "keeper"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        return [Bundles(cls.name, 1, 0.05, 0, 0.3, "sessions of the endpoint")] if config.records_sessions else []

    def create(self) -> list[Handle[SessionKeeper]]:
        config, run = self.config, self.run
        assert config.endpoint is not None  # it records sessions
        [size] = {stage.group_size for stage in config.stages if stage.groups}
        keeper = run.placement.actor(SessionKeeper, self.name, name=self.name).create(
            config.endpoint,
            config.name,
            size,
            run[BufferPart].actor,
            drop_equal=run.prepared.drop_equal,
            mask_truncated=config.reward.truncated == "mask",
        )
        return [self.track(keeper)]

    async def start(self) -> None:
        for keeper in self.actors:
            await keeper.call(SessionKeeper.start)

    async def open(self) -> str | None:
        """Open the endpoint, if the run has one; return its URL."""
        config, model, prepared = self.config, self.config.model, self.run.prepared
        if config.endpoint is None:
            return None
        from rayrft.endpoint import deployment

        sampling, served = config.explorer.sampling, config.endpoint.model_name or config.name
        pool, keeper = (actor_name(config.name, part) for part in ("engine_pool", self.name))
        url = await deployment.open_endpoint(
            actor_name(config.name, "serve"),
            config.name,
            prepared.model,
            EndpointSettings(config.endpoint, served, model.max_length, sampling, prepared.key_digests, model.template),
            EndpointActors(NAMESPACE, pool, keeper if self.actors else None),
        )
        return f"endpoint at {url}"

    async def close(self) -> None:
        """Take no more requests, and let the Buffer count the rows that were not trained, if it is able to."""
        from ray.exceptions import RayActorError

        if self.config.endpoint is None:
            return
        from rayrft.runtime.serving.applications import delete_applications

        await asyncio.to_thread(delete_applications, actor_name(self.config.name, "serve"))
        for keeper in self.actors:
            with contextlib.suppress(RayActorError, TimeoutError):
                await asyncio.wait_for(keeper.call(SessionKeeper.close), _CLOSE_S)
