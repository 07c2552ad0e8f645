"""From trajectories to rows that can be trained: rewards, then advantages, then what is dropped and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rayrft.buffer.experience import Experience
from rayrft.buffer.log.events import GroupReport
from rayrft.config.data import RewardConfig
from rayrft.rewards import RewardResult

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm


@dataclass(frozen=True)
class ScoredGroup:
    """``rows`` may be trained; ``dropped`` counts the others by reason. Without rows, the whole group was dropped."""

    rows: list[Experience]
    dropped: Counter[str]
    report: GroupReport
    unknown: str | None = None
    """Why a reward of this group is unknown."""
    rewards: list[float] = field(default_factory=list)
    greedy_reward: float | None = None
    """Of the greedy answer to the same task, where one was asked for."""


def apply_rewards(
    rows: list[Experience], results: list[RewardResult], config: RewardConfig, *, max_tokens: int
) -> ScoredGroup:
    """Give each row its reward, by the run's rules for unknown rewards and for truncated answers, which are cut at
    ``max_tokens``. A reward that the workflow gave stays."""
    kept, dropped, unknown = [], Counter[str](), None
    for row, result in zip(rows, results, strict=True):
        value, components = result.value, result.components
        if row.reward is None and row.stop_reason == "length" and config.truncated == "zero":
            value = 0.0
        if value is None:
            unknown = result.reason or "no reason given"
            if config.on_unknown != "fallback":
                dropped["reward_unknown"] += 1
                continue
            value = config.fallback
        if row.reward is None and config.overlong_buffer is not None:
            value += overlong_penalty(row, max_tokens, config.overlong_buffer)
        kept.append(dataclasses.replace(row, reward=value, reward_components=components, error=result.reason))
    if dropped and config.on_unknown == "drop_group":
        kept, dropped = [], Counter(reward_unknown=len(rows))
    values = [row.reward for row in kept if row.reward is not None]
    report = GroupReport(
        rows=len(rows),
        reward_sum=sum(values),
        scored=len(values),
        tokens=sum(int(row.action_mask.sum()) for row in rows),
        truncated=sum(row.stop_reason == "length" for row in rows),
    )
    return ScoredGroup(kept, dropped, report, unknown, values)


def overlong_penalty(row: Experience, max_tokens: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13): 0 for an answer of up to
    ``max_tokens - buffer`` tokens, then falling linearly to -1 at ``max_tokens``. The answer is the row's last turn."""
    end = np.flatnonzero(row.action_mask)[-1]
    length = int(end - np.flatnonzero(row.action_mask[:end] == 0)[-1])
    return min(0.0, max(-1.0, (max_tokens - buffer - length) / buffer))


def leave_out_truncated(group: ScoredGroup) -> ScoredGroup:
    """Overlong filtering: the group, its advantages assigned, without the answers that were cut."""
    kept = [row for row in group.rows if row.stop_reason != "length"]
    dropped = group.dropped + Counter(truncated=len(group.rows) - len(kept))
    return dataclasses.replace(group, rows=kept, dropped=dropped)


def with_baseline(group: ScoredGroup, greedy: ScoredGroup) -> ScoredGroup:
    """The group with the mean reward of the greedy answer's rows. Without one, none of the group can be trained."""
    if greedy.rewards:
        return dataclasses.replace(group, greedy_reward=sum(greedy.rewards) / len(greedy.rewards))
    dropped = group.dropped + Counter(baseline_unknown=len(group.rows))
    return dataclasses.replace(group, rows=[], rewards=[], dropped=dropped, unknown=greedy.unknown)


def assign_advantages(group: ScoredGroup, algorithm: Algorithm, *, drop_zero_variance: bool) -> ScoredGroup:
    """The group with the algorithm's advantages; see `rayrft.buffer.advantages.with_advantages`. A group where all are
    0, for want of variance in its rewards, is dropped where the algorithm learns nothing from it."""
    if not group.rows:
        return group
    from rayrft.buffer.advantages import with_advantages  # with it comes torch, which the Master does without

    rows = with_advantages(group.rows, algorithm, group.greedy_reward)
    moves = (row.advantages is None or row.advantages.any() for row in rows)
    if drop_zero_variance and algorithm.is_idle_at_zero and not any(moves):
        dropped = group.dropped + Counter(zero_variance=len(rows))
        return dataclasses.replace(group, rows=[], dropped=dropped)
    return dataclasses.replace(group, rows=rows)
