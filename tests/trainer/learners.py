"""Small learners and the rows that they train on."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rayrft.algorithms import build
from rayrft.config.stage import UpdateConfig
from rayrft.config.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from rayrft.trainer.annotation import with_logprobs
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.dcp import Checkpointer
from rayrft.trainer.learner import Learner
from rayrft.trainer.loading import rank_mesh, shard
from rayrft.trainer.lora import Lora
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy
from rayrft.trainer.reward_model import RewardClassifier
from rayrft.trainer.value_model import Critic

CPU = torch.device("cpu")
PLAIN = OptimizerConfig(lr=1e-2)
ADAPTER = LoraConfig(rank=4, alpha=8)


def qwen3(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, **settings: Any) -> Any:
    """A Qwen3 with tied embeddings and random weights in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads}
    config = Qwen3Config(**{**sizes, "num_hidden_layers": layers, "tie_word_embeddings": True, **settings})
    return Qwen3ForCausalLM(config)


def make_model(*, pack: bool = True) -> Policy:
    torch.manual_seed(0)
    policy = Policy(qwen3(50, 16, 32, layers=2, heads=2).double())
    assert policy.enable_fast_paths(pack=pack) is None
    return policy


def move(model: nn.Module, by: float, seed: int = 3) -> Any:
    """Move the trainable parameters of a model, sharded or not, away from where they are."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                change = torch.randn(parameter.shape, generator=chance) * by
                if isinstance(parameter, DTensor):
                    change = distribute_tensor(change.to(parameter.dtype), parameter.device_mesh, parameter.placements)
                parameter.add_(change)
    return model


def adapt(
    policy: Policy, compute: torch.dtype = torch.float64, origin: str = "the model", config: LoraConfig = ADAPTER
) -> Policy:
    """The policy with an adapter, which has no effect yet."""
    policy.lora = Lora(policy.model, config, origin=origin, compute=compute, seed=0)
    return policy


def make_teacher() -> Policy:
    """A model of the policy's kind with other opinions."""
    teacher: Policy = move(make_model(), 0.1, seed=7).requires_grad_(False)
    return teacher


def make_learner(
    name: str,
    pieces: dict[str, Any] | None = None,
    *,
    policy: Policy | None = None,
    valued: Policy | None = None,
    optimizer: OptimizerConfig = PLAIN,
    update: UpdateConfig | None = None,
    tokens: int = 60,
    temperature: float = 1.0,
    sharded: bool = False,
    replicas: int = 1,
    compute: torch.dtype = torch.float32,
    skips: bool = False,
    device: torch.device = CPU,
) -> Learner:
    """A learner of these algorithm and models, by default small ones, with all that the algorithm needs."""
    policy, valued, algorithm = policy or make_model(), valued or make_model(), build(name, pieces)
    teacher = make_teacher() if "teacher" in algorithm.needs else None
    critic = Critic(valued) if "critic" in algorithm.needs else None
    scorer = RewardClassifier(valued, padding=None) if algorithm.trains_reward_model else None
    if sharded:
        mesh = rank_mesh("cpu", dist.get_world_size(), replicas)
        for model in (policy, teacher, critic, scorer):
            if model is not None:
                shard(model, mesh, compute)
    for model in (policy, teacher, critic, scorer):
        if model is not None:
            model.to(device)
    if critic is not None:
        critic.optimizer = Optimizer(critic.parameters(), OptimizerConfig(lr=1e-2), 10)
    chosen = {"micro_batch_tokens": tokens, "not_finite": "skip" if skips else "end"}
    config = TrainerConfig().model_copy(update=chosen)  # some tests have fewer tokens than a config may have
    learner = Learner(policy, config, temperature=temperature, device=device)
    learner.open_stage(algorithm, optimizer, 10, update, critic, teacher, scorer)
    return learner


