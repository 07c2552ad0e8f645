"""The Explorer actor: as many groups in flight as the Buffer admits, each from task to rows."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

from rayrft.buffer.client import BufferWriter
from rayrft.buffer.schedule import Ticket
from rayrft.config import RunConfig, StageConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied, RayrftError
from rayrft.experience import Experience, Task, to_batch
from rayrft.explorer.engine import Sampling
from rayrft.explorer.evaluation import Evaluation
from rayrft.explorer.router import Router
from rayrft.explorer.scoring import apply_rewards, assign_advantages, earned, leave_out_truncated, with_baseline
from rayrft.explorer.workflow import ModelClient, PromptTooLong, derive_seed, workflows
from rayrft.registry import load_plugins
from rayrft.rewards import RewardResult
from rayrft.rewards.worker import RewardPool
from rayrft.waits import TrackedActor, WaitReport, Waits

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm

_FAILURES_IN_A_ROW = 32
"""Groups that may fail one after another, in a workflow or its reward, before the run is stopped."""


class BusyClock:
    """Wall time during which at least one of many concurrent activities was under way."""

    def __init__(self) -> None:
        self._active, self._since, self._total = 0, 0.0, 0.0

    def __enter__(self) -> None:
        if self._active == 0:
            self._since = time.monotonic()
        self._active += 1

    def __exit__(self, *_: object) -> None:
        self._active -= 1
        if self._active == 0:
            self._total += time.monotonic() - self._since

    def take(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        total = self._total + (now - self._since if self._active else 0.0)
        self._since, self._total = now, 0.0
        return total


class Explorer:
    """The actor. Which task comes next is on the Buffer's tickets; held-out tasks are only evaluated on."""

    def __init__(
        self,
        config: RunConfig,
        model: str,
        engines: list[Any],
        buffer: Any,
        tasks: list[Task],
        held_out: list[Task],
        start_reward: Any,
    ) -> None:
        load_plugins(config.plugins)
        self._config = config
        self._tokenizer = ChatTokenizer(model)
        self._waits = Waits("explorer")
        self._router = Router([TrackedActor(f"engine-{i}", each, self._waits) for i, each in enumerate(engines)])
        self._buffer = TrackedActor("buffer", buffer, self._waits, endless=("admit", "closed"))
        self._writer = BufferWriter(self._buffer, config.buffer.shards)
        self._tasks = tasks
        self._name, self._calls = f"explorer-{uuid.uuid4().hex}", 0
        self._held_out = held_out
        self._workflow = workflows.get(config.explorer.workflow, "explorer.workflow")()
        self._rewards = RewardPool(config.reward, start_reward)
        self._rolling, self._scoring = BusyClock(), BusyClock()
        self._failures = 0

    async def start(self) -> None:
        """Bring the reward workers up."""
        await self._rewards.open()

    async def explore(self, stage: StageConfig) -> None:
        """Fill the Buffer until the stage is closed; groups still in flight are abandoned then.

        Raises ActorDied when an engine is gone, and RayrftError when group after group fails.
        """
        running: set[asyncio.Task[None]] = set()
        admit = self._admit(stage)
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {admit, *running}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task.done()]:
                    running.remove(task)
                    task.result()
                if not admit.done():
                    continue
                if not (tickets := admit.result()):
                    return await self._finish(running)
                for ticket in tickets:
                    running.add(asyncio.create_task(self._group(stage, ticket)))
                admit = self._admit(stage)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def evaluate(self, temperature: float) -> Evaluation:
        """One answer per held-out task. Raises ActorDied when an engine is gone."""
        rewards = await asyncio.gather(
            *(self._evaluate_one(task, self._client(temperature, task.id)) for task in self._held_out)
        )
        known = [reward for reward in rewards if reward is not None]
        return Evaluation(
            temperature,
            right=sum(reward >= 1.0 for reward in known),
            count=len(known),
            mean_reward=sum(known) / len(known) if known else 0.0,
            unknown=len(rewards) - len(known),
        )

    async def timings(self) -> tuple[float, float]:
        """Seconds in which something was rolled out, and in which something was scored, since the last call."""
        return self._rolling.take(), self._scoring.take()

    async def waiting(self) -> WaitReport:
        """What groups and evaluation wait for, and for how long."""
        return self._waits.report()

    async def watch(self) -> None:
        """Never returns: a caller that awaits it learns at once when this actor dies."""
        await asyncio.Event().wait()

    async def _finish(self, running: set[asyncio.Task[None]]) -> None:
        """No more tickets: the tasks came to their end, or the stage did, which abandons what is under way."""
        closed = asyncio.ensure_future(self._buffer.closed.remote())
        while running and not closed.done():
            done, _ = await asyncio.wait({closed, *running}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & running:
                running.remove(task)
                task.result()

    def _admit(self, stage: StageConfig) -> asyncio.Future[list[Ticket]]:
        self._calls += 1
        return asyncio.ensure_future(self._buffer.admit.remote(self._name, self._calls, stage.groups))

    async def _group(self, stage: StageConfig, ticket: Ticket) -> None:
        """One group, from task to Buffer. Whatever happens, the ticket is used or given back."""
        assert ticket.task is not None  # the Buffer was given the tasks
        task = self._tasks[ticket.task]
        group_id = f"{self._config.name}/{stage.name}/{ticket.sequence}/{task.id}"
        algorithm = stage.algorithm.build()
        workflow = f"workflow {self._config.explorer.workflow!r}"
        try:
            with self._rolling, self._waits.on(workflow, group_id, internal=True):
                rows, greedy = await self._roll_out(stage, algorithm, task, group_id)
        except PromptTooLong:
            await self._buffer.fail.remote(ticket, "prompt_too_long")
            return
        except (ActorDied, asyncio.CancelledError):
            raise
        except Exception as error:  # a user's workflow may raise anything: the group is dropped and counted
            await self._buffer.fail.remote(ticket, "workflow_error")
            self._count_failure(f"{workflow}: {type(error).__name__}: {error}")
            return
        with self._scoring:
            results = await self._score(task, [*rows, *greedy])
        rules, max_tokens = self._config.reward, self._config.explorer.sampling.max_tokens
        scored = apply_rewards(rows, results[: len(rows)], rules, max_tokens=max_tokens)
        if algorithm.needs_greedy_baseline:
            baseline = apply_rewards(greedy, results[len(rows) :], rules, max_tokens=max_tokens)
            scored = with_baseline(scored, baseline)
        drop = self._config.explorer.drop_zero_variance
        scored = assign_advantages(scored, algorithm, drop_zero_variance=drop)
        if rules.truncated == "mask":
            scored = leave_out_truncated(scored)
        if scored.rows:
            batch = to_batch(scored.rows)
            await self._writer.put(batch, scored.report, ticket=ticket, dropped=dict(scored.dropped))
        else:
            await self._buffer.drop.remote(ticket, dict(scored.dropped), scored.report)
        if scored.unknown and not scored.rewards:
            self._count_failure(f"reward {self._config.reward.name!r}: {scored.unknown}")
        else:
            self._failures = 0

    async def _roll_out(
        self, stage: StageConfig, algorithm: Algorithm, task: Task, group_id: str
    ) -> tuple[list[Experience], list[Experience]]:
        """The group's rows, and those of a greedy answer where the algorithm takes that for a baseline. The latter is
        never trained on, and does not count as sampled."""
        model = self._client(self._config.explorer.sampling.temperature, group_id)
        sampling = self._workflow.run(task, model, group_id, stage.group_size)
        if not algorithm.needs_greedy_baseline:
            return await sampling, []
        greedy = self._client(0.0, group_id)
        rows, baseline = await asyncio.gather(sampling, self._workflow.run(task, greedy, group_id, 1))
        return rows, baseline

    async def _score(self, task: Task, rows: list[Experience]) -> list[RewardResult]:
        """A result for every row: the workflow's, where it gave the row a reward, else that of its last turn."""
        unscored = [row.turns[-1]["content"] for row in rows if row.reward is None]
        found = iter(await self._reward(task, unscored) if unscored else [])
        return [
            next(found) if row.reward is None else RewardResult.of(row.reward, row.reward_components, row.error)
            for row in rows
        ]

    async def _evaluate_one(self, task: Task, model: ModelClient) -> float | None:
        try:
            [answer] = await model.chat(task.messages, images=task.images)
        except PromptTooLong:
            return None
        [result] = await self._reward(task, [answer.text])
        if result.value is None:
            return None
        return earned(answer.completion.stop_reason, result.value, self._config.reward)

    async def _reward(self, task: Task, responses: list[str]) -> list[RewardResult]:
        with self._waits.on(f"reward {self._config.reward.name!r}", task.id):
            return await self._rewards.score(task, responses)

    def _client(self, temperature: float, name: str) -> ModelClient:
        """A client for what has that name, and samples accordingly."""
        sampling = self._config.explorer.sampling
        seed = derive_seed(self._config.seed, name) if self._config.seeds_requests else None
        return ModelClient(
            self._router,
            self._tokenizer,
            Sampling(temperature, sampling.max_tokens, (self._tokenizer.eos_id,), seed),
            max_prompt_tokens=sampling.max_prompt_tokens,
        )

    def _count_failure(self, problem: str) -> None:
        self._failures += 1
        if self._failures >= _FAILURES_IN_A_ROW:
            raise RayrftError(
                f"{self._failures} groups failed one after another; the last: {problem}",
                field="explorer",
                remedy="mend it, or try it on one task by itself first",
            )
