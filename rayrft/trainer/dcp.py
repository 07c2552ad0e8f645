"""Checkpoints of the trainer's state: sharded, written in the background, readable on any number of ranks.

They hold the trained parameters. Frozen weights stay where they were loaded from; the state names that folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import _get_layout
from torch.utils._pytree import tree_map_only

from rayrft.config import RunConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError, StorageError
from rayrft.files import held, storage_error
from rayrft.trainer.learner import Learner
from rayrft.trainer.loading import load_hf, load_policy
from rayrft.trainer.lora import Lora
from rayrft.trainer.model import write_adapter, write_hf
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy
from rayrft.trainer.reward_model import RewardClassifier, padding_of

_State = dict[str, Any]

_POLICY, _REWARD_MODEL = "policy", "reward_model"
"""Names of models in a checkpoint."""

_METADATA = {
    *((metadata.__name__, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
    *((piece.__module__, piece.__name__) for piece in (_StorageInfo, _get_layout, torch.Size, PosixPath)),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""Modules and names of the only objects that a checkpoint's metadata refers to."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA:
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint of a run holds")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads checkpoints that somebody else may have written: unlike torch's own reader, it runs no code of theirs."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with self.fs.create_stream(Path(self.path) / ".metadata", "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError(f"its metadata is {type(found).__name__}")
        return found


class _Planner(DefaultLoadPlanner):
    """Plans reads as torch's own planner does, and runs no code from the checkpoint's bytes."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        torch.load(value, weights_only=True)  # raises for anything but plain values, before they are loaded
        value.seek(0)
        super().load_bytes(read_item, value)


class Checkpointer:
    """One rank's part in writing and reading checkpoints. Every method is a collective."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        """A separate group, so that background writing does not interleave with the collectives of a training step."""
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def save(self, learner: Learner, folder: Path, done: Callable[[str | None], None]) -> None:
        """Copy the state and write the copy in the background; ``done`` receives the error message, or None."""
        state = tree_map_only(Tensor, to_host, checkpoint_state(learner, folder))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

        def finished(problem: str | None) -> None:
            state.clear()
            if torch.cuda.is_available():
                torch.accelerator.empty_host_cache()  # torch would keep pinned memory
            done(problem)

        self.write(lambda: self._write(state, folder), finished)

    def write(self, work: Callable[[], None], done: Callable[[str | None], None]) -> None:
        """Do ``work`` in the background, after what this rank writes already; ``done`` as in `save`."""

        def finished(future: Future[None]) -> None:
            error = future.exception()
            done(None if error is None else _one_line(error))

        self._thread.submit(held(work)).add_done_callback(finished)

    def _write(self, state: _State, folder: Path) -> None:
        try:
            save(state, checkpoint_id=str(folder), process_group=self.group)
        except CheckpointException as error:  # the same one on all ranks
            with contextlib.suppress(OSError):
                for file in folder.glob("*"):
                    file.unlink(missing_ok=True)  # its room is needed
            cause = _cause(error)
            if "inline_container.cc" in str(cause):
                cause = OSError(errno.ENOSPC, "torch could not write all data")
            if isinstance(cause, OSError) and cause.errno:
                raise storage_error(cause, folder, "") from None
            raise

    def load_policy(self, policy: Policy, folder: Path) -> None:
        """Load the weights and nothing else. Raises as `load` does."""
        self._rebase(policy, folder)
        state: _State = {_POLICY: _trained(policy)}
        _read(state, folder, process_group=self.group)
        states.set_model_state_dict(policy, state[_POLICY], options=_TRAINED_ONLY)

    def load(self, learner: Learner, folder: Path) -> None:
        """Load all state of the open stage: weights, optimisers, schedules, reference.

        Raises ModelError for the checkpoint of another model, and StorageError if a file is missing or cannot be read.
        """
        self._rebase(learner.policy, folder)
        with _typed_errors(folder):
            names = _Reader(str(folder)).read_metadata().state_dict_metadata
        if learner.config.moments == "8bit" and not any(name.startswith(f"{learner.rng.name}.") for name in names):
            problem, remedy = "8-bit moments are not divided among other ranks", "give as many trainer.ranks as it had"
            raise ModelError(problem, remedy, field="trainer.moments", value=str(folder))
        state = checkpoint_state(learner, folder, set(names))
        _read(state, folder, process_group=self.group)
        for name, (model, optimizer) in _models(learner).items():
            states.set_model_state_dict(model, state[name], options=_TRAINED_ONLY)
            if optimizer is not None and (moments := state.get(f"{name}_optimizer")) is not None:
                states.set_optimizer_state_dict(model, optimizer.adam, moments)
        learner.restore(state["learner"], state.get(learner.rng.name))

    def _rebase(self, policy: Policy, folder: Path) -> None:
        """With an adapter, load the frozen weights that the checkpoint's adapter was trained on."""
        if policy.lora is None:
            return
        base = read_base(folder, process_group=self.group) or policy.lora.origin
        if base != policy.lora.base:
            load_hf(policy, base)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor into the host's memory: from a GPU into pinned memory, which is faster, and without waiting."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def read_base(folder: Path, **how: Any) -> str:
    """Return the folder of the frozen weights under a checkpoint's adapter; empty if they are the run's model. ``how``
    are options of torch's `load`. Raises as `Checkpointer.load` does."""
    state = {"base": ""}
    _read(state, folder, **how)
    return os.path.normpath(folder.parent / state["base"]) if state["base"] else ""


