"""What scoring costs: beside the Explorer, in a reward actor and on Ray Serve, and while calls hang.

64 callers ask again at once; the reward takes about 2 ms of a core. Then 3 of the 64 make calls that hang, by sleeping
or by spinning, until their deadline of 2 s: how many the other 61 make, beside 61 alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np

from rayrft.config.reward import RewardConfig
from rayrft.experience import Task
from rayrft.rewards import RewardResult, Transcript
from rayrft.rewards.base import Reward
from rayrft.rewards.scorer import ActorBackend, RewardActor, Rewards, Scorer
from rayrft.rewards.service import RewardService, ServeBackend, deploy_rewards
from rayrft.runtime.serving.applications import create_anchor, delete_applications, on_head
from tests.bench.helpers import actor, parse, spread, start_ray

_HERE = "tests.bench.bench_rewards:working"
_TASK = Task.create("bench", "How much is it?", "#### 72")
Score = Callable[[Task, list[Transcript]], Awaitable[list[RewardResult]]]


def working() -> Reward:
    """A reward that works, sleeps or spins, as the response says."""

    def score(task: Task, response: str) -> float:
        if response == "sleep":
            time.sleep(60)
        ends = time.process_time() + (60 if response == "spin" else 0.002)
        while time.process_time() < ends:
            pass
        return 1.0

    return score


async def measure(
    score: Score, seconds: float, callers: int, hang: tuple[str, ...] = (), said: str = "work"
) -> np.ndarray:
    """Let callers ask again and again for a while, and others make calls that hang; return the calls per second of
    those that do not hang, and their median latency and its 99th percentile in ms."""
    ends, latencies = time.perf_counter() + seconds, list[float]()

    async def ask(response: str) -> None:
        transcript = Transcript.of(_TASK, response)
        while (started := time.perf_counter()) < ends:
            [result] = await score(_TASK, [transcript])
            if result.value is not None:
                latencies.append(time.perf_counter() - started)

    hanging = [asyncio.create_task(ask(each)) for each in hang]
    await asyncio.gather(*(ask(said) for _ in range(callers)))
    for each in hanging:
        each.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    return np.array([len(latencies) / seconds, *np.percentile(latencies, [50, 99]) * 1e3])


@asynccontextmanager
async def scoring(config: RewardConfig) -> AsyncIterator[Score]:
    """Open a scorer here, an actor with one, or a replica of Ray Serve with one."""
    if config.placement == "serve":
        service, owner = RewardService.of("bench", config, []), "bench:rewards"
        anchor = create_anchor(owner)
        await asyncio.to_thread(on_head, deploy_rewards, service, owner, ("127.0.0.1", 8000))
        yield Rewards(config, [], lambda: ServeBackend(service)).score
        await asyncio.to_thread(delete_applications, service.all_versions)
        anchor.kill()
    elif config.placement == "pool":
        scoring = ActorBackend([actor(RewardActor, "reward", config, []) for _ in range(config.actors)])
        pool = Rewards(config, [], lambda: scoring)
        await pool.open()
        yield pool.score
    else:
        scorer = Scorer(config, [])
        await scorer.open()
        yield Rewards(config, [], lambda: scorer).score
        await scorer.close()


async def one_round(seconds: float) -> dict[str, list[np.ndarray]]:
    """Return the measurements of every case, with the one that it is compared with before it."""
    found = dict[str, list[np.ndarray]]()
    for placement in ("beside", "pool", "serve"):
        for name, said in ((_HERE, "work"), ("math", "48 + 24 = 72, so\n#### 72")):
            settings = {"name": name, "deadline_s": 2.0, "workers": 2, "placement": placement}
            if placement == "serve":
                settings["replicas"] = {"pending": 64}  # one replica, as there is one actor
            config = RewardConfig.model_validate(settings)
            async with scoring(config) as score:
                await measure(score, seconds / 4, 64, said=said)
                found[f"{name.rpartition(':')[2]}, {placement}"] = [await measure(score, seconds, 64, said=said)]
                for how in ("sleep", "spin") if said == "work" else ():
                    clean = await measure(score, seconds, 61)
                    found[f"3 of 64 {how}, {placement}"] = [clean, await measure(score, seconds, 61, (how,) * 3)]
    return found


def main() -> None:
    """Print a line per case: the medians, and the range of the ratio to the clean run."""
    options = parse(__doc__, rounds=3, seconds=8.0)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    start_ray()
    rounds = [asyncio.run(one_round(options.seconds)) for _ in range(options.rounds)]
    print(f"{'':24}{'calls/s':>9}{'p50':>10}{'p99':>10}   of the clean run")
    for case, found in rounds[0].items():
        per_s, p50, p99 = np.median([each[case][-1] for each in rounds], axis=0)
        ratios = [each[case][-1][0] / each[case][0][0] for each in rounds]
        compared = spread(ratios) if len(found) > 1 else ""
        print(f"{case:24}{per_s:9,.0f}{p50:8.1f} ms{p99:7.1f} ms   {compared}")


if __name__ == "__main__":
    main()
