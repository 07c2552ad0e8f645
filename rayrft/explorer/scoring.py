"""From trajectories to rows that can be trained: rewards, then advantages, then what is dropped and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rayrft.buffer.events import GroupReport
from rayrft.config.reward import RewardConfig
from rayrft.experience import LEFT_OUT, Experience
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
    unpunished: list[float] = field(default_factory=list)
    """The same before the overlong punishment."""
    greedy_reward: float | None = None
    """Of the greedy answer to the same task, where one was asked for."""


def apply_rewards(
    rows: list[Experience], results: list[RewardResult], config: RewardConfig, *, max_tokens: int
) -> ScoredGroup:
    """Give each row its reward, by the run's rules for unknown rewards and for truncated answers, which are cut at
    ``max_tokens``. A reward that the workflow gave stays. Where that of a row is unknown, so is the return of its whole
    trajectory, which is dropped with it."""
    unknown = [result.reason or "no reason given" for result in results if result.value is None]
    lost = {row.repeat for row, result in zip(rows, results, strict=True) if result.value is None}
    if config.on_unknown == "drop_group" and lost:
        lost = {row.repeat for row in rows}
    kept: list[Experience] = []
    unpunished: list[float] = []
    for row, result in zip(rows, results, strict=True):
        if row.repeat in lost and config.on_unknown != "fallback":
            continue
        value, penalty = config.fallback if result.value is None else result.value, 0.0
        if row.reward is None:
            value = earned(row.stop_reason, value, config)
            penalty = overlong_penalty(row, max_tokens, config.overlong_buffer) if config.overlong_buffer else 0.0
        unpunished.append(value)
        reward, components = value + penalty, result.components
        kept.append(dataclasses.replace(row, reward=reward, reward_components=components, error=result.reason))
    values = [row.reward for row in kept if row.reward is not None]
    report = GroupReport(
        rows=len(rows),
        reward_sum=sum(values),
        scored=len(values),
        tokens=sum(int(row.action_mask.sum()) for row in rows),
        truncated=sum(row.stop_reason == "length" for row in rows),
    )
    dropped = Counter(reward_unknown=len(rows) - len(kept)) if len(kept) < len(rows) else Counter[str]()
    return ScoredGroup(kept, dropped, report, unknown[-1] if unknown else None, values, unpunished)


def earned(stop_reason: str | None, value: float, config: RewardConfig) -> float:
    """What an answer gets that is worth ``value``. One that was cut earns nothing where the run says so, and its cut
    does not better it either, where rewards may be below 0."""
    return min(0.0, value) if stop_reason == "length" and config.truncated == "zero" else value


def overlong_penalty(row: Experience, max_tokens: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13): 0 for an answer of up to
    ``max_tokens - buffer`` tokens, then falling linearly to -1 at ``max_tokens``. The answer is the row's last turn."""
    end = np.flatnonzero(row.action_mask)[-1]
    length = int(end - np.flatnonzero(row.action_mask[:end] == 0)[-1])
    return min(0.0, max(-1.0, (max_tokens - buffer - length) / buffer))


def leave_out_truncated(group: ScoredGroup) -> ScoredGroup:
    """Overlong filtering: the group, its advantages assigned, without the answers that were cut. The others say in
    their metrics how many they were compared with besides each other."""
    kept = [row for row in group.rows if row.stop_reason != "length"]
    gone = len(group.rows) - len(kept)
    if gone:
        kept = [dataclasses.replace(row, metrics={**row.metrics, LEFT_OUT: float(gone)}) for row in kept]
    return dataclasses.replace(group, rows=kept, dropped=group.dropped + Counter(truncated=gone))


def with_baseline(group: ScoredGroup, greedy: ScoredGroup) -> ScoredGroup:
    """The group with the mean reward of the greedy answer's rows. Without one, none of the group can be trained."""
    if greedy.rewards:
        return dataclasses.replace(group, greedy_reward=sum(greedy.rewards) / len(greedy.rewards))
    dropped = group.dropped + Counter(baseline_unknown=len(group.rows))
    return dataclasses.replace(group, rows=[], rewards=[], dropped=dropped, unknown=greedy.unknown)


def with_failures(group: ScoredGroup, failed: Counter[str]) -> ScoredGroup:
    """The group with the repeats that failed, which count as a row each that was sampled and dropped."""
    report = dataclasses.replace(group.report, rows=group.report.rows + failed.total())
    return dataclasses.replace(group, dropped=group.dropped + failed, report=report)


def assign_advantages(group: ScoredGroup, algorithm: Algorithm, *, drop_zero_variance: bool) -> ScoredGroup:
    """The group with the algorithm's advantages; see `rayrft.buffer.feedback.with_advantages`. A group where all are
    0, for want of variance in its rewards, is dropped where the algorithm learns nothing from it. What they would be
    without the overlong punishment counts: answers that are all wrong are not told apart by their length (DAPO, Yu et
    al. 2025, arXiv:2503.14476, eq. 11, asks whether they are right)."""
    if not group.rows:
        return group
    from rayrft.buffer.feedback import with_advantages  # with it comes torch, which the Master does without

    rows = judged = with_advantages(group.rows, algorithm, group.greedy_reward)
    if group.unpunished != group.rewards:
        plain = zip(group.rows, group.unpunished, strict=True)
        unpunished = [dataclasses.replace(row, reward=value) for row, value in plain]
        judged = with_advantages(unpunished, algorithm, group.greedy_reward)
    moves = (row.advantages is None or row.advantages.any() for row in judged)
    if drop_zero_variance and algorithm.zero_advantage_is_noop and not any(moves):
        dropped = group.dropped + Counter(zero_variance=len(rows))
        return dataclasses.replace(group, rows=[], dropped=dropped)
    return dataclasses.replace(group, rows=rows)
