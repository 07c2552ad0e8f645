"""What the ways of waiting for long answers cost: staleness 0, 1 and 4, and partial rollouts, on long-tailed lengths.

Explorer and Buffer are real; the engine and the trainer only take as long as ones on devices of their own would. The
engine decodes a token of up to so many answers at each step; the longest has 20 times the tokens of the median. All
pause while weights change. The trainer's idle share is the time that it waits for a batch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.leases import Lease
from rayrft.config import RunConfig, load_config
from rayrft.core.preflight import PreparedRun
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import unpack
from rayrft.explorer.engines.exchange import INTERRUPTED, Answering, Completion, Request, Stream
from tests.bench.helpers import Exploring, actor, parse, quickstart, spread, start_ray

_STEP_S, _SLOTS, _TRAIN_S, _SYNC_S = 0.004, 64, 8e-5, 0.05
"""Seconds of a decoding step; answers that are decoded at once; seconds per trained token; seconds of an update."""

_MEDIAN, _LIMIT = 40, 800
_FIRST, _BASE = 8, 40
"""An answer's first two tokens say how long it becomes, so that one that was parked ends where it would have."""


@dataclass(eq=False)
class Decoded:
    """An answer on its way: what it will be, and how much of that there is."""

    ids: tuple[int, ...]
    room: int
    ended: asyncio.Future[str]
    sampled: int = 0
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def sample(self, version: int) -> None:
        self.sampled += 1
        if self.spans and self.spans[-1][2] == version:
            self.spans[-1] = (self.spans[-1][0], self.sampled, version)
        else:
            self.spans.append((self.sampled - 1, self.sampled, version))
        if self.sampled == self.room:
            self.end("stop" if self.room == len(self.ids) else "length")

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


