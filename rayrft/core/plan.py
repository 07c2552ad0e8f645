"""What a run needs of GPU memory and disk, part by part, and which settings fit; nothing is loaded or started."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rayrft.config import RunConfig, load_config
from rayrft.config.explorer import EngineConfig
from rayrft.config.stage import StageConfig
from rayrft.config.trainer import TrainerConfig
from rayrft.errors import ConfigError, ModelError, PlacementError
from rayrft.markup import ReportTable
from rayrft.monitor.records import StepRecord, read_records
from rayrft.trainer import memory

_GB = 1e9
_USABLE = 0.95
"""Share of a GPU's memory that torch can give out: the rest is the driver's, and lost to fragments."""

_ENGINE_GB = 3.0
"""What an engine holds besides weights and KV cache: activations of its largest batch, CUDA graphs, NCCL's buffers."""

_ASLEEP_GB = 1.0
"""What is left of an engine that sleeps: its process's CUDA context."""

_RANKS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 256, 512)


@dataclass(frozen=True)
class PartMemory:
    """One kind of actor on GPUs: how many, and the memory of each by what takes it, in GB."""

    name: str
    count: int
    parts: dict[str, float]
    room: float
    """GB that it may take."""
    remedy: str = ""
    """What makes it fit, if it does not."""
    host: float = 0.0
    """GB of the host's memory, besides what a process takes anyway."""
    reserved: float = 0.0
    """GB of the host's memory that the config reserves."""
    token: float = 0.0
    """GB of a token in an engine's KV cache, and the tokens of its longest row."""
    longest: int = 0

    @property
    def cached_tokens(self) -> int:
        """The tokens for whose KV cache an engine has room."""
        return max(0, int((self.room - self.total) / self.token + self.longest)) if self.token else 0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.room

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {size:.1f}" for name, size in self.parts.items() if size >= 0.05)
        host = f"; {self.host:.1f} GB of the host" if self.host >= 0.05 else ""
        if self.host > self.reserved:
            host += f", of which memory_gib reserves {self.reserved:.1f}"
        if self.token:
            rows = self.cached_tokens // self.longest
            host += f"; room for a KV cache of {self.cached_tokens:,} tokens, {rows:,} of the longest rows"
        verdict = "fits" if self.fits else f"does not fit: {self.remedy}"
        return f"{self.name} ({self.count}): {self.total:.1f} of {self.room:.0f} GB = {parts}{host}. {verdict}"

    @property
    def cells(self) -> dict[str, object]:
        more = {"GB each": self.total, "KV tokens": self.cached_tokens, "fits": self.fits}
        return {**{name: value for name, value in vars(self).items() if name not in ("token", "longest")}, **more}


_ROW_BYTES, _TOKEN_BYTES = 550, 13
"""About what the Buffer's log has of a row, and of each of its tokens with its text."""


_DAY_S, _STEP_S = 86_400, 60.0
"""Seconds of a day, and of a step that was not measured."""
_ONE_ANSWER = "single_turn"
"""The workflow whose rows are a prompt and an answer: those of others may be as long as the model allows."""


@dataclass(frozen=True)
class StepVolume:
    """What the steps of a stage train on and write, at most: an answer may be shorter than it may be."""

    stage: str
    rows: int
    """Sampled rows of a step; 0 if the stage samples none."""
    tokens: int
    log_mb: float
    """MB (1e6 bytes) of the Buffer's log that a step writes."""
    step_s: float
    log_gb: float
    """GB of the Buffer's log in a day."""
    checkpoint_gb: float = 0.0
    """GB of a checkpoint; 0 without a trainer, and for a model that is made when the run starts."""
    checkpoints_gb: float = 0.0
    """GB of checkpoints in a day."""
    disk_gb: float = 0.0
    """GB on the disk after a day: ``buffer.log_bytes`` bounds the log, and ``checkpoint`` the number of checkpoints."""

    def __str__(self) -> str:
        step = f"{self.rows:,} rows and {self.tokens:,} tokens a step at most, {self.log_mb:.3g} MB of log"
        day = f"{self.log_gb:.3g} GB of log"
        if self.checkpoint_gb:
            day += f" and {self.checkpoints_gb:.3g} GB of checkpoints of {self.checkpoint_gb:.3g} GB"
        day += f", and leaves {self.disk_gb:.3g} GB on the disk"
        return f"stage {self.stage}: {step}; a day at {self.step_s:.3g} s a step writes {day}"

    @property
    def cells(self) -> dict[str, object]:
        names = "stage", "rows", "tokens, at most", "MB of log", "seconds of a step", "GB of log a day"
        more = "GB of a checkpoint", "GB of checkpoints a day", "GB on the disk after a day"
        return dict(zip((*names, *more), vars(self).values(), strict=True))


