"""Services of a process that is not a run: a feedback page, rewards over HTTP, a policy that is trained elsewhere, and
engines of pipelines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayrft.config import FolderConfig, PipelineConfig, RunConfig, load_config, load_run_config
from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.serve import FeedbackConfig, HttpConfig, RewardServiceConfig, ServeConfig, ViewerConfig, read_keys
from rayrft.core import engine_groups
from rayrft.core.bundles import Bundles, check_room
from rayrft.core.cluster import connect
from rayrft.core.doctor import check_gpus, doctor
from rayrft.core.follower import WeightFollower
from rayrft.core.parts.buffer import BUFFER
from rayrft.core.parts.rewards import reward_replicas
from rayrft.core.placement import Placement, actor_name, show_plan
from rayrft.core.plan import check_memory, plan
from rayrft.core.shared_buffer import shared_actor_name
from rayrft.data.models import check_cache, check_length, find_model
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.settings import EndpointSettings
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.engines.arguments import check_options
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.feedback.journal import feedback_folder
from rayrft.pipelines import Context
from rayrft.pipelines.run.models import AskedModel, OpenModels, RunEngines, open_models
from rayrft.pipelines.tasks import load_processed
from rayrft.rewards.checks import check_reward
from rayrft.runtime.handle import Handle, Watched, answer, end
from rayrft.runtime.serving import key_digest, write_key
from rayrft.runtime.serving.http import HttpService

_START_S = 1800.0
"""Seconds in which engines of pipelines load their models."""


@dataclass(frozen=True)
class OpenService:
    """A service that is open until it is stopped, or the actor ``anchor`` ends, which ends with this process.

    In a notebook it is shown as a link. ``key_file`` holds the key that people enter, if one was made: it is neither
    printed nor part of the ``url``, since notebooks and logs are kept.
    """

    url: str
    anchor: Handle[Watched]
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
    """Serve rewards over HTTP. ``say`` receives the placement plan. Raises a RayrftError, before anything starts, if
    config or cluster are unsuitable."""
    for model in config.reward.models.values():
        for part in model.scored_by:
            check_reward(part, model)
    keys, http = read_keys(config.serve), config.serve
    connect()
    from rayrft.endpoint.rewards import build_reward_endpoint
    from rayrft.rewards.service import RewardService, rewards_open
    from rayrft.runtime.serving.applications import HttpApplication, delete_applications

    plan = [*reward_replicas(config.reward), _http_bundles(http)]
    say(show_plan(config.name, plan))
    _prepare(plan, config.placement.wait_s, say)
    service = RewardService.of(config.name, config.reward, config.plugins)
    owner = actor_name(config.name, "rewards")
    name, arguments = f"{config.name}:http", (config, keys, service)
    application = HttpApplication(name, config.name, http, owner, build_reward_endpoint, arguments)
    with contextlib.ExitStack() as closing:
        anchor = closing.enter_context(rewards_open(service, owner, http, http=True))
        closing.callback(delete_applications, name)
        return OpenService(f"{application.open()}/v1", anchor, closing.pop_all())


def serve_weights(config: RunConfig, say: Callable[[str], None] = print) -> OpenService:
    """Serve the policy of a run that trains on this or another cluster, with the weights that it writes as files; its
    ``config`` gives model, engines, endpoint and the address. Nothing is recorded. ``say`` receives the placement plan.

    Raises a RayrftError if config or cluster are unsuitable, or no version can be loaded within ``monitor.stall_s``.
    """
    if config.weight_sync.backend != "files" or config.trainer.lora is not None:
        remedy = "follow a run with weight_sync.backend: files, and without trainer.lora"
        problem = "must be files, with whole weights"
        raise ConfigError(problem, remedy, field="weight_sync.backend", value=config.weight_sync.backend)
    check_options(config.explorer.engine, "explorer.engine", bounds=None)
    config = config.model_copy(update={"serve": config.serve or ServeConfig()})
    assert config.endpoint is not None
    http, model, engine, name = config.endpoint, config.model, config.explorer.engine, f"{config.name}-follower"
    path = str(config.folder / "model") if model.tiny is not None else find_model(str(model.path), "model.path")
    ChatTokenizer(path, template=model.template)  # raises if there is none, before anything starts
    keys = read_keys(http)
    connect()
    from rayrft.endpoint.app import build_endpoint
    from rayrft.runtime.serving.applications import HttpApplication, delete_applications

    plan = [
        engine_groups.engine_bundles("engines", engine.count, engine, "vLLM rollout engines, weights as files"),
        engine_groups.pool_bundles(2),
        _http_bundles(http),
    ]
    stall_s = config.monitor.stall_s
    say(show_plan(name, plan))
    gpu_gb = _prepare(plan, config.placement.wait_s, say)
    check_memory(config.model_copy(update={"mode": "explore"}), gpu_gb)  # its engines share no GPU with ranks
    placement = Placement(name, plan)
    with contextlib.ExitStack() as closing:
        closing.callback(placement.remove)
        placement.reserve([each.name for each in plan if not each.served], config.placement.wait_s, say)
        group = engine_groups.EngineGroup(placement, engine_groups.policy_model(config, path), replaced=True)
        closing.callback(lambda: end(group.actors))
        engine_groups.serve_engines([group], stall_s)
        address, keep = config.transport_options["address"], config.weight_sync.kv_cache == "keep"
        create = placement.actor(WeightFollower, "engine_pool", name="follower")
        follower = create(address, keep, group, config.restarts)
        closing.callback(follower.kill)
        say(f"waits for weights at {address}")
        version = answer(follower.call(WeightFollower.start, engine.tensor_parallel), "follower", stall_s)
        say(f"serves version {version}, and follows")
        settings = EndpointSettings.of(config, keys)
        owner, served = actor_name(name, "follower"), actor_name(name, "serve")
        arguments = path, settings, actor_name(name, "engine_pool"), None
        application = HttpApplication(served, config.name, http, owner, build_endpoint, arguments)
        closing.callback(delete_applications, served)
        return OpenService(f"{application.open()}/v1", follower, closing.pop_all())


def serve_feedback(folder: Path, settings: FeedbackConfig) -> OpenService:
    """Serve the feedback page of the run in a folder, which is running or has ended. Raises ConfigError for keys that
    cannot be read, if the run has a page already, and as `HttpApplication.open`; PlacementError without room."""
    folder = folder.absolute()
    config = load_run_config(folder)
    from rayrft.feedback.app import build_page

    # Not one of the run's actors, which end with it: people continue with its log.
    name, route, key_file = f"{config.name}:feedback", f"feedback/{config.name}", feedback_folder(folder) / "key"
    build = partial(build_page, config, folder, settings)
    return _open_page(name, route, settings, build, (_buffer_of(config),), key_file)


REPORTS: dict[str, Callable[[RunConfig], Sequence[Any]]] = {"plan": plan, "doctor": doctor}
"""What the viewer tells of a config before a run."""


def deploy_viewer(storage: Path, settings: ViewerConfig) -> OpenService:
    """Serve the viewer on Ray Serve, over run folders that the cluster's head node can read. Raises ConfigError as
    `serve_feedback`, and if there is no such folder; PlacementError without room."""
    from rayrft.viewer.app import Viewer, check_storage_folder
    from rayrft.viewer.index import cache_folder

    check_storage_folder(storage)
    build, key_file = partial(Viewer, storage.absolute(), settings), cache_folder() / "key-cluster"
    return _open_page("viewer", "viewer", settings, build, (_buffer_of, REPORTS), key_file)


def _buffer_of(config: FolderConfig) -> str:
    """Return the name of the actor of a run's Buffer."""
    shared = config.buffer.name
    return shared_actor_name(shared) if shared is not None else actor_name(config.name, BUFFER.name)


