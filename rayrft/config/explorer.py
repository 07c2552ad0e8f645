"""Config of rollouts: engines, sampling and filtering of groups."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rayrft.config.base import Changeable, LocalPath, Section, invalid, section_rule


class EngineConfig(Section):
    """vLLM engines. Without GPUs they run on the CPU."""

    count: int = Field(2, ge=1)
    cpus: float = Field(0.35, gt=0)
    gpus: float = Field(0.0, ge=0)
    """GPUs of one engine; a fraction is its share of each of its ``tensor_parallel`` GPUs, which a trainer rank has,
    too (weight_sync.backend: ipc)."""
    memory_gib: float = Field(1.8, gt=0)
    """CPU memory reserved for one engine. With a tiny model its actor takes 0.5 GiB and vLLM's core 1.2 GiB."""
    tensor_parallel: int = Field(1, ge=1)
    kv_cache_mib: int = Field(64, ge=8)
    """KV cache of an engine on a CPU, which must hold a row of ``max_length`` tokens."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory that an engine takes. By default 0.85 of ``gpus`` (of a whole GPU above 1); beside a
    trainer rank what the rank leaves by the plan of its memory, see `rayrft plan`."""
    max_running: int | None = Field(None, ge=1)
    """Sequences an engine decodes at once; by default 256 on CPUs, and vLLM's number for the GPU, 256 or 1,024."""
    enforce_eager: bool = Field(default_factory=lambda given: not given["gpus"])
    """Compile nothing and use no CUDA graphs; on GPUs by default false."""
    sleep: bool = False
    """Free an engine's GPU memory while the trainer works (trainer and engine on one GPU)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine by their names there, such as ``max_num_batched_tokens`` or
    ``attention_backend``. Those that alter log-probs are for auxiliary models, unless ``proven`` has them."""
    proven: LocalPath | None = None
    """File of ``cluster/gpu_check.sh`` with the options that alter log-probs, and by how much they did on a GPU. Those
    within ``weight_sync.tolerance`` are accepted with the same release of vLLM."""

    @property
    def gpu_share(self) -> float:
        """``gpu_memory_utilization``, or its default."""
        return self.gpu_memory_utilization or 0.85 * min(self.gpus, 1.0)

    @property
    def most_running(self) -> int:
        """``max_running``, or the largest default."""
        return self.max_running or (1024 if self.gpus else 256)

    def check_alone(self, section: str) -> None:
        """Raise `invalid` for what an engine can only have beside trainer ranks: more memory than its part of a GPU
        that engines share, or shares of several GPUs."""
        if 0 < self.gpus < self.gpu_share:
            problem, field = f"is a share of a whole GPU, of which gpus gives {self.gpus:g}", "gpu_memory_utilization"
            raise invalid(f"{section}.{field}", problem, "lower it, or remove it", value=self.gpu_memory_utilization)
        if self.gpus < 1 < (parallel := self.tensor_parallel):
            problem, remedy = "needs whole GPUs, unless trainer ranks share them", f"set engine.gpus: {parallel}"
            raise invalid(f"{section}.tensor_parallel", problem, remedy, value=parallel)

    @section_rule
    def _gpus(self) -> None:
        if self.gpus > 1 and self.gpus % 1:
            raise invalid("gpus", "must be a whole number above 1", f"give {round(self.gpus)}", value=self.gpus)
        if self.tensor_parallel > 1 and not self.gpus:
            raise invalid("tensor_parallel", "needs GPUs", "use more engines on CPUs", value=self.tensor_parallel)
        default = type(self).model_fields["kv_cache_mib"].default
        if self.gpus and self.kv_cache_mib != default:
            remedy = "set gpu_memory_utilization, or remove it"
            raise invalid("kv_cache_mib", "is only used without GPUs", remedy, value=self.kv_cache_mib)
        if self.gpus >= 1 and self.gpus != self.tensor_parallel:
            problem = f"must equal tensor_parallel, {self.tensor_parallel}"
            raise invalid("gpus", problem, f"give {self.tensor_parallel}, or set tensor_parallel", value=self.gpus)


class RepetitionConfig(Section):
    """When an answer repeats itself: it ends in a pattern of tokens, ``count`` times in a row."""

    min_pattern: int = Field(1, ge=1)
    """Shortest pattern, in tokens."""
    max_pattern: int = Field(32, ge=1)
    """Longest pattern, in tokens."""
    count: int = Field(8, ge=2)

    @section_rule
    def _bounds(self) -> None:
        if self.min_pattern > self.max_pattern:
            raise invalid("min_pattern", "must be at most max_pattern", "lower it", value=self.min_pattern)


