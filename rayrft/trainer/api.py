"""The interfaces between the Trainer actor and its ranks. Imports no torch, which their callers do not need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rayrft.buffer.leases import Lease
from rayrft.buffer.log.row_log import RowRef
from rayrft.config import RunConfig
from rayrft.config.stage import StageConfig
from rayrft.config.trainer import TrainerConfig
from rayrft.runtime.handle import Handle
from rayrft.weights.messages import Link, SendReport

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm
    from rayrft.trainer.result import PairRanking, StepResult


class RankApi(Protocol):
    """The methods of a rank. Every rank runs every call, in the same order (SPMD)."""

    def open_stage(self, algorithm: Algorithm, stage: StageConfig, weights: Path | None) -> None:
        """Begin a stage with a new optimiser, from ``weights`` if given, else from the present weights."""

    def adjust(self, algorithm: Algorithm, stage: StageConfig, temperature: float) -> None:
        """Continue the open stage with other coefficients, learning rates, gradient bounds, steps, and temperature."""

    def train(self, lease: Lease) -> StepResult | None:
        """Make an optimiser step on a rank's share of a batch; None on all ranks if blocks are lost with the Buffer."""

    def rank_pairs(self, blocks: list[tuple[RowRef, np.ndarray]]) -> PairRanking:
        """Rank held-out preference pairs, whose blocks are `Buffer.partition`'s, by the model that the stage trains."""

    def gpus(self) -> tuple[str, list[str]]:
        """Return the id of the rank's node, and its GPUs as CUDA_VISIBLE_DEVICES names them."""

    def locate(self, timeout_s: float) -> tuple[str, int] | None:
        """Open the store of a future link to engines on rank 0; return its host and port, on other ranks None."""

    def connect(self, link: Link) -> str | None:
        """Connect to the engines of a link, and close the link before; return why that failed, if it did: an engine
        that died must not end the ranks."""

    def send(self, number: int, version: int, bucket_bytes: int) -> SendReport:
        """Send the weights of a version to all engines of the link, as its transfer ``number``. If that fails, the link
        is closed, which ends the transfer at the other engines, too."""

    def score(self, sequences: list[list[int]], images: list[tuple[str, ...]] | None = None) -> list[list[float]]:
        """Compute log-probs of sequences (with the image paths of each) under the present weights, at temperature 1."""

    def save(self, folder: Path) -> None:
        """Gather the weights that the stage trains, and write them in the background as a Hugging Face folder, a
        checkpoint registered with Ray Train; `Trainer.written` waits for it."""

    def checkpoint(self, folder: Path) -> None:
        """Write the whole state to a folder in the background; `Trainer.written` waits for it."""

    def restore(self, folder: Path, whole: bool) -> None:
        """Load a checkpoint: its weights, and if ``whole`` all other state of the open stage."""


@dataclass(frozen=True)
class RankCall:
    """A call of a method of `RankApi` by name."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def for_rank(self, rank: int) -> RankCall:
        """Return the call with the rank's part of a lease: else every rank gets the references of all ranks."""
        args = (each.for_rank(rank) if isinstance(each, Lease) else each for each in self.args)
        return replace(self, args=tuple(args))


class Mailbox(Protocol):
    """The methods of the Trainer actor that its ranks call."""

    async def ready(self, rank: int, warning: str | None) -> None:
        """Record that a rank has loaded the model, with its ``warning`` about unsupported fast paths."""

    async def loading(self, rank: int, doing: str) -> None:
        """Record that a rank makes progress with its start."""

    async def next_call(self, rank: int, number: int, answer: Any = None) -> RankCall | None:
        """Record a rank's ``answer`` to the call before. Wait for the call of this number and return it, or None if the
        ranks are to end; idle ranks wait here."""

    async def wrote(self, rank: int, folder: Path, problem: str | None) -> None:
        """Record that a rank has written its part of a checkpoint, or the ``problem`` it had."""

    async def failed(self, rank: int, error: BaseException) -> None:
        """Record a rank's fatal error. The first one is the root cause: others only follow from the missing peer."""


@dataclass(frozen=True)
class RankSetup:
    """Arguments that every rank is started with."""

    trainer: Handle[Mailbox]
    run: RunConfig
    config: TrainerConfig
    """That of the run, or with what has changed for the present ranks: see `TrainerPart.settings`."""
    model: str
    """Its folder, or its id on the hub."""
