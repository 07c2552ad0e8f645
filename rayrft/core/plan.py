"""What a run on GPUs needs of their memory, part by part, and which settings fit; nothing is loaded or started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rayrft.config import RunConfig
from rayrft.config.explorer import EngineConfig
from rayrft.config.trainer import TrainerConfig
from rayrft.errors import ConfigError, PlacementError
from rayrft.trainer.memory import RankMemory, Shape, activation_bytes, rank_memory, shape_of

_GB = 1e9
_USABLE = 0.95
"""Share of a GPU's memory that torch can give out: the rest is the driver's, and lost to fragments."""

_ENGINE_GB = 3.0
"""What an engine holds besides weights and KV cache: activations of its largest batch, CUDA graphs, NCCL's buffers."""

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
    """GB of the host's memory."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.room

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {size:.1f}" for name, size in self.parts.items() if size >= 0.05)
        host = f"; {self.host:.1f} GB of the host" if self.host >= 0.05 else ""
        verdict = "fits" if self.fits else f"does not fit: {self.remedy}"
        return f"{self.name} ({self.count}): {self.total:.1f} of {self.room:.0f} GB = {parts}{host}. {verdict}"


def plan_memory(config: RunConfig, gpu_gb: float, *, activations: bool = True) -> list[PartMemory]:
    """Return the memory of the engines and ranks of a config on GPUs of so many GB (1e9 bytes), of ranks with
    ``activations`` or without.

    Raises ConfigError for a model that is made when the run starts, and ModelError for one that there is not.
    """
    if config.model.path is None:
        raise ConfigError("the model is made when the run starts", "give model.path", field="model.path")
    shape, half = shape_of(str(config.model.path)), config.model.dtype != "float32"
    found = []
    if config.rolls_out and config.explorer.engine.gpus:
        found.append(_engine("engine", shape, config.explorer.engine, half, config.model.max_length, gpu_gb))
    for name, each in config.auxiliary.items():
        if each.engine.gpus:
            model, bits = shape_of(each.model, f"auxiliary.{name}.model"), each.dtype != "float32"
            found.append(_engine(f"auxiliary-{name}", model, each.engine, bits, each.max_length, gpu_gb))
    if config.trains and config.trainer.gpus:
        counted = activation_bytes(str(config.model.path)) if activations else 0.0
        found.append(_rank(config, shape, half, counted, gpu_gb))
    return found


def check_memory(config: RunConfig, gpu_gb: float) -> None:
    """Raise PlacementError if engines, or ranks with the smallest micro-batches, cannot fit GPUs of so many GB."""
    if config.model.path is None or not (config.trainer.gpus or config.explorer.engine.gpus):
        return
    for part in plan_memory(config, gpu_gb, activations=False):
        # Weights of auxiliary models may be quantised, and options may leave weights in the host's memory.
        if not part.fits and (part.name == "rank" or (part.name == "engine" and not config.explorer.engine.options)):
            problem = f"{part.name} needs {part.total:.1f} GB of a GPU, of which it may take {part.room:.0f}"
            raise PlacementError(problem, part.remedy, field=f"{part.name}s")


def _engine(name: str, shape: Shape, config: EngineConfig, half: bool, length: int, gpu_gb: float) -> PartMemory:
    number = 2 if half else 4
    room = config.gpu_memory_utilization * min(config.gpus, 1.0) * gpu_gb

    def parts(parallel: int) -> dict[str, float]:
        tokens = number * shape.kv_numbers * length / _GB / parallel
        weights = number * shape.parameters / _GB / parallel
        return {"weights": weights, "work": _ENGINE_GB, f"KV cache of {length:,} tokens": tokens}

    fitting = next((each for each in (1, 2, 4, 8, 16) if sum(parts(each).values()) <= room), None)
    remedy = f"tensor_parallel and gpus {fitting} fit" if fitting else "no tensor_parallel up to 16 fits"
    return PartMemory(name, config.count, parts(config.tensor_parallel), room, remedy)


def _rank(config: RunConfig, shape: Shape, half: bool, activation: float, gpu_gb: float) -> PartMemory:
    trainer, needs = config.trainer, [stage.algorithm.build().needs for stage in config.stages]
    teachers = [shape_of(each.teacher, f"stages.{each.name}.teacher") for each in config.stages if each.teacher]

    def of(settings: TrainerConfig) -> RankMemory:
        return rank_memory(
            shape,
            settings,
            half=half,
            activation=activation,
            reference=any("reference" in each for each in needs),
            critic=any("critic" in each for each in needs),
            teacher=max(teachers, key=lambda each: each.parameters, default=None),
            gpu_bytes=gpu_gb * _GB,
        )

    found, room = of(trainer), _USABLE * min(trainer.gpus, 1.0) * gpu_gb
    parts = {name: size / _GB for name, size in vars(found).items()}
    host = found.states / _GB  # the copy that a checkpoint is written from
    fitting = next(
        (each for each in _other_settings(trainer) if of(trainer.model_copy(update=each)).total <= room * _GB), {}
    )
    knobs = " and ".join(f"trainer.{name}: {_shown(value)}" for name, value in fitting.items())
    taken = of(trainer.model_copy(update=fitting)).total / _GB
    remedy = f"{knobs} takes {taken:.1f} GB" if fitting else "train an adapter (trainer.lora), or a smaller model"
    return PartMemory("rank", trainer.ranks, parts, room, remedy, host)


def _other_settings(config: TrainerConfig) -> Iterator[dict[str, Any]]:
    """Settings that need less memory, those that cost least first."""
    checkpointing = {} if config.gradient_checkpointing else {"gradient_checkpointing": True}
    if checkpointing:
        yield checkpointing
    for ranks in _RANKS:
        if ranks > config.ranks and ranks % config.replicas == 0:
            yield {"ranks": ranks, **checkpointing}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
