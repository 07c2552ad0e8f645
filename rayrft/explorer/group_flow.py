"""The way of one group from its ticket to the Buffer: rolled out, scored, verified, filtered, and stored or dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import TYPE_CHECKING

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.schedule import Ticket
from rayrft.config import RunConfig, StageConfig
from rayrft.errors import DataError, RayrftError
from rayrft.experience import Task, from_batch, pack, to_batch, unpack
from rayrft.explorer import scoring
from rayrft.explorer.calls import Parking
from rayrft.explorer.rollout import BusyClock, Rollout, Runner
from rayrft.explorer.scoring import ScoredGroup
from rayrft.explorer.unstored import UnstoredAnswers
from rayrft.pipelines.experiences import ExperiencePipeline
from rayrft.runtime.handle import TrackedHandle, root_cause
from rayrft.runtime.waits import Waits, cancelled

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm

_FAILURES_IN_A_ROW = 32
"""Consecutive groups that may fail: see `GroupFlow._count_failure` for when the run ends then."""
_PAUSE_S = 5.0
"""Pause before each group while none succeeds, of which one runs at a time: a service may be starting again."""
_REMEMBERED = 10_000
"""Number of the latest groups of which failures are remembered."""


@dataclass(eq=False)
class GroupFlow:
    """Uses or returns every ticket that it is given. Groups run concurrently."""

    config: RunConfig
    runner: Runner
    buffer: TrackedHandle[Buffer]
    tasks: MutableMapping[str, Task]
    """By id; they grow with the Buffer's task set."""
    waits: Waits
    unstored: UnstoredAnswers
    pipeline: ExperiencePipeline | None = None
    limits_tries: bool = True
    """Whether `RayrftError` is raised after ``explorer.max_tries`` consecutive groups of which no row was kept."""

    def __post_init__(self) -> None:
        self.writer = BufferWriter(self.buffer)
        self.verifying = BusyClock()
        self._added = 0
        """Number of tasks that were added to the task set and are known here."""
        self._rolling: dict[int, dict[Ticket, asyncio.Future[list[Rollout]]]] = {}
        """By the deadlines of the tickets: thousands are in flight."""
        self._partial = self.config.explorer.partial
        self._started = 0
        self.failed = dict[int, bool]()
        """Whether the latest groups that failed would always fail, by their number in the order of their starts."""
        self._empty = 0
        """Number of consecutive groups of which no row was kept."""
        self._succeeded, self._trying = float("-inf"), asyncio.Lock()
        """When a group last succeeded; held by the group that runs alone while none does."""
        self.trouble = ""
        """Why the latest group failed, while no group has succeeded yet, or once many have failed in a row."""

    async def run(self, stage: StageConfig, algorithm: Algorithm, ticket: Ticket) -> None:
        """Roll out, score and store one group.

        Raises ActorDied if an engine has died, OperatorFailed if ``pipelines.on_error`` is ``stop``, and RayrftError if
        too many consecutive groups fail or leave no row.
        """
        if self.trouble and self._succeeded > 0.0:
            async with self._trying:
                if self.trouble:  # while it waited for its turn, too
                    await asyncio.sleep(_PAUSE_S)
                    return await self._run(stage, algorithm, ticket)
        return await self._run(stage, algorithm, ticket)

    async def _run(self, stage: StageConfig, algorithm: Algorithm, ticket: Ticket) -> None:
        number, began = self._started, time.perf_counter()
        self._started += 1
        task = await self.task(ticket)
        if (rolled := await self._roll_out(stage, algorithm, ticket, task)) is None:
            return
        rollout, *greedy = rolled
        rolled_s = time.perf_counter() - began - rollout.scored_s
        if rollout.parked:
            return await self.writer.park(to_batch(rollout.parked), ticket)
        if not rollout.rows:
            # Without a failure it was parked before a token was sampled.
            reason = max(rollout.failed, key=rollout.failed.__getitem__, default="surplus")
            await self.buffer.call(Buffer.fail, ticket, reason)
            lasting = {*rollout.failed} == {"prompt_too_long"}
            return self._count_failure(number, rollout.problem, lasting) if rollout.problem else None
        max_tokens = self.config.explorer.sampling.max_tokens
        score = partial(scoring.apply_rewards, config=self.config.reward, max_tokens=max_tokens, step=ticket.deadline)
        group = score(rollout.rows, rollout.results)
        for baseline in greedy:
            group = scoring.with_baseline(group, score(baseline.rows, baseline.results))
        name, answers = group_id(self.config, stage, ticket), group.rows or rollout.rows
        verified = await self._verify(task, name, group)
        group = scoring.with_failures(self._filter(verified, algorithm, ticket), rollout.failed)
        verified_s = time.perf_counter() - began
        if group.rows:
            try:
                await self.writer.put(group.rows, group.report, ticket=ticket, dropped=dict(group.dropped))
            except DataError as error:  # of what the workflow has put into the rows
                await self.buffer.call(Buffer.fail, ticket, "workflow_error")
                workflow = task.workflow or self.config.explorer.workflow
                return self._count_failure(number, f"workflow {workflow!r} on task {task.id}: {root_cause(error)}")
        else:
            await self.buffer.call(Buffer.drop, ticket, dict(group.dropped), group.report)
            await self.unstored.add_dropped(task, answers, group.dropped)
        parts = {"rollout": rolled_s, "reward": rollout.scored_s}
        parts |= {"operators": verified_s - sum(parts.values()), "store": time.perf_counter() - began - verified_s}
        self.waits.trace.add("groups", name if group.rows else f"{name} dropped", began, parts)
        if group.unknown and not group.rewards:
            self._count_failure(number, f"the reward is unknown: {group.unknown}")
        elif group.problem and not verified.rows:
            self._count_failure(number, group.problem)
        else:
            self._succeeded, self.trouble = time.monotonic(), ""
        self._count_empty(group)

    def end_due(self, stage: StageConfig, step: int) -> None:
        """Park or abandon surplus groups of steps up to this one, which has been leased: decoding them is a waste."""
        for deadline in [deadline for deadline in self._rolling if deadline <= step]:
            due = self._rolling.pop(deadline)
            for ticket in list(due):
                if self._partial is None:
                    due.pop(ticket).cancel()
                else:
                    self.runner.park(group_id(self.config, stage, ticket))

    async def _roll_out(
        self, stage: StageConfig, algorithm: Algorithm, ticket: Ticket, task: Task
    ) -> list[Rollout] | None:
        """Sample the group, and one greedy answer if the algorithm needs it as its baseline, which is never trained
        and does not count as sampled. Return None if the group ended cancelled; its ticket is returned then."""
        name, parking = group_id(self.config, stage, ticket), await self._parking(ticket)
        temperature = self.config.explorer.sampling.temperature
        workflow = task.workflow or self.config.explorer.workflow
        with self.waits.on(f"workflow {workflow!r}", name, internal=True, name="groups"):
            rolling = [self.runner.run(task, name, stage.group_size, temperature, parking)]
            if "greedy_baseline" in algorithm.needs:
                rolling.append(self.runner.run(task, name, 1, 0.0))
            due = self._rolling.setdefault(ticket.deadline, {})
            due[ticket] = asyncio.gather(*rolling)
            try:
                return await due[ticket]
            except asyncio.CancelledError:
                if cancelled():  # not just the rollout
                    raise
                # A group that ends cancelled by itself must not keep its ticket: the step would wait for it.
                await self.buffer.call(Buffer.fail, ticket, "workflow_error" if ticket in due else "surplus")
                return None
            finally:
                due.pop(ticket, None)

    async def _verify(self, task: Task, name: str, group: ScoredGroup) -> ScoredGroup:
        """Send a group through the operators on experiences, if there are any. The rows that they make are in the
        Buffer when this returns, so that they are not lost with the group."""
        if self.pipeline is None or not group.rows:
            return group
        with self.waits.on("operators", name, name="groups"), self.verifying:
            verified = await self.pipeline.process(task, group.rows)
        if verified.made is not None:
            made = self.config.pipelines.made
            assert made is not None  # checked before the operators were started
            await self.buffer.call(Buffer.extend, made, [pack(verified.made)])
        return scoring.with_verified(group, verified)

    def _filter(self, group: ScoredGroup, algorithm: Algorithm, ticket: Ticket) -> ScoredGroup:
        if self.config.explorer.drop_zero_variance:
            group = scoring.drop_zero_variance(group, algorithm)
        if self.config.reward.truncated == "mask":
            group = scoring.mask_truncated(group)
        if ticket.resumes:
            group = scoring.mask_old(group, ticket.deadline - self.config.max_staleness)
        return group

    async def task(self, ticket: Ticket) -> Task:
        """Return the ticket's task. Tasks that were added to the task set meanwhile are fetched first."""
        assert ticket.task is not None  # the Buffer was given the tasks
        if ticket.task not in self.tasks:
            known = self._added
            added = await self.buffer.call(Buffer.added_tasks, known)
            self._added = max(self._added, known + len(added))  # another group may have asked for the same meanwhile
            self.tasks.update({task.id: task for task in added})
        return self.tasks[ticket.task]

    async def _parking(self, ticket: Ticket) -> Parking | None:
        """Return how the ticket's group may be parked, with the calls that it continues from."""
        if self._partial is None:
            return None
        message = await self.buffer.call(Buffer.parked, ticket) if ticket.resumes else None
        return Parking(self._partial.budget, from_batch(unpack(message)) if message is not None else ())

    def _count_empty(self, group: ScoredGroup) -> None:
        """Raise RayrftError if no row was kept of too many consecutive groups."""
        self._empty = 0 if group.rows else self._empty + bool(group.dropped)
        if self._empty >= self.config.explorer.max_tries and self.limits_tries:
            reasons = ", ".join(f"{count} {reason}" for reason, count in group.dropped.most_common())
            problem = f"no row was kept of {self._empty} consecutive groups: nothing is learned; dropped: {reasons}"
            remedy = "give tasks that the model solves sometimes, but not always; relax the filters; or raise it"
            raise RayrftError(problem, remedy, field="explorer.max_tries", value=self._empty)

    def _count_failure(self, number: int, problem: str, lasting: bool = False) -> None:
        """Count a failed group. Raise RayrftError if too many failed in a row, in the order in which groups started, so
        that what fails at once does not wait for what samples, and all are ``lasting`` or none has succeeded for
        ``monitor.stall_s``."""
        self.failed = {each: kind for each, kind in self.failed.items() if each > number - _REMEMBERED}
        self.failed[number] = lasting

        def in_a_row(failed: Callable[[int], bool | None]) -> int:
            return sum(1 for numbers in (count(number, -1), count(number + 1)) for _ in takewhile(failed, numbers))

        if self._succeeded < 0.0 or in_a_row(self.failed.__contains__) >= _FAILURES_IN_A_ROW:
            self.trouble = problem
            stalled = time.monotonic() - self._succeeded > self.config.monitor.stall_s
            if (failed := in_a_row(self.failed.__contains__ if stalled else self.failed.get)) >= _FAILURES_IN_A_ROW:
                problem = f"{failed} consecutive groups failed; the last: {problem}"
                remedy = "fix the workflow, reward or limit; try it on a single task first"
                raise RayrftError(problem, remedy, field="explorer")


def group_id(config: RunConfig, stage: StageConfig, ticket: Ticket) -> str:
    """Return the id of the group that a ticket of a stage admits."""
    return f"{config.name}/{stage.name}/{ticket.sequence}/{ticket.task}"
