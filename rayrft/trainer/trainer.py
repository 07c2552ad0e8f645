"""The Trainer actor: hands commands to the ranks that Ray Train runs, and their answers back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayrft.config.trainer import TrainerConfig
from rayrft.errors import ActorDied, RayrftError, StorageError
from rayrft.trainer.commands import Command, Stop
from rayrft.trainer.rank import RankSetup, run_rank
from rayrft.waits import WaitReport, Waits


class Trainer:
    """The actor. ``start`` returns when every rank holds the model; then ``command`` runs commands one by one."""

    def __init__(self, config: TrainerConfig, group: Any) -> None:
        """``group`` is a placement group with a bundle for each rank."""
        self._config = config
        self._group = group
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._number = -1
        self._command: Command | None = None
        self._answers: dict[int, Any] = {}
        self._ready: dict[int, str | None] = {}
        self._written: dict[Path, dict[int, str | None]] = {}
        self._failure: Exception | None = None
        self._fit: asyncio.Task[None] | None = None
        self._waits = Waits("trainer")

    async def start(self, folder: Path, setup: RankSetup) -> str | None:
        """Start the ranks through Ray Train, whose own files go to ``folder``, the run's.

        Gives what is unusual about the model, if anything. Raises what the first failing rank raised, and ActorDied
        when a rank is not up in time.
        """
        self._fit = asyncio.create_task(self._run(folder, setup))
        try:
            async with asyncio.timeout(self._config.start_timeout_s), self._changed:
                await self._from_ranks("start", self._ready)
        except TimeoutError:
            late = sorted(set(range(self._config.ranks)) - self._ready.keys())
            raise ActorDied(
                f"trainer ranks {late} of {self._config.ranks} were not up within {self._config.start_timeout_s:g} s",
                field=f"trainer rank {late[0]}",
                remedy="see their logs in the Ray dashboard; for a model that takes long to load, raise "
                "trainer.start_timeout_s",
            ) from None
        return self._ready[0]

    async def command(self, command: Command) -> list[Any]:
        """Run a command on every rank; the answers in order of rank. Raises what the first failing rank raised."""
        async with self._lock, self._changed:
            self._number += 1
            self._command = command
            self._answers = {}
            self._changed.notify_all()
            await self._from_ranks(type(command).__name__, self._answers)
            return [self._answers[rank] for rank in range(self._config.ranks)]

    async def written(self, folder: Path) -> None:
        """Returns when every rank has written its part of a checkpoint. Raises StorageError when one could not."""
        async with self._changed:
            await self._from_ranks("part of a checkpoint", self._written.setdefault(folder, {}))
            problems = [problem for problem in self._written.pop(folder).values() if problem is not None]
        if problems:
            raise StorageError(
                f"a checkpoint cannot be written: {problems[0]}",
                field="storage",
                value=str(folder),
                remedy="make room, or mend the permissions of the run's folder; then resume the run",
            )

    async def stop(self) -> None:
        """End the ranks; returns when Ray Train has finished."""
        async with self._lock, self._changed:
            self._number += 1
            self._command = Stop()
            self._changed.notify_all()
        if self._fit is not None:
            await self._fit

    async def watch(self) -> None:
        """Returns when the ranks have ended as told; raises as soon as one has failed."""
        async with self._changed:
            await self._until(lambda: isinstance(self._command, Stop))

    async def waiting(self) -> WaitReport:
        """Which ranks have not answered, and for how long."""
        return self._waits.report()

    async def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()

    # What the ranks call.

    async def ready(self, rank: int, remark: str | None) -> None:
        """A rank holds the model; ``remark`` is what it found unusual about it."""
        async with self._changed:
            self._ready[rank] = remark
            self._changed.notify_all()

    async def next_command(self, number: int) -> Command:
        """The command of that number, as soon as it is given; idle ranks wait here."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._number >= number)
            assert self._command is not None
            return self._command

    async def answer(self, rank: int, number: int, value: Any) -> None:
        """A rank's answer to the command of that number."""
        async with self._changed:
            if number == self._number:
                self._answers[rank] = value
            self._changed.notify_all()

    async def wrote(self, rank: int, folder: Path, problem: str | None) -> None:
        """A rank has written its part of a checkpoint, or could not."""
        async with self._changed:
            self._written.setdefault(folder, {})[rank] = problem
            self._changed.notify_all()

    async def failed(self, rank: int, error: BaseException) -> None:
        """A rank is about to die of this error. The first one is the root cause: the others only miss their peer."""
        async with self._changed:
            if self._failure is None:
                self._failure = _cause(error, f"trainer rank {rank}")
            self._changed.notify_all()

    async def _from_ranks(self, what: str, answers: Mapping[int, Any]) -> None:
        """Returns when every rank has an entry among the answers."""

        def missing() -> str:
            return ", ".join(str(rank) for rank in range(self._config.ranks) if rank not in answers)

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
        except Exception as error:  # whatever ended Ray Train is handed to whoever waits for an answer
            failure = _cause(error, "trainer")
        async with self._changed:
            if self._failure is None and failure is None and not isinstance(self._command, Stop):
                failure = ActorDied("Ray Train ended before it was told to", field="trainer")
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _fit_blocking(self, folder: Path, setup: RankSetup) -> None:
        import ray.train
        from ray.train.torch import TorchConfig

        from rayrft.trainer.ray_train import RankTrainer

        # Ray Train keeps a record of the folders that were saved, through which nothing reads them; and a resumed run
        # would be refused where one of them is gone.
        (folder / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
        # What is offloaded lies in main memory, and its collectives with it.
        backend = "cpu:gloo,cuda:nccl" if self._config.gpus else "gloo"
        resources: dict[str, float] = {"CPU": self._config.cpus}
        if self._config.gpus:
            resources["GPU"] = self._config.gpus
        RankTrainer(
            self._group,
            run_rank,
            train_loop_config={"setup": setup},
            scaling_config=ray.train.ScalingConfig(
                num_workers=self._config.ranks,
                use_gpu=self._config.gpus > 0,
                resources_per_worker=resources,
            ),
            run_config=ray.train.RunConfig(
                name=folder.name,
                storage_path=str(folder.parent),
                # A rank that dies, at the start too, ends the run. Ray Train would start workers that do not come up
                # again for ever.
                failure_config=ray.train.FailureConfig(
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                ),
            ),
            torch_config=TorchConfig(backend=backend, timeout_s=300),
        ).fit()


def _cause(error: BaseException, actor: str) -> Exception:
    """The root cause as a typed error that names the actor; errors of our own stay as they are."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, first = next(iter(failures.items()))
        return _cause(first, f"trainer rank {rank}")
    if isinstance(error, RayrftError):
        return error
    lines = str(error).strip().splitlines() or [""]
    return ActorDied(f"{type(error).__name__}: {lines[-1]}", field=actor, remedy="see its log in the Ray dashboard")