def _open_page(
    name: str,
    route: str,
    settings: HttpConfig,
    build: Callable[..., HttpService],
    arguments: tuple[Any, ...],
    key_file: Path,
) -> OpenService:
    """Deploy a page on Ray Serve, built of the digests of its keys and the ``arguments``. The keys are those of its
    settings, or one that is written to ``key_file``."""
    digests, key = read_keys(settings), secrets.token_urlsafe(24)
    connect()
    from rayrft.runtime.serving.applications import HttpApplication, create_anchor, delete_applications

    _prepare([_http_bundles(settings)])
    arguments = digests or (key_digest(key),), *arguments
    application = HttpApplication(name, route, settings, route, build, arguments)
    with contextlib.ExitStack() as closing:
        anchor = create_anchor(route)
        closing.callback(anchor.kill)
        closing.callback(delete_applications, name)
        delete_applications(name)  # of an owner that was killed
        if not digests:
            write_key(key_file, key)
        return OpenService(f"{application.open()}/", anchor, closing.pop_all(), None if digests else key_file)


def _http_bundles(http: HttpConfig) -> Bundles:
    return Bundles("http", http.replicas, http.cpus, 0, 0.25, "on Ray Serve: HTTP", served=True)


def _prepare(plan: list[Bundles], wait_s: float = 0.0, say: Callable[[str], None] = print) -> float | None:
    """Check that the cluster has room, or wait for it, and silence Serve's log of every request. Returns and raises as
    `check_gpus`, too."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    check_room(plan, wait_s, say)
    if wait_s:  # Serve waits without end, so placement groups wait before it
        room = Placement(f"room-{uuid.uuid4().hex[:8]}", plan)
        try:
            room.reserve([each.name for each in plan], wait_s, say)
        finally:
            room.remove()
    return check_gpus(plan, say)


def pipeline_engines(
    run: str, models: Mapping[str, AuxiliaryConfig], seed: int, wait_s: float, say: Callable[[str], None] = print
) -> RunEngines:
    """Return a context manager that runs engines for the requested ``models``, in placement groups named after ``run``.
    ``say`` receives the plan. It raises PlacementError if they do not fit within ``wait_s``, and the root cause if one
    does not start."""

    @contextlib.asynccontextmanager
    async def running(names: Collection[str]) -> AsyncIterator[dict[str, AskedModel]]:
        wanted = {name: config for name, config in models.items() if name in names}
        if not wanted:
            yield {}
            return
        for name, each in wanted.items():
            ChatTokenizer(each.model, f"{name}.model", each.template)  # raises if there is none, before anything starts
            check_length(each.model, each.max_length, f"{name}.max_length")
            check_cache(each.model, each.max_length, each.dtype, each.engine, f"{name}.engine")
            check_options(each.engine, f"{name}.engine", bounds=None)
        connect()
        plan = [*engine_groups.auxiliary_bundles(wanted), engine_groups.pool_bundles(len(wanted))]
        say(show_plan(run, plan))
        check_room(plan, wait_s, say)
        check_gpus(plan, say)
        placement, groups = Placement(run, plan), dict[str, engine_groups.EngineGroup]()
        try:
            placement.reserve([each.name for each in plan], wait_s, say)
            groups |= engine_groups.EngineGroup.auxiliary(placement, wanted, seed)
            await asyncio.to_thread(engine_groups.serve_engines, groups.values(), _START_S)
            found = auxiliary_models(wanted, {name: group.pool for name, group in groups.items()})
            yield {name: AskedModel.on_engines(model, wanted[name]) for name, model in found.items()}
        finally:
            await asyncio.to_thread(end, [actor for group in groups.values() for actor in group.actors])
            placement.remove()

    return running


def pipeline_inputs(
    pipeline: PipelineConfig, config: str | None, journal: Path
) -> tuple[Context, OpenModels, dict[str, Task] | None]:
    """Return the context of operators on files, the models that they ask, and the tasks of the run whose ``config`` is
    given, by their ids. Answers of models are kept in ``journal``."""
    reward, models, plugins, seed = pipeline.reward, dict(pipeline.models), list(pipeline.plugins), 0
    context, tasks = Context(), dict[str, Task]()
    if config is not None:
        run = load_config(config, {"pipelines.decontaminate": False})
        connect()
        processed = load_processed(run, task_engines(run))
        splits = processed.splits
        tasks = {task.id: task for part in splits.demonstrated.values() for task in part}
        tasks |= {task.id: task for task in (*splits.train, *splits.evaluation)}
        reward, models, seed = reward or run.scoring, {**run.auxiliary, **models}, run.seed
        plugins += run.plugins
        context = Context(processed.evaluation, run.model.path, template=run.model.template)
    opened = partial(
        open_models,
        engines=pipeline_engines(f"pipeline-{uuid.uuid4().hex[:8]}", models, seed, pipeline.placement.wait_s),
        endpoints=pipeline.endpoints,
        reward=reward,
        plugins=plugins,
        tasks=tasks.get,
        answer_s=pipeline.answer_s,
        journal=journal,
    )
    context = replace(context, models={*models, *pipeline.endpoints}, scores=reward is not None)
    return context, opened, None if config is None else tasks


def task_engines(config: RunConfig, say: Callable[[str], None] = print) -> RunEngines:
    """Return `pipeline_engines` of the auxiliary models that operators on a run's tasks ask."""
    return pipeline_engines(f"{config.name}-tasks", config.auxiliary, config.seed, config.placement.wait_s, say)
