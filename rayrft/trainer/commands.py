"""Commands of the Trainer. Every rank runs every command, in the same order (SPMD)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayrft.buffer.leases import Lease
from rayrft.config.stage import StageConfig
from rayrft.weights.messages import Link

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm  # imports torch, which senders of commands do not need


@dataclass(frozen=True)
class OpenStage:
    """Begin a stage with a new optimiser, from ``weights`` if given, else from the present weights."""

    algorithm: Algorithm
    stage: StageConfig
    weights: Path | None


@dataclass(frozen=True)
class Load:
    """Fetch the rank's share of a batch; returns False if its blocks are lost because the Buffer died."""

    lease: Lease


@dataclass(frozen=True)
class Train:
    """Make one optimiser step on the loaded batch; returns a `StepResult`."""


@dataclass(frozen=True)
class Locate:
    """Open the store of a link to engines on rank 0; returns (host, port)."""

    timeout_s: float


@dataclass(frozen=True)
class Connect:
    """Connect to the engines of a link."""

    link: Link


@dataclass(frozen=True)
class Send:
    """Send the weights to all engines of the link, as its transfer ``number``; returns a `Sent`."""

    number: int
    bucket_bytes: int


@dataclass(frozen=True)
class Score:
    """Compute log-probs of sequences under the present weights, at temperature 1; returns a list of lists."""

    sequences: list[list[int]]
    images: list[tuple[str, ...]] | None = None
    """Image paths by sequence."""


@dataclass(frozen=True)
class Save:
    """Write the weights as a Hugging Face folder and register it as a checkpoint with Ray Train."""

    folder: Path


@dataclass(frozen=True)
class Checkpoint:
    """Write the whole state to a folder in the background; `Trainer.written` waits for it."""

    folder: Path


@dataclass(frozen=True)
class Restore:
    """Load a checkpoint: its weights, and if ``whole`` all other state of the open stage."""

    folder: Path
    whole: bool


@dataclass(frozen=True)
class Stop:
    """End the ranks."""


Command = OpenStage | Load | Train | Locate | Connect | Send | Score | Save | Checkpoint | Restore | Stop
