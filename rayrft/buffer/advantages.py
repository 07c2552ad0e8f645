"""The advantages of a group's rows, wherever they are found: in the Explorer, for rows that another job hands in, and
after feedback on a reward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rayrft.algorithms import Algorithm, Group
from rayrft.buffer.experience import Experience
from rayrft.buffer.turns import Turns


def with_advantages(
    rows: list[Experience], algorithm: Algorithm, greedy_reward: float | None = None
) -> list[Experience]:
    """The rows of one group with the algorithm's advantages, from their rewards (none counts as 0): the same on every
    action token of a row or, where the algorithm looks at turns, of a turn. None where a critic gives them: the trainer
    computes those from rewards.

    Raises ValueError where the algorithm needs ``greedy_reward`` and there is none.
    """
    if algorithm.advantage_is_by_token:
        return [replace(row, advantages=None) for row in rows]
    if algorithm.needs_turns:
        turns = Turns.of(rows)
        known = replace(turns.group, greedy_reward=greedy_reward)
        found = turns.spread(algorithm.group_advantages(turns.rewards, known), rows)
    else:
        rewards = torch.tensor([row.reward or 0.0 for row in rows], dtype=torch.float64)
        values = algorithm.group_advantages(rewards, Group(greedy_reward)).tolist()
        found = [row.action_mask * np.float32(value) for row, value in zip(rows, values, strict=True)]
    return [replace(row, advantages=each) for row, each in zip(rows, found, strict=True)]