def plan(
    config: str | Path | dict[str, Any] | RunConfig, gpu_gb: float = 80.0, step_s: float | None = None, **overrides: Any
) -> ReportTable[PartMemory | StepVolume]:
    """Return the memory that engines and ranks need on GPUs of so many GB, with settings that fit, and the volume of
    steps of ``step_s`` seconds. By default the seconds are measured in the run's folder, or 60. ``overrides`` are
    dotted keys. Raises ConfigError for an invalid config, and as `plan_memory`."""
    checked = load_config(config, overrides)
    return ReportTable([*plan_memory(checked, gpu_gb), *plan_steps(checked, step_s)])


def plan_steps(config: RunConfig, step_s: float | None) -> list[StepVolume]:
    """Return the volume of the steps of each stage that samples answers or writes checkpoints."""
    sampling, volumes, measured = config.explorer.sampling, list[StepVolume](), _measured_seconds(config)
    longest = min(sampling.max_prompt_tokens + sampling.max_tokens, config.model.max_length)
    named = {each.workflow or _ONE_ANSWER for each in config.tasks.sources} if config.tasks else set()
    if {config.explorer.workflow, *named} != {_ONE_ANSWER}:
        longest = config.model.max_length
    for stage in config.stages:
        rows, checkpoint_gb = stage.groups * stage.group_size, _checkpoint_gb(config, stage)
        if not (rows or checkpoint_gb):
            continue
        size, seconds = rows * (_ROW_BYTES + _TOKEN_BYTES * longest), step_s or measured.get(stage.name, _STEP_S)
        log_gb = size / _GB * _DAY_S / seconds
        every, kept = config.checkpoint.every or stage.steps, config.checkpoint.keep_last + config.checkpoint.keep_best
        written = _DAY_S / seconds * math.ceil(stage.steps / every) / stage.steps
        disk_gb = min(log_gb, config.buffer.log_bytes / _GB) + min(written, kept) * checkpoint_gb
        sizes = checkpoint_gb, written * checkpoint_gb, disk_gb
        volumes.append(StepVolume(stage.name, rows, rows * longest, size / 1e6, seconds, log_gb, *sizes))
    return volumes


def _measured_seconds(config: RunConfig) -> dict[str, float]:
    """Return the median seconds of the steps of each stage that the run's folder has records of."""
    found = defaultdict[str, list[float]](list)
    if (config.folder / "metrics.jsonl").is_file():
        for record in read_records(config.folder):
            if isinstance(record, StepRecord):
                found[record.stage].append(record.step_s)
    return {stage: median(seconds) for stage, seconds in found.items()}


def _checkpoint_gb(config: RunConfig, stage: StageConfig) -> float:
    """Return the size of a checkpoint; 0 without a trainer, or if the model is not made yet."""
    made = config.folder / "model"
    if not config.trains or (config.model.path is None and not made.is_dir()):
        return 0.0
    algorithm, shape = stage.algorithm.build(), memory.shape_of(str(config.model.path or made))
    beside = {"reference": "reference" in algorithm.needs, "critic": "critic" in algorithm.needs}
    return memory.checkpoint_bytes(shape, config.trainer, **beside, reward_model=algorithm.trains_reward_model) / _GB


