"""From trajectories to rows that can be trained: rewards, then advantages, then what is dropped and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from rayrft.algorithms import Algorithm
from rayrft.buffer.advantages import with_advantages
from rayrft.buffer.experience import Experience
from rayrft.buffer.log.events import GroupReport
from rayrft.config.data import RewardConfig
from rayrft.rewards import RewardResult


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


def apply_rewards(rows: list[Experience], results: list[RewardResult], config: RewardConfig) -> ScoredGroup:
    """Give each row its reward, by the run's rules for unknown rewards and for truncated answers. A reward that the
    workflow gave stays."""
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
    rows = with_advantages(group.rows, algorithm, group.greedy_reward)
    moves = (row.advantages is None or row.advantages.any() for row in rows)
    if drop_zero_variance and algorithm.is_idle_at_zero and not any(moves):
        dropped = group.dropped + Counter(zero_variance=len(rows))
        return dataclasses.replace(group, rows=[], dropped=dropped)
    return dataclasses.replace(group, rows=rows)
