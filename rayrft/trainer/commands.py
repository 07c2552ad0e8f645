"""What the Trainer can be told to do. Each command runs on every rank, in the same order: the ranks are one program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rayrft.buffer.leases import Lease
from rayrft.config.stage import StageConfig
from rayrft.weights.messages import GroupPlan, TensorMeta

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm  # with it comes torch, which who gives commands does without


@dataclass(frozen=True)
class OpenStage:
    """Begin a stage: new optimiser; with ``weights``, from those instead of the present ones."""

    algorithm: Algorithm
    stage: StageConfig
    weights: Path | None


@dataclass(frozen=True)
class Load:
    """Fetch the rank's share of a batch; gives whether it could be had: its blocks are gone when the Buffer died."""

    lease: Lease


@dataclass(frozen=True)
class Train:
    """One optimiser step on what was loaded; gives a `StepResult`."""


@dataclass(frozen=True)
class Locate:
    """Where rank 0 can host the store of a weight group; gives (host, port)."""


@dataclass(frozen=True)
class Describe:
    """What a broadcast will send; gives a `Parcel`."""


@dataclass(frozen=True)
class Join:
    """Rank 0 joins a weight group."""

    plan: GroupPlan


@dataclass(frozen=True)
class Publish:
    """Send the weights to the group; gives the digest of what was sent."""

    metas: list[TensorMeta]
    bucket_bytes: int


@dataclass(frozen=True)
class Export:
    """ipc: lay the weights out in GPU buffers, kept until the next `Release`; gives an `Exported` per rank."""

    metas: list[TensorMeta]
    bucket_bytes: int


@dataclass(frozen=True)
class Release:
    """ipc: the engines are done with the exported buffers."""


@dataclass(frozen=True)
class Score:
    """Log-probs of sequences under the present weights, at temperature 1; gives a list of lists."""

    sequences: list[list[int]]
    images: list[tuple[str, ...]] | None = None
    """Of each sequence, where there are any."""


@dataclass(frozen=True)
class Save:
    """Write the weights as a Hugging Face folder and register it as a checkpoint with Ray Train."""

    folder: Path


@dataclass(frozen=True)
class Checkpoint:
    """Write the whole state to a folder, in the background: `Trainer.written` tells when it is there."""

    folder: Path


@dataclass(frozen=True)
class Restore:
    """Put the state of a checkpoint in place: weights, and with ``whole`` all else that the open stage has."""

    folder: Path
    whole: bool


@dataclass(frozen=True)
class Stop:
    """End of the program."""


Command = (
    OpenStage
    | Load
    | Train
    | Locate
    | Describe
    | Join
    | Publish
    | Export
    | Release
    | Score
    | Save
    | Checkpoint
    | Restore
    | Stop
)


@dataclass(frozen=True)
class Exported:
    """ipc: the GPU (its UUID) that holds a rank's buffers, one handle per bucket, and the digest of their bytes."""

    device: str
    handles: list[str]
    digest: str