def load_weights(folder: Path, model: Policy | RewardClassifier) -> None:
    """Fill the trainable parameters of a model from a checkpoint, without a process group.

    Raises as `Checkpointer.load` does.
    """
    trained = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    _read({_POLICY if isinstance(model, Policy) else _REWARD_MODEL: trained}, folder, no_dist=True)


def export_checkpoint(
    config: RunConfig, model: str, checkpoint: Path, to: Path, *, reward_model: bool, merged: bool
) -> None:
    """Write the language model of a checkpoint, or its ``reward_model`` (a sequence classifier), to the folder ``to``,
    for transformers, vLLM or peft; on the CPU, without Ray.

    ``model`` is the run's original model. An adapter is ``merged`` into the weights, or written in peft format.
    """
    lora, tokenizer = config.trainer.lora, ChatTokenizer(model, template=config.model.template)
    base = (lora is not None and read_base(checkpoint, no_dist=True)) or model
    policy, dtype = load_policy(base), getattr(torch, config.model.dtype)
    if lora is not None:
        compute = dtype if lora.frozen == "nf4" else torch.float32
        policy.lora = Lora(policy.model, lora, origin=base, compute=compute, seed=config.seed)
    trained = RewardClassifier(policy, padding_of(model)) if reward_model else policy
    load_weights(checkpoint, trained)
    if merged or reward_model:
        write_hf(trained, trained.state_dict(), tokenizer, to, dtype)
    else:
        write_adapter(policy, base, tokenizer, to)


def _read(state: _State, folder: Path, **how: Any) -> None:
    with _typed_errors(folder):
        load(state, storage_reader=_Reader(str(folder)), planner=_Planner(), **how)


@contextlib.contextmanager
def _typed_errors(folder: Path) -> Iterator[None]:
    """Turn errors raised inside into those that `Checkpointer.load` documents."""
    try:
        (folder / ".metadata").stat()
        yield
    except (CheckpointException, OSError, EOFError, pickle.UnpicklingError) as error:
        cause, line = _cause(error), _one_line(error)
        lacks = "Missing key in checkpoint" in str(cause)
        if lacks or "ize mismatch" in str(cause):
            problem = f"the checkpoint {'lacks parameters of' if lacks else 'does not fit'} the model: {line}"
            remedy = f"resume with the model{', adapter and algorithm' if lacks else ''} that the run began with"
            raise ModelError(problem, remedy, field="model", value=str(folder)) from None
        problem = f"the checkpoint cannot be read: {line}"
        if isinstance(cause, FileNotFoundError):
            problem = f"the checkpoint is incomplete: {Path(cause.filename or '').name} is missing"
        remedy = "delete the folder: the run then resumes from the previous checkpoint"
        raise StorageError(problem, remedy, field="checkpoint", value=str(folder)) from None


def _models(learner: Learner) -> dict[str, tuple[nn.Module, Optimizer | None]]:
    """Return the models with their optimisers; the policy has none where a reward model is trained."""
    models: dict[str, tuple[nn.Module, Optimizer | None]] = {_POLICY: (learner.policy, None)}
    models[_POLICY if learner.reward_model is None else _REWARD_MODEL] = (learner.trained, learner.optimizer)
    critic = learner.critic
    return models if critic is None else {**models, "critic": (critic, critic.optimizer)}


def checkpoint_state(learner: Learner, folder: Path, written: set[str] | None = None) -> _State:
    """Return the state to save, or, given the names ``written`` in a checkpoint, the tensors that `load` fills."""
    lora = learner.policy.lora
    # The frozen weights relative to the checkpoint, as a run may be moved; empty if they are the run's model, or none.
    base = "" if lora is None or lora.base == lora.origin else os.path.relpath(lora.base, folder.parent)
    state: _State = {"learner": learner.state(), "base": base}
    parts = None if written is None else {name.partition(".")[0] for name in written}
    for name, (model, optimizer) in _models(learner).items():
        state[name] = _trained(model)
        # Before its first update an optimiser has no state, and reading it would create one.
        written_to = f"{name}_optimizer" in parts if parts is not None else optimizer and optimizer.adam.state
        if optimizer is not None and written_to:
            state[f"{name}_optimizer"] = states.get_optimizer_state_dict(model, optimizer.adam)
    if parts is None or learner.rng.name in parts:
        state[learner.rng.name] = learner.rng.state()
    return state


_TRAINED_ONLY = states.StateDictOptions(strict=False)


def _trained(model: nn.Module) -> _State:
    """Return the trainable parameters, sharded as they are."""
    trained = {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad}
    return {name: tensor for name, tensor in states.get_model_state_dict(model).items() if name in trained}


def _cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _one_line(error: BaseException) -> str:
    """Return the cause in one line."""
    cause = _cause(error)
    return ": ".join([type(cause).__name__, *str(cause).strip().splitlines()[-1:]])
