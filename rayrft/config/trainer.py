"""Config of the trainer: optimiser, ranks, LoRA and weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rayrft.config.base import Changeable, Section, invalid, section_rule

STORAGES = "file", "s3", "gs", "gcs", "abfs", "abfss"
"""Schemes of the addresses at which weights may be files."""


class OptimizerConfig(Section):
    """AdamW with a learning-rate schedule over the steps of a stage, independent of the number of updates per step."""

    lr: Changeable[float] = Field(1e-4, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: Changeable[float] = Field(1.0, gt=0)


class LoraConfig(Section):
    """A low-rank adapter on frozen weights: ``W + alpha / rank * B A`` in every target. There is no dropout."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers of the decoder by the end of their names, such as ``q_proj``; by default all but the head."""
    frozen: Literal["dtype", "nf4"] = "dtype"
    """How targets hold their frozen weights: in ``model.dtype``, or rounded to 4 bits in blocks of 64 inputs (NF4,
    Dettmers et al. 2023, arXiv:2305.14314), a quarter of the memory. Engines and merged exports have the rounded ones,
    too."""


Accumulate = Literal["auto", "sharded", "unsharded"]
AdamMoments = Literal["float32", "8bit"]


class TrainerConfig(Section):
    """FSDP2 ranks driven by Ray Train."""

    ranks: int = Field(2, ge=1)
    replicas: int = Field(1, ge=1)
    """Copies of the sharded model (HSDP): the ranks of one, which follow each other, share its weights and moments, and
    only gradients travel between copies, such as those of different nodes."""
    cpus: float = Field(0.35, gt=0)
    gpus: float = Field(0.0, ge=0)
    """GPUs of one rank; a fraction shares the GPU with an engine (weight_sync.backend: ipc)."""
    memory_gib: float = Field(1.2, gt=0)
    """CPU memory reserved for one rank."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds without progress after which a rank that loads the model ends the run."""
    micro_batch_tokens: int = Field(8192, ge=16)
    """Tokens in one forward pass, including padding if rows are padded; a longer row gets its own."""
    head_chunk: int | None = Field(None, ge=16)
    """Tokens whose logits exist at once; by default, on GPUs, as many as take a fortieth of the memory."""
    pack: bool = True
    """Pack rows into one sequence, without padding or attention between them, if the model supports it."""
    gradient_checkpointing: bool = False
    """Keep one state per layer for the backward pass and recompute the others: a third more time, less memory."""
    compile: Literal["off", "layers"] = "off"
    """``layers``: compile every decoder layer (`torch.compile`), which takes minutes at the first step, and needs a C
    compiler on every node. Attention on CPUs is not compiled."""
    accumulate: Accumulate = "auto"
    """Gradients of a step's micro-batches add up ``sharded``, reduced after each, or ``unsharded``, reduced once. The
    latter needs less communication, and 4 more bytes a parameter on every rank; auto takes it if that is at most 1
    GiB."""
    moments: AdamMoments = "float32"
    """AdamW's two moments. ``8bit``: quantised in blocks (Dettmers et al. 2022, arXiv:2110.02861) by the package
    torchao, which every node needs: 2 bytes a parameter instead of 8. It is resumed with as many ranks as before."""
    cpu_offload: bool = False
    """GPUs: keep parameters, gradients and optimiser state in CPU memory while unused."""
    not_finite: Literal["end", "skip", "rollback"] = "end"
    """Effect of a loss or gradient that is not finite. The run ends, or the update is skipped and its rows count as
    trained, or the run returns to its latest checkpoint and drops the batch as ``not_finite``."""
    rollbacks: int = Field(3, ge=1)
    """Largest number of these returns since the run was started or resumed; one more ends the run. Each is also one of
    ``restarts.per_hour``."""
    router_loss: float = Field(0.0, ge=0)
    """Policies with experts: the weight of the loss that balances their load (Fedus et al. 2021, arXiv:2101.03961, eq.
    4 to 6), the mean over the micro-batches of an update. It is not part of the loss that is reported."""
    expert_parallel: bool = False
    """Models with experts: every rank keeps its part of the experts of each layer whole, and tokens travel to them
    (all-to-all), where else the weights of all experts travel to every rank. By transformers' plan for the model."""
    lora: LoraConfig | None = None
    """Train only an adapter. Every stage starts a new one, on its initial weights with their adapter merged."""

    @property
    def shards(self) -> int:
        """Ranks that share the weights of a copy of the model."""
        return self.ranks // self.replicas

    @section_rule
    def _used(self) -> None:
        if self.ranks % self.replicas:
            problem = f"must divide ranks, {self.ranks}"
            raise invalid("replicas", problem, "give the number of nodes, or 1", value=self.replicas)
        if self.expert_parallel and self.replicas > 1:
            problem, remedy = "needs all ranks in one copy of the model", "set replicas: 1, or expert_parallel: false"
            raise invalid("expert_parallel", problem, remedy, value=True)
        if self.router_loss and self.lora is not None:
            raise invalid("router_loss", "is not used with an adapter, which leaves routers as they are", "remove it")
        if self.not_finite != "rollback" and self.rollbacks != type(self).model_fields["rollbacks"].default:
            problem, remedy = "is only used with not_finite: rollback", "set it, or remove rollbacks"
            raise invalid("rollbacks", problem, remedy, value=self.rollbacks)