class DecodingEngine(Answering):
    """The engine. ``start_id`` is the token after which an answer begins."""

    def __init__(self, start_id: int) -> None:
        super().__init__()
        self._start_id, self._version = start_id, 0
        self._running: list[Decoded] = []
        self._waiting: deque[Decoded] = deque()
        self._asked: dict[int, list[Decoded]] = {}
        self._rng = np.random.default_rng(0)
        self._stepping: asyncio.Task[None] | None = None
        self._goes = asyncio.Event()
        self._goes.set()
        self.decoded = 0

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        self._stepping = self._stepping or asyncio.create_task(self._step())
        answers = self._asked[id(request)] = [self._begin(request) for _ in range(request.n)]
        self._waiting += answers
        try:
            reasons = await asyncio.gather(*(answer.ended for answer in answers))
        finally:
            del self._asked[id(request)]
        return [
            Completion(answer.ids[: answer.sampled], (-1.0,) * answer.sampled, tuple(answer.spans), reason)
            for answer, reason in zip(answers, reasons, strict=True)
        ]

    async def interrupt(self, request: Request) -> None:
        for answer in self._asked.get(id(request), ()):
            answer.end(INTERRUPTED)

    async def update(self, version: int) -> int:
        """Stop as long as an update takes; later tokens are of this version. Return the tokens decoded until now."""
        self._goes.clear()
        await asyncio.sleep(_SYNC_S)
        self._version = version
        self._goes.set()
        return self.decoded

    def _begin(self, request: Request) -> Decoded:
        before = request.prompt[len(request.prompt) - request.prompt[::-1].index(self._start_id) :]
        if len(before) >= 2:
            length = (before[0] - _FIRST) * _BASE + before[1] - _FIRST
        else:
            length = int(np.exp(self._rng.normal(np.log(_MEDIAN), 1.0)).clip(3, _LIMIT - 1))
        head, stop = (_FIRST + length // _BASE, _FIRST + length % _BASE), request.sampling.stop_token_ids[0]
        ids = (*head, *(_FIRST,) * (length - 3), stop)[len(before) :]
        room = min(request.sampling.max_tokens, len(ids))
        return Decoded(ids, room, asyncio.get_running_loop().create_future())

    async def _step(self) -> None:
        while True:
            due = time.perf_counter() + _STEP_S
            await self._goes.wait()
            self._running = [answer for answer in self._running if not answer.ended.done()]
            while self._waiting and len(self._running) < _SLOTS:
                answer = self._waiting.popleft()
                if not answer.ended.done():
                    self._running.append(answer)
            for answer in self._running:
                answer.sample(self._version)
            self.decoded += len(self._running)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


@dataclass(frozen=True)
class Mode:
    """A way of waiting, by the settings of a run."""

    name: str
    staleness: int
    over: float = 1.0
    partial: dict[str, object] | None = None


_MODES = [
    Mode("synchronous", 0),
    Mode("synchronous, 1.5 times the groups", 0, over=1.5),
    Mode("the same, parked, old tokens masked", 0, over=1.5, partial={"old_tokens": "mask"}),
    Mode("staleness 1", 1),
    Mode("staleness 1, budget", 1, partial={"budget": 300, "old_tokens": "train"}),
    Mode("staleness 1, 1.5 times the groups, parked", 1, over=1.5, partial={"old_tokens": "train"}),
    Mode("staleness 4", 4),
    Mode("staleness 4, budget", 4, partial={"budget": 300, "old_tokens": "train"}),
]


async def trained_tokens(lease: Lease) -> int:
    """Count the tokens that a batch trains."""
    count = 0
    for share in lease.shares:
        for part in share.parts:
            mask = unpack(await part.ref).column("action_mask").take(pa.array(part.rows))
            count += pc.sum(mask.flatten()).as_py()
    return count


async def measure(config: RunConfig, prepared: PreparedRun, mode: Mode, steps: int, warm_up: int) -> tuple[float, str]:
    """Return the tokens that are trained per second, and a row of the table."""
    settings = {"explorer.partial": mode.partial, "explorer.over_sampling": mode.over, "max_staleness": mode.staleness}
    config = load_config(config, settings)
    stage = config.stages[-1]
    engine = actor(DecodingEngine, "engine-0", ChatTokenizer(prepared.model).prompt(prepared.tasks[0].messages)[-1])
    run = Exploring(config, prepared)
    await run.start([engine])
    parks = mode.partial["old_tokens"] if mode.partial else None
    await run.open(stage, max_staleness=mode.staleness, over_sampling=mode.over, parks=parks)
    buffer = run.buffer
    began = waited = 0.0
    tokens, decoded, stale = 0, [0, 0], list[int]()
    for step in range(warm_up + steps):
        if step == warm_up:
            began, waited, tokens, stale = time.perf_counter(), 0.0, 0, []
            decoded[0] = decoded[1]
        asked = time.perf_counter()
        lease = await buffer.call(Buffer.lease, step, 1, 60.0)
        waited += time.perf_counter() - asked
        count = await trained_tokens(lease)
        await asyncio.sleep(count * _TRAIN_S)
        tokens, stale = tokens + count, [*stale, *lease.staleness]
        await buffer.call(Buffer.ack, step)
        decoded[1] = await engine.call(DecodingEngine.update, step + 1)
        await buffer.call(Buffer.advance, step + 1)
    seconds = time.perf_counter() - began
    await run.close()
    run.kill()
    made = decoded[1] - decoded[0]
    return tokens / seconds, (
        f"{mode.name:40} {tokens / seconds:6.0f} tokens trained/s, trainer idle {waited / seconds:4.0%}, engine full "
        f"{made * _STEP_S / _SLOTS / seconds:4.0%}, {tokens / made:4.0%} of what was decoded is trained, mean "
        f"staleness {np.mean(stale):.1f}"
    )


def main() -> None:
    options = parse(__doc__, rounds=3, steps=12, warm_up=5, groups=(16, "groups of 8 a step"))
    start_ray()
    stage = {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 1000, "group_size": 8}
    config, prepared = quickstart(
        {
            "model.max_length": _LIMIT + 100,
            "explorer.drop_zero_variance": False,
            "explorer.sampling.max_tokens": _LIMIT,
            "stages": [{**stage, "batch_size": 8 * options.groups}],
            "demonstrations": {},
        }
    )
    speeds: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for mode in _MODES:
            speed, row = asyncio.run(measure(config, prepared, mode, options.steps, options.warm_up))
            speeds.setdefault(mode.name, []).append(speed)
            print(f"{number}: {row}", flush=True)
    for name, each in speeds.items():
        print(f"{name:40} {spread(np.divide(each, speeds[_MODES[0].name]))} times synchronous")
    ray.shutdown()


if __name__ == "__main__":
    main()
