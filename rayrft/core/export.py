"""From a checkpoint to a folder in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from rayrft.config import load_config
from rayrft.core.progress import Checkpoints
from rayrft.errors import ConfigError, RunNotFound


def export(run_folder: Path, to: Path, step: int | None = None) -> int:
    """Write a run's checkpoint of that step (the latest by default) to the folder ``to``; gives the step.

    In this process, on the CPU, without Ray: a run need not be under way. Raises RunNotFound where there is no such
    checkpoint, and ConfigError where ``to`` holds something already.
    """
    from rayrft.trainer.checkpoint import load_weights
    from rayrft.trainer.model import load_policy, write_hf

    config = load_config(run_folder / "config.yaml")
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
    policy = load_policy(model)
    weights = {name: parameter.detach() for name, parameter in policy.model.named_parameters()}
    load_weights(checkpoints.at(wanted), weights)
    write_hf(policy, policy.model.state_dict(), model, to)
    return wanted
