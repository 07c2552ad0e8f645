"""WeightFollower: gives engines the weights that a run, which may be on another cluster, writes as files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rayrft.errors import ActorDied, StorageError, WeightSyncError
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, Watched, root_cause, until_failed
from rayrft.runtime.ray_api import ray
from rayrft.runtime.waits import unless
from rayrft.weights.files import Manifest, Ref, VersionFolder
from rayrft.weights.messages import Link

log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Seconds between looks for a new version: a folder or an object store has no event for it."""


class WeightFollower(Watched):
    """The actor. An engine that cannot load a version takes no requests until it has loaded one; the others do."""

    def __init__(
        self, address: str, keep_cache: bool, pool: Handle[EnginePool], engines: Sequence[Handle[RolloutEngine]]
    ) -> None:
        self._address, self._keep_cache, self._pool, self._engines = address, keep_cache, pool, [*engines]
        self._ref: Ref | None = None
        self._following: asyncio.Future[None] = asyncio.Future()

    async def start(self, workers: int) -> int:
        """Give the engines, of so many ``workers`` each, the newest version once there is one; follow later ones from
        then on. Return the version. Raises WeightSyncError or StorageError if it cannot be loaded."""
        self._folder = await asyncio.to_thread(VersionFolder, self._address)
        options, receivers = {"address": self._address}, workers * len(self._engines)
        link = Link("files", "", 0, 0, senders=0, receivers=receivers, timeout_s=0, secret="", options=options)
        connecting = (each.call(RolloutEngine.connect, link, at * workers) for at, each in enumerate(self._engines))
        await asyncio.gather(*connecting)
        while (version := await self._look()) is None:  # noqa: ASYNC110  (see `_LOOK_S`)
            await asyncio.sleep(_LOOK_S)
        self._following = asyncio.ensure_future(self._run())
        return version

    async def watch(self) -> None:
        """Raise ActorDied when all engines have died."""
        await asyncio.shield(self._following)

    async def _run(self) -> None:
        await unless(asyncio.gather(*map(self._until_lost, [*self._engines])), _all_died, self._follow())

    async def _until_lost(self, engine: Handle[RolloutEngine]) -> None:
        try:
            await until_failed(engine)
        except (*ray_api.ACTOR_ERRORS, ray.exceptions.RayTaskError) as error:
            self._engines.remove(engine)
            await self._pool.call(EnginePool.leave, engine, str(root_cause(error, engine.name)))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except (StorageError, WeightSyncError, FileNotFoundError) as error:  # the newest may just be removed
                log.warning("the weights cannot be read, and are looked at again: %s", error)

    async def _look(self) -> int | None:
        """Give the engines the newest version, unless they have it; return it, None if there is no newer one."""
        newest = await asyncio.to_thread(self._folder.newest)
        if newest is None or newest == self._ref:
            return None
        manifest = await asyncio.to_thread(self._folder.manifest, newest)
        if manifest.parcel.adapter is not None:
            remedy = "follow a run that trains without trainer.lora"
            raise WeightSyncError("the run sends an adapter alone", remedy, field=self._address)
        loaded = await asyncio.gather(*(self._load(each, newest[0], manifest) for each in [*self._engines]))
        if all(loaded):  # else those that could not try again
            self._ref = newest
        return manifest.parcel.version

    async def _load(self, engine: Handle[RolloutEngine], serial: int, manifest: Manifest) -> bool:
        version = manifest.parcel.version
        try:
            await engine.call(RolloutEngine.pause, self._keep_cache)
            held = await engine.call(RolloutEngine.receive, serial, version)
            if {*held.digests} != {manifest.digest}:
                problem = f"loaded weights of digests {held.digests} instead of {manifest.digest}"
                raise WeightSyncError(problem, "do not use its answers", field=engine.name)
        except (*ray_api.ACTOR_ERRORS, ray.exceptions.RayTaskError, WeightSyncError) as error:
            cause = root_cause(error, engine.name)
            if self._ref is None:
                raise cause from None
            await self._pool.call(EnginePool.leave, engine, str(cause))
            return False
        await self._pool.call(EnginePool.join, [Member(engine, version)])
        return True


def _all_died() -> ActorDied:
    return ActorDied("all engines died", "see their logs in the Ray dashboard, and start again", field="engines")
