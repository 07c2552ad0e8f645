"""The Trainer actor: sends calls to the ranks that Ray Train runs, and collects their answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rayrft.buffer.leases import Lease
from rayrft.config.trainer import TrainerConfig
from rayrft.errors import ActorDied, RayrftError, StorageError
from rayrft.files import free_mb
from rayrft.runtime.handle import Handle, Watched, once, root_cause
from rayrft.runtime.waits import WaitReport, Waits
from rayrft.trainer.api import RankApi, RankCall, RankSetup
from rayrft.trainer.batch_pipeline import BatchPipeline, ProcessedLease

P = ParamSpec("P")
R = TypeVar("R")


def ask_ranks(
    trainer: Handle[Trainer], method: Callable[Concatenate[RankApi, P], R], /, *args: P.args, **kwargs: P.kwargs
) -> Awaitable[list[R]]:
    """Start a method on every rank of a Trainer, whether or not the answers are awaited. Return the answers by rank.
    Raises the error of the first that fails."""
    return trainer.call(Trainer.call_ranks, RankCall(method.__name__, args, kwargs))


class Trainer(Watched):
    """The actor and `Mailbox` of its ranks. ``start`` returns when every rank has loaded the model; then `ask_ranks`
    makes calls, one at a time."""

    def __init__(self, config: TrainerConfig, group: Any, batches: Callable[[], BatchPipeline] | None = None) -> None:
        """``group`` has one bundle per rank; ``batches`` makes the operators on training batches."""
        self._batches = batches() if batches is not None else None
        self._config = config
        self._group = group
        self._lock = asyncio.Lock()
        self._changed, self._called = asyncio.Condition(), asyncio.Condition()
        self._number = -1
        self._call: RankCall | None = None
        self._stopped = False
        self._answers: dict[int, Any] = {}
        self._ready: dict[int, str | None] = {}
        self._late: asyncio.Timeout | None = None
        """Deadline of the start, which progress of a rank moves."""
        self._doing = ""
        self._written: dict[Path, dict[int, str | None]] = {}
        self._failure: Exception | None = None
        self._fit: asyncio.Task[None] | None = None
        self._waits = Waits("trainer")

    @once
    async def start(self, folder: Path, setup: RankSetup) -> str | None:
        """Start the ranks through Ray Train, which keeps its files in ``folder``.

        Returns a warning if a fast path is not supported. Raises the first rank's error, or ActorDied if one is late.
        """
        self._fit = asyncio.create_task(self._run(folder, setup))
        if self._batches is not None:
            with self._waits.on("operators", "ready"):
                await self._batches.operators.open()
        try:
            async with asyncio.timeout(self._config.start_timeout_s) as self._late, self._changed:
                await self._from_ranks("start", self._ready)
        except TimeoutError:
            ranks, limit_s = self._config.ranks, self._config.start_timeout_s
            late = sorted(set(range(ranks)) - self._ready.keys())
            problem = f"trainer ranks {late} of {ranks} are not up and have made no progress for {limit_s:g} s"
            remedy = "see their logs in the Ray dashboard, or raise trainer.start_timeout_s"
            raise ActorDied(problem, remedy, field=f"trainer rank {late[0]}") from None
        self._doing = ""
        return self._ready[0]

    async def process(self, lease: Lease) -> ProcessedLease | None:
        """Send a batch through the operators on batches; None if blocks are lost because the Buffer died."""
        from ray.exceptions import ObjectLostError

        assert self._batches is not None  # there are operators
        with self._waits.on("operators", f"batch of step {lease.step}"):
            try:
                return await self._batches.process(lease)
            except ObjectLostError:
                return None

    async def call_ranks(self, call: RankCall) -> list[Any]:
        """Make a call on every rank; see `ask_ranks`."""
        async with self._lock, self._changed:
            self._answers = {}
            await self._next(call)
            await self._from_ranks(call.method, self._answers)
            return [self._answers[rank] for rank in range(self._config.ranks)]

    async def written(self, folder: Path) -> None:
        """Wait until every rank has written its part of a checkpoint or export. Raises StorageError if one cannot."""
        async with self._changed:
            await self._from_ranks("part of a checkpoint", self._written.setdefault(folder, {}), folder)
            problems = [problem for problem in self._written.pop(folder).values() if problem is not None]
        if problems:
            problem = f"a checkpoint cannot be written: {problems[0]}"
            remedy = "free disk space or fix the permissions of the run's folder; then resume the run"
            raise StorageError(problem, remedy, field="storage", value=str(folder))

    async def stop(self) -> None:
        """End the ranks and wait until Ray Train has finished."""
        async with self._lock, self._changed:
            self._stopped = True
            self._changed.notify_all()
            await self._next(None)
        if self._fit is not None:
            await self._fit

    async def watch(self) -> None:
        """Wait until the ranks have been stopped; raise as soon as one has failed."""
        async with self._changed:
            await self._until(lambda: self._stopped)

    async def waiting(self) -> WaitReport:
        """Report which ranks have not answered, and for how long."""
        return replace(self._waits.report(), doing=self._doing)

    # Methods of `Mailbox`.

    async def ready(self, rank: int, warning: str | None) -> None:
        async with self._changed:
            self._ready[rank] = warning
            self._changed.notify_all()

    async def loading(self, rank: int, doing: str) -> None:
        if self._late is not None and rank not in self._ready:
            with contextlib.suppress(RuntimeError):  # it has expired
                self._late.reschedule(asyncio.get_running_loop().time() + self._config.start_timeout_s)
            self._doing = f"rank {rank} {doing}"
            self._waits.progressed("start of ranks")

    async def next_call(self, rank: int, number: int, answer: Any = None) -> RankCall | None:
        async with self._changed:
            if number == self._number + 1:
                self._answers[rank] = answer
            self._changed.notify_all()
        async with self._called:  # an answer does not wake the ranks that wait here
            await self._called.wait_for(lambda: self._number >= number)
        return self._call and self._call.for_rank(rank)

    async def wrote(self, rank: int, folder: Path, problem: str | None) -> None:
        async with self._changed:
            self._written.setdefault(folder, {})[rank] = problem
            self._changed.notify_all()

    async def failed(self, rank: int, error: BaseException) -> None:
        async with self._changed:
            if self._failure is None:
                self._failure = _cause(error, f"trainer rank {rank}")
            self._changed.notify_all()

    async def _next(self, call: RankCall | None) -> None:
        async with self._called:
            self._number += 1
            self._call = call
            self._called.notify_all()

    async def _from_ranks(self, what: str, answers: Mapping[int, Any], folder: Path | None = None) -> None:
        """Wait until every rank has an entry among the answers; ``folder`` is where they write."""

        def missing() -> str:
            room = f"; {free_mb(folder)} in {folder.parent}" if folder else ""
            return ", ".join(str(rank) for rank in range(self._config.ranks) if rank not in answers) + room

        with self._waits.on(f"{what} of ranks", missing):
            await self._until(lambda: len(answers) == self._config.ranks)

    async def _until(self, condition: Any) -> None:
        await self._changed.wait_for(lambda: condition() or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    async def _run(self, folder: Path, setup: RankSetup) -> None:
        failure: Exception | None = None
        try:
            await asyncio.to_thread(self._fit_blocking, folder, setup)
        except Exception as error:  # any error of Ray Train is raised in the callers that wait for an answer
            failure = _cause(error, "trainer")
        async with self._changed:
            if self._failure is None and failure is None and not self._stopped:
                failure = ActorDied("Ray Train ended unexpectedly", field="trainer")
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _fit_blocking(self, folder: Path, setup: RankSetup) -> None:
        import ray.train
        from ray.train.torch import TorchConfig

        from rayrft.trainer.ray_train import RankTrainer

        # Ray Train's record of saved folders, which nothing here reads; it would refuse to resume if one is missing.
        (folder / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
        # Offloaded tensors are in CPU memory, so their collectives need gloo.
        backend = "cpu:gloo,cuda:nccl" if self._config.gpus else "gloo"
        resources = {"CPU": self._config.cpus, **({"GPU": self._config.gpus} if self._config.gpus else {})}
        ranks, on_gpus = self._config.ranks, self._config.gpus > 0
        # A rank that dies, also during start, ends the run; by default Ray Train retries starts without end.
        failures = ray.train.FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0)
        RankTrainer(
            self._group,
            _run_rank,
            train_loop_config={"setup": setup},
            scaling_config=ray.train.ScalingConfig(num_workers=ranks, use_gpu=on_gpus, resources_per_worker=resources),
            run_config=ray.train.RunConfig(name=folder.name, storage_path=str(folder.parent), failure_config=failures),
            torch_config=TorchConfig(backend=backend, timeout_s=300),
        ).fit()


def _run_rank(options: dict[str, Any]) -> None:
    from rayrft.trainer.rank import run_rank  # with much of torch, which only a rank needs

    run_rank(options)


def _cause(error: BaseException, actor: str) -> Exception:
    """Return the root cause as a typed error that names the actor; errors that are typed already stay unchanged."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, first = next(iter(failures.items()))
        return _cause(first, f"trainer rank {rank}")
    if isinstance(error, RayrftError):
        return error
    if (death := getattr(error, "health_check_failure", None)) is not None:
        return root_cause(death, actor)
    lines = str(error).strip().splitlines() or [""]
    return ActorDied(f"{type(error).__name__}: {lines[-1]}", "see its log in the Ray dashboard", field=actor)
