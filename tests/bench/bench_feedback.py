"""How long people wait for the feedback page, many at once.

The page is on Ray Serve beside a Buffer that holds the groups. Each person takes an item, thinks, gives a score, which
is on disk and in the Buffer before it is acknowledged, and takes the next. They think between 0 and twice ``--think``
seconds; in a second pass not at all. `health` asks for nothing, meanwhile: what Serve and the machine take.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import ray
from ray import serve

from rayrft.config import dump_config, load_config
from rayrft.config.serve import FeedbackConfig
from rayrft.core.services import serve_feedback
from rayrft.experience import Experience
from tests.bench.helpers import parse, percentiles, start_ray
from tests.buffer.live import buffers, put
from tests.buffer.rows import group
from tests.e2e.conftest import free_port, small_config

ANSWER = "First we add what is known, and then we see what is left. " * 12


def spoken(number: int) -> list[Experience]:
    """A group of eight answers of some hundred words."""
    question = {"role": "user", "content": f"Question {number}: how many are left?"}
    return [
        row.with_fields(turns=(question, {"role": "assistant", "content": f"{ANSWER} So it is {at}."}))
        for at, row in enumerate(group(number, rows=8, length=200))
    ]


Times = dict[str, list[float]]


async def person(name: str, url: str, key: str, ends: float, think: float, times: Times, outcomes: list[str]) -> None:
    headers, chance = {"Authorization": f"Bearer {key}"}, random.Random(name)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:

        async def ask(path: str, **body: Any) -> Any:
            began = time.perf_counter()
            response = await http.post(f"v1/{path}", json={"person": name, **body})
            times[path].append(time.perf_counter() - began)
            response.raise_for_status()
            return response.json()

        await asyncio.sleep(chance.uniform(0, 2 * think))
        while time.perf_counter() < ends and (item := (await ask("next", view="one"))["item"]):
            await asyncio.sleep(chance.uniform(0, 2 * think))
            rows = [answer["id"] for answer in item["answers"]]
            given = {"id": uuid4().hex, "item": item["key"], "rows": rows, "score": chance.randint(1, 5)}
            outcomes.append((await ask("judge", **given))["outcome"])


async def health(url: str, ends: float, times: list[float]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while time.perf_counter() < ends:
            began = time.perf_counter()
            await http.get("health")
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.1)


async def measure(url: str, key: str, people: int, seconds: float, think: float) -> None:
    times: Times = {"next": [], "judge": [], "health": []}
    outcomes: list[str] = []
    ends = time.perf_counter() + seconds
    crowd = [person(f"p{number}-{think:g}", url, key, ends, think, times, outcomes) for number in range(people)]
    await asyncio.gather(*crowd, health(url, ends, times["health"]))
    applied = outcomes.count("applied")
    print(f"{people} people who think {think:g} s: {len(outcomes)} judgements, {applied} of them in the Buffer at once")
    for path, taken in times.items():
        print(f"  {path:<7} {len(taken):>6} requests   {percentiles(taken)}, max {max(taken) * 1e3:.1f} ms")


def main() -> None:
    options = parse(__doc__, people=50, seconds=20.0, groups=2000, think=2.0, rounds=1)
    start_ray()
    with tempfile.TemporaryDirectory() as storage, buffers() as start:
        config = load_config(small_config(Path(storage), "judged"))
        buffer = start(config.folder / "buffer", name="judged:buffer")
        ray.get(buffer.stats.remote())
        (config.folder / "config.yaml").write_text(dump_config(config))
        put(buffer, *(spoken(number) for number in range(options.groups)))
        page = serve_feedback(config.folder, FeedbackConfig(port=free_port(), max_groups=options.groups))
        assert page.key_file is not None
        url, key = page.url, page.key_file.read_text().strip()
        began = time.perf_counter()
        httpx.post(f"{url}v1/me", json={"person": "a"}, headers={"Authorization": f"Bearer {key}"}, timeout=120)
        print(f"{options.groups} groups of 8 were read in {time.perf_counter() - began:.1f} s")
        for _ in range(options.rounds):
            for think in (options.think, 0.0):
                asyncio.run(measure(url, key, options.people, options.seconds, think))
        page.stop()
        serve.shutdown()


if __name__ == "__main__":
    main()
