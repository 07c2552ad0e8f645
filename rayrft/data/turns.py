"""Advantages of a group's rows from their rewards: by row, or by turn (a run of model tokens) and step inside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rayrft.algorithms import Algorithm, GroupFacts
from rayrft.errors import DataError
from rayrft.experience import Experience, rewards_by_token


def compute_advantages(
    rows: list[Experience], algorithm: Algorithm, rewards: list[float] | None = None
) -> list[np.ndarray]:
    """Compute the algorithm's advantages of all rows of one group, an array ``[T]`` (float32) for every row.

    They are equal on all action tokens of a row or, if the algorithm uses turns, of a turn or step, and 0 elsewhere.
    ``rewards`` replace those of the rows. Rewards are rounded to float32, as stored rows hold them.

    Raises ValueError if the advantages come from a critic, or compare with a greedy answer whose reward is missing, and
    DataError if a row lacks a component of its reward that they use.
    """
    if rewards is not None:
        rows = [row.with_fields(reward=reward) for row, reward in zip(rows, rewards, strict=True)]
    greedy = None if rows[0].greedy_reward is None else float(np.float32(rows[0].greedy_reward))
    if "turns" in algorithm.needs:
        turns = Turns.of(rows)
        known = replace(turns.group, greedy_reward=greedy)
        return turns.spread(algorithm.group_advantages(turns.rewards, known), rows)
    values = torch.tensor([row.reward for row in rows], dtype=torch.float32).double()
    components = reward_components(rows, algorithm.reward_components) if "components" in algorithm.needs else None
    found = algorithm.group_advantages(values, GroupFacts(greedy, components=components)).tolist()
    return [row.action_mask * np.float32(value) for row, value in zip(rows, found, strict=True)]


def reward_components(rows: list[Experience], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Collect the named components of the rows' rewards, ``[n]`` float64 each; without names, all that any row has.

    Raises DataError if there is none, or a row lacks one or holds a number that is not finite.
    """
    names = names or tuple(sorted({name for row in rows for name in row.reward_components}))
    for row in rows:
        lacking = [name for name in names if not math.isfinite(row.reward_components.get(name, math.nan))]
        if lacking or not names:
            problem = f"the reward of row {row.experience_id!r} has no {', '.join(lacking) or 'components'}"
            remedy = "return all components for each answer from the reward, or change algorithm.reward_components"
            raise DataError(problem, remedy, field="reward_components", value=row.reward_components)
    return {name: torch.tensor([row.reward_components[name] for row in rows], dtype=torch.float64) for name in names}


def turn_rewards(mask: np.ndarray, metrics: Mapping[str, float]) -> np.ndarray:
    """Return the rewards of turns and steps, without the row's own, on the last token of each, ``[T]`` float32."""
    rewards = np.zeros(len(mask), np.float32)
    for k, (_, _, end) in enumerate(_runs(mask)):
        rewards[end - 1] = metrics.get(f"turn_reward_{k}", 0.0)
    for token, reward in rewards_by_token(metrics).items():
        rewards[token] += reward
    return rewards


@dataclass(frozen=True)
class Turns:
    """The S turns of a list of rows, in order; of a turn whose steps have rewards, its steps.

    A trajectory is one repeat of the task (`Experience.repeat`), in one row or in several consecutive ones. A turn is a
    run of the action mask. A workflow describes a row's k-th turn, from 0, in the row's ``metrics``:

    * ``turn_reward_<k>``: its reward. The row's reward is added to that of its last turn;
    * ``turn_state_<k>``: a number that is equal in equal states. Without it, states are equal if the tokens right
      before the turn are equal: the prompt, or the last observation.

    A reward may give a value to a step inside a turn that ends with the row's token t, ``token_reward_<t>``
    (`rayrft.rewards.StepReward`). The turn is split after these tokens; what follows the last of them belongs to its
    step, which gets the turn's reward, too. The state of a later step is that of the turn and the tokens since then.

    Rewards of turns are used by ``step_wise``, ``gigpo``, ``process`` and the advantages of a critic (`turn_rewards`),
    which know only the turns of the same row. All others use the reward of the row alone.
    """

    rewards: Tensor
    """``[S]`` float64."""
    group: GroupFacts
    """Trajectory, index in it and state of every turn, and whether it has a reward."""
    spans: tuple[tuple[int, int, int], ...]
    """Row, first token and end of every turn or step."""

    @classmethod
    def of(cls, rows: list[Experience]) -> Turns:
        """Return the turns of these rows, all of which have a reward."""
        rewards, rewarded, spans, trajectories, numbers, states = [], [], [], [], [], []
        counts, known_states = Counter[str](), dict[Hashable, int]()
        names: dict[str, int] = {}
        for index, row in enumerate(rows):
            runs, of_tokens = _runs(row.action_mask), rewards_by_token(row.metrics)
            for k, (before, start, end) in enumerate(runs):
                inside = sorted(token for token in of_tokens if start <= token < end)
                values = [of_tokens[token] for token in inside] or [0.0]
                values[-1] += row.metrics.get(f"turn_reward_{k}", 0.0) + (row.reward or 0.0) * (k == len(runs) - 1)
                rewards += values
                rewarded += [value != 0 or k == len(runs) - 1 for value in values]
                before_turn = row.metrics.get(f"turn_state_{k}", row.token_ids[before:start].tobytes())
                for first, last in pairwise([start, *(token + 1 for token in inside[:-1]), end]):
                    state: Hashable = before_turn, row.token_ids[start:first].tobytes()
                    states.append(known_states.setdefault(state, len(known_states)))
                    trajectories.append(names.setdefault(row.repeat, len(names)))
                    numbers.append(counts[row.repeat])
                    counts[row.repeat] += 1
                    spans.append((index, first, last))
        group = GroupFacts(
            trajectory=torch.tensor(trajectories),
            turn=torch.tensor(numbers),
            state=torch.tensor(states),
            rewarded=torch.tensor(rewarded),
        )
        return cls(torch.tensor(rewards, dtype=torch.float64), group, tuple(spans))

    def spread(self, values: Tensor, rows: list[Experience]) -> list[np.ndarray]:
        """Spread ``[S]`` values to an array ``[T]`` per row: tokens of a turn get the turn's value, others 0."""
        arrays = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        for value, (row, start, end) in zip(values.tolist(), self.spans, strict=True):
            arrays[row][start:end] = value
        return arrays


def _runs(mask: np.ndarray) -> list[tuple[int, int, int]]:
    """Return for every run of ones in a mask the end of the previous run, its start, and its end."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    starts, ends = edges[::2], edges[1::2]
    return list(zip([0, *ends[:-1]], starts, ends, strict=True))
