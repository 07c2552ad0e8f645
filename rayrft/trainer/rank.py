"""One rank of the Trainer."""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rayrft.algorithms import Algorithm
from rayrft.buffer.leases import Lease, Unit, deal
from rayrft.buffer.log.row_log import RowRef
from rayrft.config.stage import StageConfig
from rayrft.data.models import attention_cost
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import WeightSyncError
from rayrft.files import Room
from rayrft.registry import load_plugins
from rayrft.runtime.handle import Handle, fetch
from rayrft.runtime.loading import LoadProgress
from rayrft.runtime.trace import Trace
from rayrft.trainer.api import Mailbox, RankApi, RankSetup
from rayrft.trainer.batches import TrainRow, fetch_mini_batches, fetch_rows
from rayrft.trainer.blame import device_failed, is_device_fault
from rayrft.trainer.dcp import Checkpointer
from rayrft.trainer.learner import Learner
from rayrft.trainer.loading import Loader, load_hf, rank_mesh
from rayrft.trainer.memory import memory_savings
from rayrft.trainer.model import gather, named_weights, save_hf
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.result import PairRanking, StepResult
from rayrft.trainer.reward_model import RewardClassifier, padding_of
from rayrft.trainer.value_model import Critic
from rayrft.weights.channel import WeightChannel, open_store
from rayrft.weights.messages import Link, Parcel, SendReport, TensorMeta

_REPORT_S = 5.0
"""Seconds between reports of a start."""


def run_rank(options: dict[str, Any]) -> None:
    """Fetch calls from the Trainer actor and answer them until there are no more.

    A failure is reported to the actor first, with its traceback, before Ray Train handles it.
    """
    import ray.train
    import ray.train.torch

    setup: RankSetup = options["setup"]
    trainer = setup.trainer
    index, where = ray.train.get_context().get_world_rank(), platform.node()
    rank: Rank | None = None
    try:
        load_plugins(setup.run.plugins)
        device = ray.train.torch.get_device()
        if device.type == "cuda":
            where += f", GPU {torch.cuda.get_device_properties(device).uuid}"
        with _report_start(trainer, index):
            rank = Rank(setup, index, device)
        number, answer = 0, None
        rank.release()
        fetch(trainer.call(Mailbox.ready, index, rank.warning))
        while (call := fetch(trainer.call(Mailbox.next_call, index, number, answer))) is not None:
            number, answer = number + 1, getattr(rank, call.method)(*call.args, **call.kwargs)
            rank.release()
    except BaseException as error:
        half, beside = setup.run.model.dtype != "float32", rank.beside if rank is not None else {}
        savings = partial(memory_savings, setup.model, setup.config, half=half, **beside)
        fetch(trainer.call(Mailbox.failed, index, device_failed(error, index, where, setup.config, savings) or error))
        raise


@contextlib.contextmanager
def _report_start(trainer: Handle[Mailbox], index: int) -> Iterator[None]:
    """Report to the Trainer inside that the rank makes progress, whenever its memory has grown."""
    progress, started = LoadProgress("loads the model"), threading.Event()

    def report() -> None:
        while not started.wait(_REPORT_S):  # the memory of a process is not an event
            if progress.measure() < _REPORT_S:
                trainer.call(Mailbox.loading, index, progress.doing)

    threading.Thread(target=report, name="load progress", daemon=True).start()
    try:
        yield
    finally:
        started.set()