def make_rows(count: int = 12) -> list[TrainRow]:
    """Rows of very different lengths, a third of them expert rows."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(count):
        length = int(rng.integers(4, 24))
        mask = np.zeros(length, dtype=np.uint8)
        mask[int(rng.integers(1, length - 1)) :] = 1
        expert = index % 3 == 0
        rows.append(
            TrainRow(
                rng.integers(0, 50, length).astype(np.int32),
                mask,
                (mask * rng.normal(-4, 0.3, length)).astype(np.float32),
                (mask * (0.0 if expert else rng.normal())).astype(np.float32),
                expert,
                weight=1.0 + index % 2,
            )
        )
    return rows


def own_rows(count: int = 12) -> list[TrainRow]:
    return [replace(row, expert=False, weight=1.0, reward=i / 10) for i, row in enumerate(make_rows(count))]


def blank(row: TrainRow, **fields: Any) -> TrainRow:
    """The row as an expert's, without advantages and log-probs of who sampled it."""
    zeros = np.zeros(len(row.token_ids), np.float32)
    return replace(row, logprobs=zeros, advantages=zeros, weight=1.0, expert=True, **fields)


def labelled() -> list[TrainRow]:
    """Labelled rows, each with a prompt of its own."""
    made = [blank(row, chosen=number % 3 > 0) for number, row in enumerate(make_rows(10))]
    for number, row in enumerate(made):
        row.token_ids[0] = number
    return made


def pairs(count: int = 6) -> list[TrainRow]:
    """Pairs of rows with the same prompt. No two pairs begin alike: what is computed for both of two rows is rounded
    otherwise, for norms compute in float32."""
    made = []
    for number, row in enumerate(own_rows(count)):
        start = int(row.mask.argmax())
        row.token_ids[0] = number
        ids = np.concatenate([row.token_ids[:start], row.token_ids[start:][::-1], row.token_ids[:2]])
        mask = np.concatenate([row.mask, np.ones(2, np.uint8)])
        other = blank(replace(row, token_ids=ids, mask=mask), pair=number)
        made += [blank(row, pair=number, chosen=True), other]
    return made


def mine(rows: list[TrainRow]) -> list[TrainRow]:
    """This rank's part of the rows, of which those of a pair follow each other."""
    units = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    return [row for unit in units[dist.get_rank() :: dist.get_world_size()] for row in unit]


def on_policy(learner: Learner, rows: list[TrainRow]) -> list[TrainRow]:
    """The rows with the log-probs that the learner's own policy gives them, as an engine would."""
    micros = learner.make_micro_batches([rows])
    [batch] = with_logprobs(micros, "proximal_logprobs", learner.policy, learner.temperature)
    found = {}
    for micro in batch:
        assert micro.tokens.proximal_logprobs is not None
        each = micro.tokens.proximal_logprobs.split(micro.lengths)
        for ids, logprobs in zip(micro.token_ids.split(micro.lengths), each, strict=True):
            found[tuple(ids.tolist())] = logprobs.numpy().astype(np.float32)
    return [replace(row, logprobs=found[tuple(row.token_ids.tolist())]) for row in rows]


def full(tensor: Tensor) -> Tensor:
    """The tensor, gathered from its shards."""
    found: Tensor = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return found


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """All numbers of tensors, gathered from their shards."""
    return torch.cat([full(each).flatten() for each in tensors if each is not None])


def weights(learner: Learner) -> Tensor:
    return flat(learner.trained.parameters())


def gradient_of(learner: Learner) -> Tensor:
    return flat(parameter.grad for parameter in learner.trained.parameters())


def gradient(learner: Learner, rows: list[TrainRow]) -> tuple[Tensor, Tensor]:
    """All parts of the loss, which is first, and the whole gradient; both over all ranks."""
    parts, _ = learner.gradient(rows)
    return parts.stack(), gradient_of(learner)


def write(learner: Learner, folder: Path, meanwhile: list[TrainRow]) -> list[str | None]:
    """Write a checkpoint while the learner trains on; return the problems."""
    said: list[str | None] = []
    written = threading.Event()
    Checkpointer().save(learner, folder, lambda problem: (said.append(problem), written.set())[1])
    learner.step([meanwhile])  # what is written must not be what the policy has become
    assert written.wait(60)
    return said
