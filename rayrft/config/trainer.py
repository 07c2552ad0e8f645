"""Updates, weight broadcast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rayrft.config.base import Section


class OptimizerConfig(Section):
    """AdamW with a learning-rate schedule over the steps of a stage, whatever the number of updates in each."""

    lr: float = Field(1e-4, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)


class LoraConfig(Section):
    """A low-rank adapter beside frozen weights: ``W + alpha / rank * B A`` in every target. There is no dropout."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers of the decoder by the end of their names, such as ``q_proj``; by default all but the head."""


class TrainerConfig(Section):
    """FSDP2 ranks driven by Ray Train."""

    ranks: int = Field(2, ge=1)
    cpus: float = Field(0.35, gt=0)
    gpus: float = Field(0.0, ge=0)
    """GPUs of one rank; a fraction shares the GPU with an engine (weight_sync.backend: ipc)."""
    memory_gib: float = Field(1.2, gt=0)
    """Main memory planned for one rank."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds after which a rank that does not hold the model yet ends the run."""
    micro_batch_tokens: int = Field(8192, ge=16)
    """Tokens in one forward pass, with their padding where rows are padded; a longer row has one to itself."""
    pack: bool = True
    """Rows share one sequence, without padding or attention between them, where the model allows it."""
    gradient_checkpointing: bool = False
    """Keep one state per layer for the backward pass and compute the others again: a third more time, less memory."""
    cpu_offload: bool = False
    """GPUs: parameters, gradients and optimiser state lie in main memory while they are not used."""
    lora: LoraConfig | None = None
    """Train an adapter only. Every stage begins a new one, on the weights that it starts from with theirs merged."""


@dataclass(frozen=True)
class ProbeBounds:
    """How far the log-probs of engine and trainer may lie apart on the probe batch: ``mean`` over all tokens, and
    ``most`` for this ``share`` of them.

    In bfloat16 logits between 16 and 32 lie 0.125 apart: unlikely tokens differ by several tenths though all is well.
    """

    mean: float
    most: float
    share: float


class WeightSyncConfig(Section):
    """How new weights reach the engines."""

    backend: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """auto: gloo for CPU engines, nccl for whole GPUs, ipc where engine and trainer share a GPU."""
    bucket_mib: float = Field(4.0, gt=0)
    probe_every: int = Field(50, ge=1)
    """Compare engine and trainer log-probs on a probe batch at the first sync and at every n-th after it."""
    tolerance: float | None = Field(None, gt=0)
    """Difference of a token's log-prob that is accepted: of every token in float32, by default 1e-4; of 99 in 100 in
    bfloat16, by default 0.2, with a mean of at most 0.15 times that."""
    deadline_s: float = Field(120.0, gt=0)
    """Seconds after which a sync that has not finished ends the run."""
