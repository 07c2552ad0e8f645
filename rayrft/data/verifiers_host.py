"""Verifiers in an environment of its own, whose Python runs this file: lists the tasks of a taskset, or plays episodes.

Reads orders from stdin and writes answers to stdout, one JSON object per line. It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any

_KEY = "RAYRFT_ENDPOINT_KEY"


def main() -> None:
    """Answer the first order: ``{"environment": …}``, and ``{"tasks": limit}`` with it to list tasks."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints is not an answer

    def answer(**said: Any) -> None:
        print(json.dumps(said), file=answers)

    order = json.loads(sys.stdin.readline())
    try:
        from verifiers import __version__
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        return answer(problem=f"verifiers with its v1 interface (0.4 or later) cannot be imported: {error}")
    try:
        environment = load_environment(resolve_env_config(order["environment"]))
        if "tasks" in order:
            limit = order["tasks"]
            if limit is None and not environment.taskset.bounded:
                return answer(problem="the taskset is infinite: give a size")
            for task in itertools.islice(environment.taskset, limit):
                answer(task=task.data.model_dump(mode="json"), prompt=task.data.prompt_text, key=task.key)
            return answer(end=True)
    except Exception as error:  # code of a taskset may raise anything
        return answer(problem=f"verifiers {__version__}: {type(error).__name__}: {error}")
    asyncio.run(_play(environment, answer))


async def _play(environment: Any, answer: Any) -> None:
    """Play an episode for each order ``{"task": …, "base_url": …, "variables": …}``."""
    orders = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with environment.serving():
        answer(ready=True)
        next_order = asyncio.ensure_future(orders.readline())
        while line := await next_order:
            next_order = asyncio.ensure_future(orders.readline())
            playing = asyncio.ensure_future(_episode(environment, json.loads(line)))
            await asyncio.wait({playing, next_order}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():  # the parent process has ended
                playing.cancel()
                await asyncio.wait({playing})
                return
            answer(**playing.result())


async def _episode(environment: Any, order: dict[str, Any]) -> dict[str, Any]:
    import verifiers.v1 as v1

    os.environ.update(order["variables"])
    os.environ[_KEY] = order["variables"]["OPENAI_API_KEY"]
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(order["task"]), environment.config.taskset.task)
    client = v1.EvalClientConfig(base_url=order["base_url"], api_key_var=_KEY)
    context = v1.ModelContext(client=client, model="policy", sampling=v1.SamplingConfig())
    episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return {"problem": f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode did not complete"}
    components = dict[str, float]()
    for trace in episode.traces:
        prefix = f"{trace.agent.name}_" if len(episode.traces) > 1 else ""
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        numbers = {name: value for name, value in trace.metrics.items() if value is not None}
        components |= {f"{prefix}{name}": value for name, value in {**numbers, **rewards}.items()}
    return {"reward": sum(trace.reward for trace in episode.traces) / len(episode.traces), "components": components}


if __name__ == "__main__":
    main()
