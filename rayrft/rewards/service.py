"""Rewards on Ray Serve: an application for each domain, which scales its replicas with the calls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ray import serve

from rayrft.config.reward import ReplicasConfig, RewardModelsConfig
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards.base import RewardResult, Transcript
from rayrft.rewards.scorer import Models, RewardActor, with_retries
from rayrft.runtime.actor_pool import with_retry
from rayrft.runtime.handle import Handle, Watched
from rayrft.runtime.serving import HttpSettings, applications

_DEPLOYMENT = "rewards"


@dataclass(frozen=True)
class RewardService:
    """The Serve applications that score, named by their owner and the version of the rewards.

    They never change: another config is another version, with other applications.
    """

    name: str
    version: str
    config: RewardModelsConfig
    plugins: list[Path]

    @classmethod
    def of(cls, name: str, config: RewardModelsConfig, plugins: list[Path]) -> RewardService:
        """Return the service of a config. Its version is a digest of names, options, parts and deadlines, of the files
        of a ``model`` that is a folder, and of the text of plugins. The weights of a model of the hub, which its
        ``revision`` names, and the imports of plugins are not in it."""
        decides = {"name", "options", "parts", "deadline_s"}
        models = {domain: model.model_dump(mode="json", include=decides) for domain, model in config.models.items()}
        parts = chain.from_iterable(model.scored_by for model in config.models.values())
        folders = (Path(str(part.options["model"])).expanduser() for part in parts if "model" in part.options)
        weights = [_digests(folder) for folder in folders if folder.is_dir()]
        digest = hashlib.blake2b(json.dumps([models, weights], sort_keys=True).encode(), digest_size=6)
        for plugin in plugins:
            digest.update(plugin.read_bytes())
        return cls(name, digest.hexdigest(), config, plugins)

    @property
    def all_versions(self) -> str:
        """Prefix of the names of the applications of any version."""
        return f"{self.name}:rewards-"

    def application(self, domain: str) -> str:
        """Return the name of a domain's application."""
        return f"{self.all_versions}{self.version}" + (f"-{quote(domain, safe='')}" if domain else "")


def _digests(folder: Path) -> list[tuple[str, str]]:
    """Return the names of a folder's files, with a digest of each."""
    stats = [(path, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(path.name, _digest(path, stat.st_size, stat.st_mtime_ns)) for path, stat in stats]


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Return a digest of a file, which is read again only if its size or time has changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


class RewardReplica(RewardActor):
    """A replica of a domain, with the processes of its rewards."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, and the replica is ready when it is done
        self,
        config: RewardModelsConfig,
        plugins: list[Path],
        owner: str,
        application: str,
        models: Models | None = None,
    ) -> None:
        super().__init__(config, plugins, models)
        await self.open()
        self._watching = asyncio.create_task(applications.delete_with(owner, application))


class ServeBackend:
    """Scores by the replicas of a `RewardService`."""

    def __init__(self, service: RewardService) -> None:
        self._service = service
        self._handles: dict[str, Any] = {}

    async def open(self) -> None:
        """Do nothing: the deployments run, and each is found when it is needed."""

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """See `rayrft.rewards.scorer.ScoringBackend`."""
        domain = self._service.config.domain_of(task.domain)
        if domain not in self._handles:
            application = self._service.application(domain)
            self._handles[domain] = await asyncio.to_thread(serve.get_deployment_handle, _DEPLOYMENT, application)

        async def call() -> list[RewardResult]:
            response = self._handles[domain].score.remote(task, transcripts)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise

        return with_retries(*await with_retry(call, "replica"))


@contextlib.contextmanager
def rewards_open(
    service: RewardService, owner: str, settings: HttpSettings, *, http: bool = False, models: Models | None = None
) -> Iterator[Handle[Watched]]:
    """Create an owner, deploy its applications by `deploy_rewards`, and delete them at the end of a ``with``."""
    anchor = applications.create_anchor(owner)
    try:
        applications.on_head(deploy_rewards, service, owner, settings, http, models)
        yield anchor
    finally:
        applications.delete_applications(service.all_versions)
        anchor.kill()


def deploy_rewards(
    service: RewardService, owner: str, settings: HttpSettings, http: bool = False, models: Models | None = None
) -> None:
    """Deploy the applications, which end with their owner; return when each has its least number of replicas. Call it
    by `on_head`.

    ``settings`` have the address of Serve, if it does not run yet; ``http``: see `start_serve`; judges may ask
    ``models``. Raises ConfigError where a reward cannot be built.
    """
    applications.start_serve(settings, http=http)
    # Applications of an owner that was killed may still exist.
    applications.delete_applications(service.all_versions)
    config, targets = service.config, []
    for domain, model in config.models.items():
        name = service.application(domain)
        one = RewardModelsConfig(domains={domain: model}) if domain else config
        replica = serve.deployment(RewardReplica).options(name=_DEPLOYMENT, **_options(model.replicas))
        bound = replica.bind(one, service.plugins, owner, name, models)
        targets.append(serve.RunTarget(bound, name=name, route_prefix=None))
    try:
        serve.run_many(targets)
    except RuntimeError:
        cause = _cause(service)
        applications.delete_applications(service.all_versions)
        remedy = "see the logs of Serve in the Ray dashboard"
        raise ConfigError(f"cannot be served: {cause}", remedy, field="reward") from None


def _cause(service: RewardService) -> str:
    """Return the last line of the traceback of a replica that failed to start."""
    running = serve.status().applications.items()
    of_service = [application for name, application in running if name.startswith(service.all_versions)]
    deployments = [each for application in of_service for each in application.deployments.values()]
    lines = [line.strip() for each in deployments for line in (each.message or "").splitlines()]
    return next(filter(None, reversed(lines)), "a replica does not start")


def _options(replicas: ReplicasConfig) -> dict[str, Any]:
    """Return Serve's options of a deployment."""
    bounds = {"min_replicas": replicas.min, "max_replicas": replicas.max, "target_ongoing_requests": replicas.pending}
    delays = {"metrics_interval_s": 1.0, "look_back_period_s": 5.0, "upscale_delay_s": 5.0, "downscale_delay_s": 60.0}
    return {
        "autoscaling_config": {**bounds, **delays},
        # A call that waits in a replica cannot move to a new one, so few do; a call that hangs must not block others.
        "max_ongoing_requests": 4 * replicas.pending,
        "max_constructor_retry_count": 2,
        "ray_actor_options": dict(num_cpus=replicas.cpus, num_gpus=replicas.gpus, memory=replicas.memory_gib * 2**30),
        **applications.WATCHED_CLOSELY,
    }
