"""What the Trainer's benches train: a Qwen3 of any size with random weights, and rows for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rayrft.algorithms import build
from rayrft.config.trainer import OptimizerConfig, TrainerConfig
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.learner import Learner
from rayrft.trainer.loading import shard
from rayrft.trainer.policy import Policy
from tests.trainer.learners import qwen3

OPTIMIZER = OptimizerConfig(lr=1e-5)


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def model(self) -> Any:
        """Random weights in float32, the same every time."""
        torch.manual_seed(0)
        heads = {"num_key_value_heads": self.kv_heads, "head_dim": self.head_dim}
        ends = {"max_position_embeddings": 1 << 16, "eos_token_id": None, "bos_token_id": None}
        return qwen3(self.vocabulary, self.hidden, self.intermediate, self.layers, self.heads, **heads, **ends)

    def flops(self, lengths: Sequence[int], predicted: int) -> float:
        """Of one training step on rows of these lengths: six for each weight and token (Kaplan et al. 2020,
        arXiv:2001.08361), the head's only for the ``predicted`` tokens, and the two products of attention, half of
        which causality leaves out (Dao 2023, arXiv:2307.08691). What is computed twice counts once."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        weights = self.layers * (attention + 3 * self.hidden * self.intermediate)
        pairs = sum(length**2 for length in lengths) / 2
        return (
            6 * weights * sum(lengths)
            + 6 * self.hidden * self.vocabulary * predicted
            + 12 * self.layers * self.heads * self.head_dim * pairs
        )


def log_normal_lengths(rows: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths in random order; the two ends lie two standard deviations from the middle, and what is beyond is cut."""
    middle, sigma = np.log(shortest * longest) / 2, np.log(longest / shortest) / 4
    drawn = np.random.default_rng(seed).lognormal(middle, sigma, rows)
    return [int(length) for length in drawn.clip(shortest, longest).round()]


def make_rows(
    lengths: Sequence[int], prompt: int, vocabulary: int, *, expert: bool = False, seed: int = 1
) -> list[TrainRow]:
    """Rows that begin with ``prompt`` tokens; the policy that sampled the others was about that of random weights."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        mask = np.arange(length) >= prompt
        rows.append(
            TrainRow(
                rng.integers(0, vocabulary, length).astype(np.int32),
                mask.astype(np.uint8),
                (mask * rng.normal(-np.log(vocabulary), 0.1, length)).astype(np.float32),
                (mask * rng.normal()).astype(np.float32),
                expert,
            )
        )
    return rows


def join_alone(device: torch.device) -> None:
    """The default process group, of this process only."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def make_learner(
    policy: Policy,
    algorithm: str,
    *,
    tokens: int,
    device: torch.device,
    compute: torch.dtype,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> Learner:
    """A learner as a rank of the Trainer builds it. Raises RuntimeError where the policy would not pack."""
    if remark := policy.enable_fast_paths(pack=True, compute=compute):
        raise RuntimeError(remark)
    sharded = shard(policy, init_device_mesh(device.type, (1,)), compute)
    learner = Learner(sharded, TrainerConfig(micro_batch_tokens=tokens), temperature=1.0, device=device)
    learner.open_stage(build(algorithm), optimizer, steps=1_000_000)
    return learner
