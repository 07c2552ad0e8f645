"""The trainer's state on disk: sharded, written in the background, read on any number of ranks.

It holds what is trained. Frozen weights stay where they were loaded from, which the state names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rayrft.errors import ModelError, RayrftError, StorageError
from rayrft.trainer.learner import Learner
from rayrft.trainer.model import load_hf
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy
from rayrft.trainer.value_model import Critic

State = dict[str, Any]


class Checkpointer:
    """One rank's part in writing and reading checkpoints. Every method is a collective."""

    def __init__(self) -> None:
        # Of its own, so that writing in the background does not get between the collectives of a training step.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def save(self, learner: Learner, critic: Critic | None, folder: Path, done: Callable[[str | None], None]) -> None:
        """Copy the state, and write the copy while training goes on; ``done`` gets what went wrong, or None."""
        state = _copy(_state(learner, critic, folder))

        def finished(future: Future[Any]) -> None:
            error = future.exception()
            done(None if error is None else _why(error))

        writing = self._thread.submit(save, state, checkpoint_id=str(folder), process_group=self._group)
        writing.add_done_callback(finished)

    def load_policy(self, policy: Policy, folder: Path) -> None:
        """Put the weights in place, and nothing else. Raises as `load` does."""
        self._rebase(policy, folder)
        state: State = {"policy": _trained(policy)}
        self._read(state, folder)
        set_model_state_dict(policy, state["policy"], options=_TRAINED_ONLY)

    def load(self, learner: Learner, critic: Critic | None, folder: Path) -> None:
        """Put everything in place that the open stage has: weights, optimisers, schedules, reference.

        Raises ModelError when the checkpoint is of another model, and StorageError when its files are not all there or
        cannot be read.
        """
        self._rebase(learner.policy, folder)
        with _explained(folder):
            names = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        state = _state(learner, critic, folder, set(names))
        self._read(state, folder)
        for name, (model, optimizer) in _models(learner, critic).items():
            set_model_state_dict(model, state[name], options=_TRAINED_ONLY)
            if (moments := state.get(_optimizer(name))) is not None:
                set_optimizer_state_dict(model, optimizer.adam, moments)
        learner.restore(state["learner"], state.get(_chance(learner)))

    def _rebase(self, policy: Policy, folder: Path) -> None:
        """Under an adapter, have the frozen weights that the checkpoint's was trained on."""
        if policy.lora is None:
            return
        state: State = {"base": ""}
        self._read(state, folder)
        base = _resolve(state["base"], folder) or policy.lora.origin
        if base != policy.lora.base:
            load_hf(policy, base)

    def _read(self, state: State, folder: Path) -> None:
        with _explained(folder):
            load(state, checkpoint_id=str(folder), process_group=self._group)


def read_base(folder: Path) -> str:
    """The folder of the frozen weights under a checkpoint's adapter; empty where they are those of the run's model.

    Raises as `Checkpointer.load` does.
    """
    state = {"base": ""}
    with _explained(folder):
        load(state, checkpoint_id=str(folder), no_dist=True)
    return _resolve(state["base"], folder)


def load_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Fill ``weights`` (by their checkpoint names) from a checkpoint, in this process alone.

    Raises as `Checkpointer.load` does.
    """
    state = {"policy": {f"model.{name}": tensor for name, tensor in weights.items()}}
    with _explained(folder):
        load(state, checkpoint_id=str(folder), no_dist=True)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """What goes wrong in here is raised as the error that `Checkpointer.load` names."""
    try:
        (folder / ".metadata").stat()
        yield
    except (CheckpointException, OSError) as error:
        raise _unreadable(error, folder) from None


def _unreadable(error: BaseException, folder: Path) -> RayrftError:
    cause = _cause(error)
    before = "delete the folder: the run then goes on from the checkpoint before it"
    if isinstance(cause, FileNotFoundError):
        return StorageError(
            f"the checkpoint is not whole: {Path(cause.filename or '').name} is missing",
            field="checkpoint",
            value=str(folder),
            remedy=before,
        )
    if "Missing key in checkpoint" in str(cause):
        return ModelError(
            f"the checkpoint lacks what the model has: {_why(error)}",
            field="model",
            value=str(folder),
            remedy="resume with the model, adapter and algorithm that the run began with",
        )
    if "ize mismatch" in str(cause):
        return ModelError(
            f"the checkpoint does not fit the model: {_why(error)}",
            field="model",
            value=str(folder),
            remedy="resume with the model that the run began with",
        )
    return StorageError(
        f"the checkpoint cannot be read: {_why(error)}", field="checkpoint", value=str(folder), remedy=before
    )


def _models(learner: Learner, critic: Critic | None) -> dict[str, tuple[nn.Module, Optimizer]]:
    policy: dict[str, tuple[nn.Module, Optimizer]] = {"policy": (learner.policy, learner.optimizer)}
    return policy if critic is None else {**policy, "critic": (critic, critic.optimizer)}


def _state(learner: Learner, critic: Critic | None, folder: Path, written: set[str] | None = None) -> State:
    """What a checkpoint holds: tensors that `load` fills in place. ``written`` are the names in the one to be read."""
    state: State = {"learner": learner.state(), "base": _base(learner.policy, folder)}
    parts = None if written is None else {name.partition(".")[0] for name in written}
    for name, (model, optimizer) in _models(learner, critic).items():
        state[name] = _trained(model)
        # Before its first update an optimiser has no state, and asking for it would make one.
        if _optimizer(name) in parts if parts is not None else optimizer.adam.state:
            state[_optimizer(name)] = get_optimizer_state_dict(model, optimizer.adam)
    if parts is None or _chance(learner) in parts:
        state[_chance(learner)] = learner.chance.state()
    return state


_TRAINED_ONLY = StateDictOptions(strict=False)


def _trained(model: nn.Module) -> State:
    """The parameters that are trained, sharded as they are."""
    trained = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    return {name: tensor for name, tensor in get_model_state_dict(model).items() if name in trained}


def _base(policy: Policy, folder: Path) -> str:
    """The folder of the frozen weights as seen from that of the checkpoint, for a run may be moved; empty where they
    are those of the run's model, or none are frozen."""
    lora = policy.lora
    return "" if lora is None or lora.base == lora.origin else os.path.relpath(lora.base, folder.parent)


def _resolve(base: str, folder: Path) -> str:
    return os.path.normpath(folder.parent / base) if base else ""


def _optimizer(name: str) -> str:
    return f"{name}_optimizer"


def _chance(learner: Learner) -> str:
    return f"chance {learner.chance.name}"


def _cause(error: BaseException) -> BaseException:
    """What the first rank that failed ran into."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _why(error: BaseException) -> str:
    """The cause in a line."""
    cause = _cause(error)
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[-1:]])


def _copy(value: Any) -> Any:
    """The same with tensors of its own, in main memory."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copy(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value