class Rank(RankApi):
    """A rank's models. The methods are documented in `RankApi`."""

    def __init__(self, setup: RankSetup, index: int, device: torch.device) -> None:
        self._setup, run = setup, setup.run
        Room.limit_s = run.monitor.stall_s / 2
        self._index = index
        self._device = device
        if self._device.type == "cpu":
            torch.set_num_threads(max(1, int(setup.config.cpus)))
        self._compute: torch.dtype = getattr(torch, run.model.dtype)
        mesh = rank_mesh(self._device.type, setup.config.ranks, setup.config.replicas)
        self._loader = Loader(setup.config, mesh, device, self._compute, run.seed)
        self.warning = self._loader.fast_paths(setup.model).warning
        """Which fast paths the model does not support, and why; None if it supports all."""
        self.learner = Learner(
            self._loader.load(setup.model, lambda policy: policy),
            setup.config,
            temperature=run.explorer.sampling.temperature,
            device=self._device,
            seed=run.seed,
            attention=attention_cost(setup.model),
            trace=Trace(run.trace_folder, f"rank-{index}"),
        )
        self._checkpointer = Checkpointer()
        self._channel: WeightChannel | None = None
        self._store: TCPStore | None = None
        self.beside: dict[str, Any] = {}
        """The models beside the policy in the open stage, as `memory_savings` takes them."""

    def release(self) -> None:
        """Give GPU memory that torch keeps for later back to the driver, if an engine on the GPU needs it."""
        if self._setup.run.colocated and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def open_stage(self, algorithm: Algorithm, stage: StageConfig, weights: Path | None) -> None:
        # Free first, then load: the models of two stages need not fit into memory together.
        self.learner.close_stage()
        if weights is not None:
            load_hf(self.learner.policy, str(weights))
        needs = algorithm.needs
        self.beside = {"reference": "reference" in needs, "critic": "critic" in needs, "teacher": stage.teacher}
        critic = teacher = reward_model = None
        if "critic" in algorithm.needs:
            critic = self._loader.load(self._setup.model, Critic)  # not from the current policy
            updates, moments = stage.update.updates_per_step, self._setup.config.moments
            critic.optimizer = Optimizer(critic.parameters(), stage.critic_optimizer, stage.steps, updates, moments)
        if stage.teacher:
            teacher = self._loader.load(stage.teacher, lambda policy: policy, field="teacher", frozen=True)
        if algorithm.trains_reward_model:
            lora, padding = self.learner.policy.lora, padding_of(self._setup.model)
            base = self._setup.model if lora is None else lora.base
            reward_model = self._loader.load(base, lambda policy: RewardClassifier(policy, padding))
            reward_model.copy_decoder(self.learner.policy)
        self.learner.open_stage(algorithm, stage.optimizer, stage.steps, stage.update, critic, teacher, reward_model)

    def adjust(self, algorithm: Algorithm, stage: StageConfig, temperature: float) -> None:
        self.learner.adjust(algorithm, stage, temperature)

    def train(self, lease: Lease) -> StepResult | None:
        from ray.exceptions import ObjectLostError

        mini_batches: list[list[TrainRow]] = []
        lost = torch.zeros(1)
        try:
            with self.learner.phase("rows"):
                mini_batches = fetch_mini_batches(lease.shares[self._index], self.learner.algorithm)
        except ObjectLostError:
            lost += 1
        dist.all_reduce(lost)  # a rank alone would wait for the others in the step
        return None if lost else self.learner.step(mini_batches)

    def rank_pairs(self, blocks: list[tuple[RowRef, np.ndarray]]) -> PairRanking:
        [(ref, rows)] = blocks  # demonstrations are one block
        pairs = [Unit(ref, row, rows=2, tokens=1) for row in rows[::2].tolist()]
        share = deal([pairs], self._setup.config.ranks)[self._index]
        return self.learner.rank_pairs(fetch_rows(share, self.learner.algorithm))

    def gpus(self) -> tuple[str, list[str]]:
        import ray

        return ray.get_runtime_context().get_node_id(), [str(each) for each in ray.get_gpu_ids()]

    def locate(self, timeout_s: float) -> tuple[str, int] | None:
        if self._index:
            return None
        self._store = open_store(timeout_s)
        return self._store.host, self._store.port

    def connect(self, link: Link) -> str | None:
        self._disconnect()
        try:
            self._channel = WeightChannel(link, sends=True, index=self._index, device=self._device, store=self._store)
        except RuntimeError as error:  # of torch.distributed: an engine has not come
            return _lost_engine(error)
        return None

    def send(self, number: int, version: int, bucket_bytes: int) -> SendReport:
        if self._channel is None:  # it failed, or was that of ranks which have died
            return SendReport("", 0, "no link to the engines")
        policy, lora = self.learner.policy, self.learner.policy.lora
        # An adapter is small and engines merge it in float32, so it is not rounded.
        dtype = self._compute if lora is None else torch.float32
        metas = [TensorMeta.of(name, tensor, dtype) for name, tensor in named_weights(policy)]
        parcel = Parcel(metas, bucket_bytes, lora.adapter if lora is not None else None, version)
        tensors = (gather(tensor, dtype) for _, tensor in named_weights(policy))
        try:
            with self.learner.phase("send"):
                return SendReport(self._channel.send(number, parcel, tensors), parcel.nbytes)
        except (RuntimeError, WeightSyncError) as error:  # of torch.distributed, or of a transport: an engine is gone
            self._disconnect()
            return SendReport("", parcel.nbytes, _lost_engine(error))

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def score(self, sequences: list[list[int]], images: list[tuple[str, ...]] | None = None) -> list[list[float]]:
        return self.learner.score(sequences, images)

    def checkpoint(self, folder: Path) -> None:
        self._checkpointer.save(self.learner, folder, partial(self._wrote, folder))

    def _wrote(self, folder: Path, problem: str | None) -> None:
        self._setup.trainer.call(Mailbox.wrote, self._index, folder, problem)

    def restore(self, folder: Path, whole: bool) -> None:
        if whole:
            self._checkpointer.load(self.learner, folder)
        else:
            self._checkpointer.load_policy(self.learner.policy, folder)

    def save(self, folder: Path) -> None:
        import ray.train

        tokenizer = ChatTokenizer(self._setup.model, template=self._setup.run.model.template)
        write = save_hf(self.learner.trained, tokenizer, folder, dtype=self._compute, group=self._checkpointer.group)
        self._checkpointer.write(write, partial(self._wrote, folder))
        checkpoint = ray.train.Checkpoint.from_directory(str(folder)) if self._index == 0 else None
        ray.train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)


def _lost_engine(error: RuntimeError | WeightSyncError) -> str:
    """Return the error of a link to the engines as one line. Raises it if it is a fault of this rank's device."""
    if is_device_fault(error):
        raise error
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
