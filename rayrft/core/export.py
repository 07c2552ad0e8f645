"""From a checkpoint to a folder in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from rayrft.config import load_config
from rayrft.core.progress import Checkpoints
from rayrft.errors import ConfigError, RunNotFound


def export(run_folder: Path, to: Path, step: int | None = None, *, merged: bool = True) -> int:
    """Write a run's checkpoint of that step (the latest by default) to the folder ``to``; gives the step.

    An adapter is ``merged`` into the model's weights, or written by itself as peft loads it. In this process, on the
    CPU, without Ray: a run need not be under way. Raises RunNotFound where there is no such checkpoint, and ConfigError
    where ``to`` holds something already, or a run without an adapter is to be written without merging.
    """
    import torch

    from rayrft.trainer.checkpoint import load_weights, read_base
    from rayrft.trainer.lora import Lora
    from rayrft.trainer.model import load_policy, write_adapter, write_hf

    config = load_config(run_folder / "config.yaml")
    lora = config.trainer.lora
    if lora is None and not merged:
        raise ConfigError(
            "the run has no adapter: its checkpoints are whole models", field="merge", value=merged, remedy="leave out"
        )
    checkpoints = Checkpoints(run_folder, config.checkpoint)
    steps = [each.step for each in checkpoints.all() if each.step]
    wanted = max(steps, default=None) if step is None else step
    if wanted is None or wanted not in steps:
        raise RunNotFound(
            "no such checkpoint",
            field="step",
            value=step,
            remedy=f"there are those of steps {steps}" if steps else "the run has none yet",
        )
    if to.exists() and any(to.iterdir()):
        raise ConfigError("the folder is not empty", field="to", value=str(to), remedy="give a new one")
    model = str(run_folder / "model") if config.model.tiny is not None else str(config.model.path)
    base = (lora is not None and read_base(checkpoints.at(wanted))) or model
    policy = load_policy(base)
    if lora is not None:
        policy.lora = Lora(policy.model, lora, origin=base, compute=torch.float32, seed=config.seed)
    trained = {name: each.detach() for name, each in policy.model.named_parameters() if each.requires_grad}
    load_weights(checkpoints.at(wanted), trained)
    if merged:
        write_hf(policy, policy.model.state_dict(), model, to)
    else:
        write_adapter(policy, base, model, to)
    return wanted
