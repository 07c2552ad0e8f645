"""The loop that Ray Train runs in every worker.

Ray Train's own actors load this module, too, and do without what a rank computes with: that is loaded in the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrft.config.trainer import TrainerConfig
from rayrft.registry import load_plugins
from rayrft.trainer.commands import Stop


@dataclass(frozen=True)
class RankSetup:
    """What every rank is started with. ``trainer`` is the handle of the Trainer actor."""

    trainer: Any
    config: TrainerConfig
    model: str
    dtype: str
    temperature: float
    plugins: list[Path]
    seed: int = 0


def run_rank(options: dict[str, Any]) -> None:
    """Fetch commands from the Trainer actor and answer them until `Stop`.

    A failure is reported to the actor at once, with its own traceback, before Ray Train gets to see it.
    """
    import ray
    import ray.train
    import ray.train.torch

    setup: RankSetup = options["setup"]
    index = ray.train.get_context().get_world_rank()
    try:
        from rayrft.trainer.rank import Rank

        load_plugins(setup.plugins)
        rank = Rank(setup, index, ray.train.torch.get_device())
        number = 0
        ray.get(setup.trainer.ready.remote(index, rank.remark))
        while not isinstance(command := ray.get(setup.trainer.next_command.remote(number)), Stop):
            setup.trainer.answer.remote(index, number, rank.handle(command))
            number += 1
    except BaseException as error:
        ray.get(setup.trainer.failed.remote(index, error))
        raise