@dataclass(frozen=True)
class ProbeBounds:
    """Allowed difference of engine and trainer log-probs: ``mean`` over all tokens, ``most`` for this ``share``. The
    spacing of bfloat16 between 16 and 32 is 0.125: log-probs of unlikely tokens validly differ by several tenths."""

    mean: float
    most: float
    share: float


class WeightFilesConfig(Section):
    """Weights as files (``weight_sync.backend: files``), which engines of other clusters may read, too."""

    address: str | None = None
    """A folder that all nodes share, or that of an object store, such as s3://bucket/prefix, with the credentials of
    the environment. No other run may write there. By default ``weights`` in the run's folder."""
    full_every: int = Field(20, ge=1)
    """Every n-th version is written in full, the others as what has changed."""

    @field_validator("address")
    @classmethod
    def _storage(cls, address: str | None) -> str | None:
        scheme, mark, _ = (address or "").partition("://")
        if mark and scheme not in STORAGES:
            remedy = f"give a folder, or an address that begins with {', '.join(f'{each}://' for each in STORAGES)}"
            raise invalid("", "has an unknown scheme", remedy, value=address)
        return address if mark or not address else str(Path(address).expanduser().absolute())


class WeightSyncConfig(Section):
    """Transfer of new weights to the engines."""

    backend: str = "auto"
    """gloo for CPU engines, nccl for whole GPUs, ipc for shared GPUs, files, or a plug-in's; auto: the first that fits,
    but for files."""
    files: WeightFilesConfig = WeightFilesConfig()
    bucket_mib: float | None = Field(None, gt=0)
    """Size of the pieces in which weights travel; by default 32 MiB, with GPUs 512."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Policy for the KV cache of running requests: ``recompute`` it with the new weights, or ``keep`` it for them, so
    that the trainer's log-probs of later tokens differ from the engine's."""
    probe_every: int = Field(50, ge=1)
    """Compare engine and trainer log-probs on a probe batch at start, at the first sync of an update, at the first
    after engines have joined or left, and at every n-th after that."""
    tolerance: float | None = Field(None, gt=0)
    """Accepted difference of log-probs. float32: for all tokens, default 1e-4. bfloat16: for 99 in 100 tokens, default
    0.2, with a mean of at most 0.15 times that."""
    deadline_s: float = Field(120.0, gt=0)
    """Seconds after which a sync that has not finished ends the run."""
