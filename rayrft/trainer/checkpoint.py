"""The trainer's state on disk: sharded, written in the background, read on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rayrft.errors import ModelError
from rayrft.trainer.critic import Critic
from rayrft.trainer.learner import Learner
from rayrft.trainer.optimizer import Optimizer

State = dict[str, Any]


class Checkpointer:
    """One rank's part in writing and reading checkpoints. Every method is a collective."""

    def __init__(self) -> None:
        # Of its own, so that writing in the background does not get between the collectives of a training step.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def save(self, learner: Learner, critic: Critic | None, folder: Path, done: Callable[[str | None], None]) -> None:
        """Copy the state, and write the copy while training goes on; ``done`` gets what went wrong, or None."""
        state = _copy(_state(learner, critic))

        def finished(future: Future[Any]) -> None:
            error = future.exception()
            done(None if error is None else _why(error))

        writing = self._thread.submit(save, state, checkpoint_id=str(folder), process_group=self._group)
        writing.add_done_callback(finished)

    def load(self, learner: Learner, critic: Critic | None, folder: Path, *, whole: bool) -> None:
        """Put weights in place, and with ``whole`` optimisers, schedules and reference too, of the stage that is open.

        Raises ModelError when the checkpoint is of another model.
        """
        names = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        held = {name.partition(".")[0] for name in names}
        state = _state(learner, critic, held if whole else held & {"policy", "critic"})
        try:
            load(state, checkpoint_id=str(folder), process_group=self._group)
        except CheckpointException as error:
            raise ModelError(
                f"the checkpoint does not fit the model: {_why(error)}",
                field="model",
                value=str(folder),
                remedy="resume with the model that the run began with",
            ) from None
        _put(learner.policy, learner.optimizer if whole else None, state, "policy")
        if critic is not None:
            _put(critic, critic.optimizer if whole else None, state, "critic")
        if whole:
            learner.restore(state["learner"])


def load_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Fill ``weights`` (by their checkpoint names) from a checkpoint, in this process alone."""
    state = {"policy": {f"model.{name}": tensor for name, tensor in weights.items()}}
    load(state, checkpoint_id=str(folder), no_dist=True)


def _state(learner: Learner, critic: Critic | None, wanted: set[str] | None = None) -> State:
    """What a checkpoint holds, or those parts of it: tensors that `load` fills in place."""
    models: dict[str, tuple[nn.Module, Optimizer]] = {"policy": (learner.policy, learner.optimizer)}
    if critic is not None:
        models["critic"] = (critic, critic.optimizer)
    state: State = {"learner": learner.state()}
    for name, (model, optimizer) in models.items():
        state[name] = get_model_state_dict(model)
        # Before its first update an optimiser has no state, and asking for it would make one.
        if optimizer.adam.state or (wanted is not None and _optimizer(name) in wanted):
            state[_optimizer(name)] = get_optimizer_state_dict(model, optimizer.adam)
    return state if wanted is None else {part: values for part, values in state.items() if part in wanted}


def _optimizer(name: str) -> str:
    return f"{name}_optimizer"


def _put(model: nn.Module, optimizer: Optimizer | None, state: State, name: str) -> None:
    if name in state:
        set_model_state_dict(model, state[name])
    if optimizer is not None and _optimizer(name) in state:
        set_optimizer_state_dict(model, optimizer.adam, state[_optimizer(name)])


def _why(error: BaseException) -> str:
    """The cause on the first rank that failed, in a line."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def _copy(value: Any) -> Any:
    """The same with tensors of its own, in main memory."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copy(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value
