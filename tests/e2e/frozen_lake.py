"""A task of several turns: maps of FrozenLake to cross, by a model that has seen few walks, most of them bad.

Demonstrations are 300 walks, each on a map of its own that is no task. Two in five go a shortest way to the goal;
the others go right and then down whatever lies there, and most of them end in a hole. More training on them makes the
model a better copy of both: which of the two to be is what only the reward can tell it.

    python -m tests.e2e.frozen_lake [seed] [folder]      trains, with all controls, and prints a table
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from transformers import Qwen3Config, Qwen3ForCausalLM

import rayrft
from rayrft.experience import Task
from rayrft.explorer.environments.gymnasium import GymnasiumEnvironment
from rayrft.trainer.tiny import make_tokenizer

SIZE, ICE, STEPS = 4, 0.7, 10
SEEING = 0.4
"""Share of the demonstrations that look where the holes are."""
ACTIONS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
Rows = list[dict[str, Any]]


def write_task(folder: Path, seed: int, *, demonstrations: int = 300) -> None:
    """Write demonstrations and a random model with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(seed)
    # The tasks' maps are those of small seeds.
    known = [generate_random_map(SIZE, ICE, seed=1_000_000 + 1000 * seed + number) for number in range(demonstrations)]
    walks = [_walk(desc, chance) for desc in known]
    _write(folder / "mixed.jsonl", [walk for walk, _ in walks])
    _write(folder / "good.jsonl", [walk for walk, arrived in walks if arrived])
    seen = [message["content"] for walk, _ in walks for message in walk["messages"] if message["role"] == "user"]
    lines = [[line for line in text.splitlines() if " " in line] for text in seen if "Actions" in text]
    tokenizer = make_tokenizer(["\n".join(each) for each in lines], [])  # the tiles of a map are tokens of their own
    tokenizer.add_tokens([*ACTIONS, "You reached the goal.", "You fell into a hole."])
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


def make_config(folder: Path, seed: int, *, steps: int = 60, controls: bool = True) -> dict[str, Any]:
    """Return the config of a warm-up on the demonstrations, controls from it, and GRPO from it."""
    sft = {"algorithm": {"name": "sft"}, "batch_size": 32}
    more = [
        {
            "name": f"{rows}-{lr:g}".replace(".", "_"),
            "start_from": "warmup",
            "demonstrations": rows,
            "steps": 120,
            "evaluate_every": 60,
            "optimizer": {"lr": lr},
            **sft,
        }
        for rows in ("mixed", "good")
        for lr in (3e-3, 1e-3, 3e-4)
    ]
    warmup = {
        "name": "warmup",
        "demonstrations": "mixed",
        "steps": 200,
        "optimizer": {"lr": 1e-3, "schedule": "linear"},
        **sft,
    }
    grpo = {
        "name": "grpo",
        "start_from": "warmup",
        "algorithm": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28},
        "steps": steps,
        "batch_size": 128,
        "group_size": 8,
        "evaluate_every": 25,
        "optimizer": {"lr": 2e-4},
    }
    lake = {"source": "gymnasium", "dataset": "FrozenLake-v1", "options": {"size": SIZE, "p": ICE}, "size": 3000}
    return {
        "name": f"frozen-lake-{seed}",
        "storage": str(folder / "runs"),
        "seed": seed,
        "model": {"path": str(folder / "model"), "max_length": 768},
        "tasks": {"eval_size": 200, "sources": [lake]},
        "demonstrations": {name: {"path": str(folder / f"{name}.jsonl")} for name in ("mixed", "good")},
        "reward": {"truncated": "score"},
        "explorer": {
            "workflow": "episode",
            "workflow_options": {"episode": {"max_steps": STEPS}},
            "environment": {"name": "gymnasium", "processes": 128, "spares": 8},
            "engine": {"count": 1, "kv_cache_mib": 256},
            "sampling": {"max_tokens": 4, "max_prompt_tokens": 256},
            "over_sampling": 1.25,
        },
        "trainer": {"ranks": 1},
        "stages": [warmup, grpo, *(more if controls else [])],
    }


def _walk(desc: list[str], chance: np.random.Generator) -> tuple[dict[str, Any], bool]:
    """Return a conversation that walks over a map, and whether it arrives."""
    environment, task = (
        GymnasiumEnvironment(),
        Task.create("walk", "", "", metadata={"environment": {"desc": desc}}),
    )
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


def _write(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    number = int(sys.argv[1]) if sys.argv[1:] else 0
    place = Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp())
    write_task(place, number)
    run = rayrft.start(make_config(place, number))
    run.result()
    print(run.evaluations().to_string())
