"""Playing an episode again without the model, from the actions in its row."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayrft.config import RunConfig
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Experience, Task
from rayrft.explorer.environments import Environments, Step, as_messages
from rayrft.explorer.rollout import episode_seed


@dataclass(frozen=True)
class Replay:
    """What the environment answered to the actions of a row, and where that differs from what the row says."""

    steps: tuple[Step, ...]
    differences: tuple[str, ...]


async def replay(row: Experience, task: Task, config: RunConfig) -> Replay:
    """Act in the config's environment as a row of the `episode` workflow says, with the same seed, and compare.

    Compared are all observations of the row, and the rewards: of turns if the row has them, else their sum. The seed
    follows from config, group and repeat, as in the run. Of an attempt in several rows (``rows: step``), the last one
    has the whole episode, unless ``history`` cuts it.

    Raises DataError for a row without actions, ConfigError without an environment, and EnvironmentFailed.
    """
    if config.explorer.environment is None:
        raise ConfigError("there is none to act in", "take the config of the run", field="explorer.environment")
    environments = Environments(config.explorer.environment, config.plugins)
    try:
        async with environments.attempt(episode_seed(config, row.group_id, int(row.repeat))) as env:
            expected = as_messages(await env.reset(task))
            turns = list(row.turns)
            if task.system and expected[0]["role"] != "system":
                expected = [{"role": "system", "content": task.system}, *expected]
            actions = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
            if not actions:
                raise DataError("has no actions", "give one of an episode", field="row", value=row.experience_id)
            differences, steps = list[str](), list[Step]()
            for start, number in zip([0, *(action + 1 for action in actions)], actions, strict=False):
                if turns[start:number] != expected[start:]:
                    shown = f"{expected[start:]!r}, not {turns[start:number]!r}"
                    differences.append(f"messages {start} to {number - 1}: {shown}")
                if steps and steps[-1].done:
                    differences.append(f"message {number}: the episode had ended")
                    break
                steps.append(await env.step(turns[number]["content"]))
                expected += [turns[number], *as_messages(steps[-1].observation)]
    finally:
        await environments.close()
    return Replay(tuple(steps), (*differences, *_compare_rewards(row, steps)))


def _compare_rewards(row: Experience, steps: list[Step]) -> list[str]:
    """Rows hold single-precision numbers, and the rewards of the last steps, if those by turn."""
    earned = [step.reward for step in steps]
    told = [row.metrics[name] for number in range(len(steps)) if (name := f"turn_reward_{number}") in row.metrics]
    pairs: list[tuple[str, float | None, float]] = [("sum of rewards", row.reward, sum(earned))]
    if told:
        first = len(steps) - len(told)
        pairs = [(f"reward of step {first + k}", reward, earned[first + k]) for k, reward in enumerate(told)]
    return [
        f"{what}: {mine:g}, not {given}"
        for what, given, mine in pairs
        if given is None or not math.isclose(given, mine, rel_tol=1e-5, abs_tol=1e-6)
    ]
