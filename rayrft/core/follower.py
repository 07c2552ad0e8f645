"""WeightFollower: gives engines the weights that a run, which may be on another cluster, writes as files."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rayrft.config.placement import RestartsConfig
from rayrft.core.engine_groups import EngineGroup
from rayrft.core.restarts import Budget
from rayrft.errors import StorageError, WeightSyncError
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, Watched, fence, root_cause, until_failed
from rayrft.runtime.ray_api import ray
from rayrft.weights.files import Manifest, Ref, VersionFolder
from rayrft.weights.messages import Link

log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Seconds between looks for a new version: a folder or an object store has no event for it."""


class WeightFollower(Watched):
    """The actor. An engine that cannot load a version takes no requests until it has loaded one; the others do. Those
    that die are replaced, and load the newest version."""

    def __init__(self, address: str, keep_cache: bool, group: EngineGroup, restarts: RestartsConfig) -> None:
        self._address, self._keep_cache, self._group = address, keep_cache, group
        self._budget = Budget(restarts)
        self._loaded: dict[str, Ref | None] = {}
        """What the engines that are up have loaded, by name."""
        self._serves = False
        self._following: asyncio.Future[Any] = asyncio.Future()

    async def start(self, workers: int) -> int:
        """Give the engines, of so many ``workers`` each, the newest version once there is one; follow later ones from
        then on. Return the version. Raises WeightSyncError or StorageError if it cannot be loaded."""
        self._folder, self._workers = await asyncio.to_thread(VersionFolder, self._address), workers
        await asyncio.gather(*map(self._connect, self._group.engines))
        while (version := await self._look()) is None:  # noqa: ASYNC110  (see `_LOOK_S`)
            await asyncio.sleep(_LOOK_S)
        self._serves = True
        self._following = asyncio.gather(self._follow(), *map(self._keep, self._group.engines))
        return version

    async def watch(self) -> None:
        """Raise the cause of the first death once engines have died too often."""
        await asyncio.shield(self._following)

    async def _connect(self, engine: Handle[RolloutEngine]) -> None:
        first, receivers = self._workers * self._group.engines.index(engine), self._workers * len(self._group.engines)
        options = {"address": self._address}
        link = Link("files", "", 0, 0, senders=0, receivers=receivers, timeout_s=0, secret="", options=options)
        await engine.call(RolloutEngine.connect, link, first)
        self._loaded[engine.name] = None

    async def _keep(self, engine: Handle[RolloutEngine]) -> None:
        """Replace an engine whenever it has died."""
        while True:
            try:
                if engine.name not in self._loaded:
                    await fence(engine)
                    await self._group.replace(engine)
                    await self._connect(engine)
                await until_failed(engine)
            except (*ray_api.ACTOR_ERRORS, ray.exceptions.RayTaskError) as error:
                cause = root_cause(error, engine.name)
            self._loaded.pop(engine.name, None)
            await self._group.lose(engine, str(cause))
            await asyncio.sleep(self._budget.spend(cause))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except (StorageError, WeightSyncError, FileNotFoundError) as error:  # the newest may just be removed
                log.warning("the weights cannot be read, and are looked at again: %s", error)

    async def _look(self) -> int | None:
        """Give the newest version to the engines that do not have it; return it, None if there are no such engines."""
        newest = await asyncio.to_thread(self._folder.newest)
        behind = [each for each in self._group.engines if self._loaded.get(each.name, newest) != newest]
        if newest is None or not behind:
            return None
        manifest = await asyncio.to_thread(self._folder.manifest, newest)
        if manifest.parcel.adapter is not None:
            remedy = "follow a run that trains without trainer.lora"
            raise WeightSyncError("the run sends an adapter alone", remedy, field=self._address)
        await asyncio.gather(*(self._load(each, newest, manifest) for each in behind))
        return manifest.parcel.version

    async def _load(self, engine: Handle[RolloutEngine], newest: Ref, manifest: Manifest) -> None:
        version, pool = manifest.parcel.version, self._group.pool
        try:
            await engine.call(RolloutEngine.pause, self._keep_cache)
            held = await engine.call(RolloutEngine.receive, newest[0], version)
            if {*held.digests} != {manifest.digest}:
                problem = f"loaded weights of digests {held.digests} instead of {manifest.digest}"
                raise WeightSyncError(problem, "do not use its answers", field=engine.name)
        except (*ray_api.ACTOR_ERRORS, ray.exceptions.RayTaskError, WeightSyncError) as error:
            cause = root_cause(error, engine.name)
            if not self._serves:
                raise cause from None
            await pool.call(EnginePool.leave, engine, str(cause))
            return
        self._loaded[engine.name] = newest
        await pool.call(EnginePool.join, [Member(engine, version)])