def plan_memory(config: RunConfig, gpu_gb: float, *, activations: bool = True) -> list[PartMemory]:
    """Return the memory of the engines and ranks of a config on GPUs of so many GB (1e9 bytes), of ranks with
    ``activations`` or without.

    Raises ConfigError for a model that is made when the run starts, and ModelError for one that there is not.
    """
    if config.model.path is None:
        if not (config.explorer.engine.gpus or config.trainer.gpus):
            return []
        raise ConfigError("the model is made when the run starts", "give model.path", field="model.path")
    shape, half = memory.shape_of(str(config.model.path)), config.model.dtype != "float32"
    rank, engine, helpers, settings = None, None, list[PartMemory](), config.explorer.engine
    if config.rolls_out and settings.gpus:
        room, copies = settings.gpu_share * gpu_gb, settings.sleep + _keeps_copy(config)
        # In two buckets weights travel between GPUs, where they do not share one.
        apart = config.mode == "both" and not config.colocated and config.sync_backend != "files"
        buckets = apart * 2 * config.bucket_bytes / _GB
        engine = _engine("engine", shape, settings, half, config.model.max_length, room, buckets, copies)
    if config.trains and config.trainer.gpus:
        counted, room = memory.activation_bytes(str(config.model.path)) if activations else 0.0, _USABLE * gpu_gb
        if engine and config.colocated:
            room -= _ASLEEP_GB if settings.sleep else _given(config, gpu_gb) or engine.total
        else:
            room *= min(config.trainer.gpus, 1.0)
        rank = _rank(config, shape, half, counted, room, gpu_gb)
        if engine and config.colocated:
            engine = _beside(engine, rank, config, gpu_gb)
    for name, each in config.auxiliary.items():
        if each.engine.gpus:
            model, bits = memory.shape_of(each.model, f"auxiliary.{name}.model"), each.dtype != "float32"
            room = each.engine.gpu_share * gpu_gb
            helpers.append(_engine(f"auxiliary-{name}", model, each.engine, bits, each.max_length, room))
    return [each for each in (engine, *helpers, rank) if each]


def engine_share(config: RunConfig, gpu_gb: float) -> float | None:
    """Return the share of a GPU of so many GB that an engine beside a trainer rank takes. None if the config gives it,
    if they share no GPU, or if the rank's memory cannot be counted. Raises PlacementError if it is too little."""
    if not config.colocated or config.explorer.engine.gpu_memory_utilization or config.model.path is None:
        return None
    try:
        engine, *_ = plan_memory(config, gpu_gb)
    except ModelError:
        return None
    _check(engine)
    return engine.room / gpu_gb


def check_memory(config: RunConfig, gpu_gb: float | None) -> None:
    """Raise PlacementError if engines, or ranks with the smallest micro-batches, cannot fit GPUs of so many GB."""
    if gpu_gb is None or config.model.path is None or not (config.trainer.gpus or config.explorer.engine.gpus):
        return
    for part in plan_memory(config, gpu_gb, activations=False):
        # Weights of auxiliary models may be quantised, and options may leave weights in the host's memory.
        if part.name == "rank" or (part.name == "engine" and not config.explorer.engine.options):
            _check(part)


def _check(part: PartMemory) -> None:
    if not part.fits:
        problem = f"{part.name} needs {part.total:.1f} GB of a GPU, of which it may take {part.room:.0f}"
        raise PlacementError(problem, part.remedy, field=f"{part.name}s")


def _beside(engine: PartMemory, rank: PartMemory, config: RunConfig, gpu_gb: float) -> PartMemory:
    """Return an engine with the room that the rank on its GPU leaves it."""
    sleeps = config.explorer.engine.sleep
    # While an engine that slept is awake, the rank keeps its models, scores probes, and sends weights in two buckets.
    idle = {name: rank.parts[name] for name in ("states", "models", "gathered", "head")}
    held = sum((idle if sleeps else rank.parts).values()) + 2 * config.bucket_bytes / _GB
    remedy = "give engines and ranks whole GPUs" if sleeps else "explorer.engine.sleep: true lets them take turns"
    return replace(engine, room=_given(config, gpu_gb) or _USABLE * gpu_gb - held, remedy=remedy)


def _given(config: RunConfig, gpu_gb: float) -> float | None:
    """Return the memory that the config gives a rollout engine, if it does."""
    share = config.explorer.engine.gpu_memory_utilization
    return share and share * gpu_gb