class PartialConfig(Section):
    """Partial rollouts (Kimi k1.5, arXiv:2501.12599, 2.6.2): groups with unfinished answers are parked in the Buffer
    with their tokens, and continued under the next weights, before new groups are started.

    A continued attempt runs its workflow again with the recorded answers. The environment must answer as before; at the
    first difference the attempt samples again."""

    budget: int | None = Field(None, ge=1)
    """Tokens that an attempt may sample until it is parked; by default only surplus groups of over-sampling are."""
    old_tokens: Literal["train", "mask"] = "mask"
    """Whether tokens from before a group was parked are trained, as far as ``max_staleness`` allows, or never."""


class SamplingConfig(Section):
    """Sampling for training. Top-k and top-p would truncate the support, and change the policy's log-probs."""

    temperature: Changeable[float] = Field(1.0, gt=0, le=2)
    max_tokens: int = Field(32, ge=1)
    """Longest answer, in tokens; with engines on GPUs by default as long as ``model.max_length`` allows."""
    seeded: bool | None = None
    """Whether the run's seed determines the answers. True by default on CPUs; on a GPU it costs speed."""
    max_prompt_tokens: int = Field(256, ge=1)
    """A task with a longer prompt is dropped with a reason and counted."""
    repetition: RepetitionConfig | None = None
    """Stop an answer that repeats itself, with stop reason ``repetition``; `reward` has its penalty."""


class EnvironmentConfig(Section):
    """The environment that workflows act in. Each attempt has its own, in its own process if it may block."""

    name: str
    """gymnasium, reasoning_gym, openenv, a name that a plugin registers, or ``package.module:attribute``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Parameters of its class."""
    deadline_s: float = Field(30.0, gt=0)
    """Seconds for creation (in a process at least 60), ``reset`` or ``step``; else the attempt is a ``timeout``."""
    observation_limit: int = Field(20_000, ge=1)
    """Longest observation, in characters; a longer one fails the attempt."""
    image_bytes: int = Field(8 << 20, ge=0)
    """Largest sum of the bytes of an observation's images, if it comes from a process; more fails the attempt."""
    same_episode: bool = True
    """Whether all attempts of a group have the same seed and so the same episode, as comparing advantages need."""
    processes: int = Field(64, ge=1)
    """Environments in processes at once, in each Explorer; further attempts wait for one to end."""
    spares: int = Field(2, ge=0)
    """Processes with an environment that are started before an attempt needs them."""
    reset_retries: int = Field(2, ge=0)
    """How often a new process is tried if one dies before the first action."""


class ExplorerConfig(Section):
    workflow: str = "single_turn"
    """The workflow of tasks that do not name one."""
    workflow_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of workflows, by the workflow's name."""
    workflow_processes: int = Field(64, ge=1)
    """Attempts in processes at once, in each Explorer, of a workflow that declares that it may block."""
    environment: EnvironmentConfig | None = None
    """The environment, for workflows that need one."""
    deadline_s: float = Field(600.0, gt=0)
    """Seconds that an attempt may take, without waits for an engine with room; else it is dropped as ``timeout``."""
    group_deadline_s: float | None = Field(None, gt=0)
    """Seconds that a group may take, counted while an attempt runs. Then its unfinished attempts are dropped."""
    count: int = Field(1, ge=1)
    """Explorer actors, each with its own event loop. They share the tasks; the first one evaluates."""
    cpus: float = Field(0.2, gt=0)
    """CPUs of one Explorer."""
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    drop_zero_variance: bool = True
    """Drop a group without a gradient, whose advantages are all 0 (equal rewards, apart from an overlong punishment),
    and draw another task. With a KL, an entropy term, a critic, or advantages normalised over the batch a group has a
    gradient, and is kept. (The dynamic sampling of other systems drops it also with a KL.)"""
    max_tries: int = Field(1000, ge=1)
    """Consecutive dropped groups of one Explorer after which the run ends; an explore job continues."""
    partial: PartialConfig | None = None
    """Park unfinished groups instead of waiting for them; by default a group is sampled without a pause."""
    over_sampling: float = Field(1.0, ge=1.0, le=8.0)
    """Ratio of groups in flight to groups needed. Above 1 a step does not wait for stragglers; once it is leased, its
    surplus groups are abandoned (with ``partial``, parked), or dropped and counted."""
