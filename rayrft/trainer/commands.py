"""Commands of the Trainer. Every rank runs every command, in the same order (SPMD)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rayrft.buffer.leases import Lease
from rayrft.buffer.log.row_log import Ref
from rayrft.config.stage import StageConfig
from rayrft.weights.messages import Link, Sent

if TYPE_CHECKING:  # these import torch, which senders of commands do not need
    from rayrft.algorithms import Algorithm
    from rayrft.trainer.rank import Rank
    from rayrft.trainer.result import PairRanking, StepResult

R = TypeVar("R")


class Command(ABC, Generic[R]):
    """A command, whose answer by every rank is an ``R``."""

    @abstractmethod
    def run(self, rank: Rank) -> R:
        """Execute the command on a rank."""


def command_name(command: Command[Any]) -> str:
    """Return the name of a command, as the label of a wait for it."""
    return type(command).__name__


@dataclass(frozen=True)
class OpenStage(Command[None]):
    """Begin a stage with a new optimiser, from ``weights`` if given, else from the present weights."""

    algorithm: Algorithm
    stage: StageConfig
    weights: Path | None

    def run(self, rank: Rank) -> None:
        rank.open_stage(self.algorithm, self.stage, self.weights)


@dataclass(frozen=True)
class Train(Command["StepResult | None"]):
    """Make one optimiser step on a batch; None by every rank if blocks are lost because the Buffer died."""

    lease: Lease

    def run(self, rank: Rank) -> StepResult | None:
        return rank.train(self.lease)


@dataclass(frozen=True)
class RankPairs(Command["PairRanking"]):
    """Rank held-out preference pairs, whose blocks are `Buffer.partition`'s, by what the stage trains."""

    blocks: list[tuple[Ref, np.ndarray]]

    def run(self, rank: Rank) -> PairRanking:
        return rank.rank_pairs(self.blocks)


@dataclass(frozen=True)
class Locate(Command["tuple[str, int] | None"]):
    """Open the store of a link to engines on rank 0; return its host and port, on other ranks None."""

    timeout_s: float

    def run(self, rank: Rank) -> tuple[str, int] | None:
        return rank.sender.locate(self.timeout_s)


@dataclass(frozen=True)
class Connect(Command[None]):
    """Connect to the engines of a link."""

    link: Link

    def run(self, rank: Rank) -> None:
        rank.sender.connect(self.link)


@dataclass(frozen=True)
class Send(Command[Sent]):
    """Send the weights to all engines of the link, as its transfer ``number``."""

    number: int
    bucket_bytes: int

    def run(self, rank: Rank) -> Sent:
        return rank.sender.send(self.number, self.bucket_bytes)


@dataclass(frozen=True)
class Score(Command[list[list[float]]]):
    """Compute log-probs of sequences under the present weights, at temperature 1."""

    sequences: list[list[int]]
    images: list[tuple[str, ...]] | None = None
    """Image paths by sequence."""

    def run(self, rank: Rank) -> list[list[float]]:
        return rank.learner.score(self.sequences, self.images)


@dataclass(frozen=True)
class Save(Command[str]):
    """Write the weights of what the stage trains as a Hugging Face folder and register it as a checkpoint with Ray
    Train."""

    folder: Path

    def run(self, rank: Rank) -> str:
        return rank.save(self.folder)


@dataclass(frozen=True)
class Checkpoint(Command[None]):
    """Write the whole state to a folder in the background; `Trainer.written` waits for it."""

    folder: Path

    def run(self, rank: Rank) -> None:
        rank.checkpoint(self.folder)


@dataclass(frozen=True)
class Restore(Command[None]):
    """Load a checkpoint: its weights, and if ``whole`` all other state of the open stage."""

    folder: Path
    whole: bool

    def run(self, rank: Rank) -> None:
        rank.restore(self.folder, self.whole)


@dataclass(frozen=True)
class Stop(Command[None]):
    """End the ranks, which look for it before they run a command."""

    def run(self, rank: Rank) -> None:
        pass