def _keeps_copy(config: RunConfig) -> bool:
    """Return whether both ends keep the weights in the host's memory, to which versions in files are differences."""
    return config.mode == "both" and config.trainer.lora is None and config.sync_backend == "files"


def _engine(
    name: str,
    shape: memory.Shape,
    config: EngineConfig,
    half: bool,
    length: int,
    room: float,
    buckets: float = 0.0,
    copies: int = 0,
) -> PartMemory:
    """Return the memory of an engine, with ``copies`` of its weights in the host's."""
    number = 2 if half else 4

    def parts(parallel: int) -> dict[str, float]:
        tokens = number * shape.kv_numbers * length / _GB / parallel
        weights = number * shape.parameters / _GB / parallel
        parts = {"weights": weights, "work": _ENGINE_GB, f"KV cache of {length:,} tokens": tokens}
        return {**parts, "buckets": buckets} if buckets else parts

    fitting = next((each for each in (1, 2, 4, 8, 16) if sum(parts(each).values()) <= room), None)
    remedy = f"tensor_parallel and gpus {fitting} fit" if fitting else "no tensor_parallel up to 16 fits"
    host, reserved = copies * number * shape.parameters / _GB, config.memory_gib * 2**30 / _GB
    token = number * shape.kv_numbers / _GB / config.tensor_parallel
    return PartMemory(name, config.count, parts(config.tensor_parallel), room, remedy, host, reserved, token, length)


def _rank(
    config: RunConfig, shape: memory.Shape, half: bool, activation: float, room: float, gpu_gb: float
) -> PartMemory:
    trainer, needs = config.trainer, [stage.algorithm.build().needs for stage in config.stages]
    sampling = config.explorer.sampling  # all of a prompt may be images, and no token of an answer is one
    images = sampling.max_prompt_tokens / (sampling.max_prompt_tokens + sampling.max_tokens) if activation else 0.0
    plain, checkpointed = memory.tower_bytes(str(config.model.path)) if images else (0.0, 0.0)
    teachers = [memory.shape_of(each.teacher, f"stages.{each.name}.teacher") for each in config.stages if each.teacher]

    def of(settings: TrainerConfig) -> memory.RankMemory:
        return memory.rank_memory(
            shape,
            settings,
            half=half,
            activation=activation,
            tower=(images * plain, images * checkpointed),
            reference=any("reference" in each for each in needs),
            critic=any("critic" in each for each in needs),
            teacher=max(teachers, key=lambda each: each.parameters, default=None),
            gpu_bytes=gpu_gb * _GB,
        )

    found = of(trainer)
    parts = {name: size / _GB for name, size in vars(found).items()}
    # Buckets take the place of what passes over a batch hold.
    if config.rolls_out and (beyond := 2 * config.bucket_bytes - found.gradients - found.head - found.activations) > 0:
        parts["buckets"] = beyond / _GB
    kept = of(trainer.model_copy(update={"cpu_offload": False}))
    host = kept.states  # the copy that a checkpoint is written from
    if trainer.cpu_offload:
        host += kept.states + kept.gradients + kept.models
    host += _keeps_copy(config) * (2 if half else 4) * shape.parameters
    reserved = trainer.memory_gib * 2**30 / _GB
    others = ((each, of(trainer.model_copy(update=each)).total / _GB) for each in _other_settings(trainer))
    fitting, taken = next((each for each in others if each[1] <= room), ({}, 0.0))
    knobs = " and ".join(f"trainer.{name}: {str(value).lower()}" for name, value in fitting.items())
    remedy = f"{knobs} takes {taken:.1f} GB" if fitting else "train an adapter (trainer.lora), or a smaller model"
    return PartMemory("rank", trainer.ranks, parts, room, remedy, host / _GB, reserved)


def _other_settings(config: TrainerConfig) -> Iterator[dict[str, Any]]:
    """Settings that need less memory, those that cost least first."""
    checkpointing = {} if config.gradient_checkpointing else {"gradient_checkpointing": True}
    if checkpointing:
        yield checkpointing
    for ranks in _RANKS:
        if ranks > config.ranks and ranks % config.replicas == 0:
            yield {"ranks": ranks, **checkpointing}
