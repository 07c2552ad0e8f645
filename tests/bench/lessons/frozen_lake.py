"""A task of several turns: maps of FrozenLake to cross, by a model that has seen few walks, most of them bad.

Two in five of the demonstrations go a shortest way to the goal; the others go right and then down whatever lies there,
and most of them end in a hole. Which of the two to be is what only the reward can tell the model.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from rayrft.experience import Task
from rayrft.explorer.environments.gymnasium import GymnasiumEnvironment
from rayrft.trainer.tiny import make_tokenizer
from tests.bench.lessons import lessons
from tests.bench.lessons.lessons import Row, main, measured, write_demonstrations, write_model

SIZE, ICE, STEPS = 4, 0.7, 10
SEEING = 0.4
"""Share of the demonstrations that look where the holes are."""
ACTIONS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def write_task(folder: Path, seed: int, *, demonstrations: int = 300) -> None:
    """Write demonstrations and a random model with its tokenizer."""
    chance = np.random.default_rng(seed)
    # The tasks' maps are those of small seeds.
    known = [generate_random_map(SIZE, ICE, seed=1_000_000 + 1000 * seed + number) for number in range(demonstrations)]
    walks = [_walk(desc, chance) for desc in known]
    write_demonstrations(folder, walks)
    seen = [message["content"] for walk, _ in walks for message in walk["messages"] if message["role"] == "user"]
    lines = [[line for line in text.splitlines() if " " in line] for text in seen if "Actions" in text]
    tokenizer = make_tokenizer(["\n".join(each) for each in lines], [])  # the tiles of a map are tokens of their own
    tokenizer.add_tokens([*ACTIONS, "You reached the goal.", "You fell into a hole."])
    write_model(folder, tokenizer, seed, 768)


LAKE = {"source": "gymnasium", "dataset": "FrozenLake-v1", "options": {"size": SIZE, "p": ICE}, "size": 3000}
make_config = partial(
    lessons.make_config,
    "frozen-lake",
    warmup_steps=200,
    control_steps=120,
    control_every=60,
    rows=32,
    groups=16,
    every=25,
    lr=2e-4,
    tokens=(4, 256),
    max_length=768,
    tasks={"eval_size": 200, "sources": [LAKE]},
    reward={"truncated": "score"},
    explorer={
        "workflow": "episode",
        "workflow_options": {"episode": {"max_steps": STEPS}},
        "environment": {"name": "gymnasium", "processes": 128, "spares": 8},
        "engine": {"count": 1, "kv_cache_mib": 256},
        "over_sampling": 1.25,
    },
)


def _walk(desc: list[str], chance: np.random.Generator) -> tuple[Row, bool]:
    """Return a conversation that walks over a map, and whether it arrives."""
    environment, task = (GymnasiumEnvironment(), Task.create("walk", "", "", metadata={"environment": {"desc": desc}}))
    messages = [{"role": "user", "content": environment.reset(task, 0)}]
    place, best, seeing = (0, 0), _best_actions(desc), chance.random() < SEEING
    for _ in range(STEPS):
        blind = "right" if place[1] < SIZE - 1 else "down"
        action = best[place] if seeing else blind
        messages.append({"role": "assistant", "content": action})
        step = environment.step(action)
        if step.done:
            break
        messages.append({"role": "user", "content": str(step.observation)})
        row, column = (min(max(a + b, 0), SIZE - 1) for a, b in zip(place, ACTIONS[action], strict=True))
        place = (row, column)
    if messages[-1]["role"] == "user":
        messages.pop()
    return {"messages": messages}, step.reward > 0


def _best_actions(desc: list[str]) -> dict[tuple[int, int], str]:
    """Return the first action of a shortest way to the goal, by place."""
    best, reached = dict[tuple[int, int], str](), deque([(SIZE - 1, SIZE - 1)])
    seen = {*reached}
    while reached:
        row, column = reached.popleft()
        for action, (down, right) in ACTIONS.items():
            place = (row - down, column - right)
            if min(place) < 0 or max(place) >= SIZE or place in seen or desc[place[0]][place[1]] == "H":
                continue
            best[place] = action
            seen.add(place)
            reached.append(place)
    return best


measure = partial(measured, write_task, make_config)

if __name__ == "__main__":
    main(write_task, make_config)
