"""The turns of a group's rows: the stretches of tokens that the model produced, with what came of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayrft.algorithms import Group
from rayrft.experience import Experience


@dataclass(frozen=True)
class Turns:
    """The S turns of some rows, one after the other.

    A trajectory is what one repeat of the task gave (`Experience.repeat`), be it one row or several in their order. A
    turn is a run of the action mask. What a workflow knows of a row's k-th turn, from 0 on, is in the row's
    ``metrics``:

    * ``turn_reward_<k>``: its reward. The row's own reward is added to that of its last turn;
    * ``turn_state_<k>``: a number that is equal in equal states. Without it, turns were taken in the same state where
      what came right before them is equal token by token: the prompt, or the last observation.

    Rewards and states of turns are looked at by ``step_wise`` and ``gigpo`` alone; every other advantage, a critic's
    too, knows the reward of the row.
    """

    rewards: Tensor
    """``[S]`` float64."""
    group: Group
    """Trajectory, place in it and state of every turn."""
    places: tuple[tuple[int, int, int], ...]
    """Row, first token and end of every turn."""

    @classmethod
    def of(cls, rows: list[Experience]) -> Turns:
        """The turns of these rows, all of which have a reward."""
        rewards, places, trajectories, numbers, states = [], [], [], [], []
        taken, known_states = Counter[str](), dict[Hashable, int]()
        names: dict[str, int] = {}
        for index, row in enumerate(rows):
            runs = _runs(row.action_mask)
            for k, (before, start, end) in enumerate(runs):
                reward = row.metrics.get(f"turn_reward_{k}", 0.0)
                rewards.append(reward + (row.reward or 0.0) * (k == len(runs) - 1))
                state: Hashable = row.metrics.get(f"turn_state_{k}")
                if state is None:
                    state = row.token_ids[before:start].tobytes()
                states.append(known_states.setdefault(state, len(known_states)))
                trajectories.append(names.setdefault(row.repeat, len(names)))
                numbers.append(taken[row.repeat])
                taken[row.repeat] += 1
                places.append((index, start, end))
        group = Group(trajectory=torch.tensor(trajectories), turn=torch.tensor(numbers), state=torch.tensor(states))
        return cls(torch.tensor(rewards, dtype=torch.float64), group, tuple(places))

    def spread(self, values: Tensor, rows: list[Experience]) -> list[np.ndarray]:
        """``[S]`` values to an array ``[T]`` for every row: each token of a turn gets the turn's value, others 0."""
        arrays = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        for value, (row, start, end) in zip(values.tolist(), self.places, strict=True):
            arrays[row][start:end] = value
        return arrays


def _runs(mask: np.ndarray) -> list[tuple[int, int, int]]:
    """Every run of ones in a mask: where what lies before it begins, where it begins, and where it ends."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    starts, ends = edges[::2], edges[1::2]
    return list(zip([0, *ends[:-1]], starts, ends, strict=True))
