"""Scoring of trajectories into trainable rows: rewards, filters, and counts of dropped rows by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rayrft.buffer.events import GroupReport
from rayrft.config.reward import LengthReward, RewardConfig
from rayrft.experience import MASKED, TRUNCATED, Experience, reaches, rewards_by_token
from rayrft.pipelines.experiences import VerifiedGroup
from rayrft.rewards import RewardResult

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm


@dataclass(frozen=True)
class ScoredGroup:
    """``rows`` may be trained on; ``dropped`` counts the others by reason. No rows: the whole group was dropped."""

    rows: list[Experience]
    dropped: Counter[str]
    report: GroupReport
    unknown: str | None = None
    """The reason why a reward of this group is unknown."""
    rewards: list[float] = field(default_factory=list)
    raw_rewards: list[float] = field(default_factory=list)
    """The rewards before shaping: what other rewards of length, format or repetition add or take."""
    problem: str | None = None
    """The last error of an operator on this group."""


def apply_rewards(
    rows: list[Experience], results: list[RewardResult], config: RewardConfig, *, max_tokens: int, step: int = 0
) -> ScoredGroup:
    """Set every row's reward by the rules for unknown rewards, answers cut at ``max_tokens`` and shaping at that step.

    Rewards set by the workflow are kept. An unknown reward makes an attempt's return unknown: all its rows are dropped.
    """
    unknown = [result.reason or "no reason given" for result in results if result.value is None]
    kept = list(zip(rows, results, strict=True))
    if unknown and config.on_unknown != "fallback":
        lost = {row.repeat for row, result in kept if result.value is None}
        kept = [] if config.on_unknown == "drop_group" else [each for each in kept if each[0].repeat not in lost]
    raw_rewards, penalties = list[float](), list[float]()
    for row, result in kept:
        value, penalty = config.fallback if result.value is None else result.value, result.shaping
        if row.reward is None:
            value = reward_after_truncation(row.stop_reason, value, config)
            penalty += overlong_penalty(row, max_tokens, config.overlong_buffer) if config.overlong_buffer else 0.0
            penalty -= config.repetition_penalty * (row.stop_reason == "repetition")
        raw_rewards.append(value)
        penalties.append(penalty)
    if config.length is not None:
        lengths = length_rewards([int(row.action_mask.sum()) for row, _ in kept], raw_rewards, config.length, step)
        # Those of a workflow are kept.
        penalties = [
            penalty + length * (row.reward is None)
            for (row, _), penalty, length in zip(kept, penalties, lengths, strict=True)
        ]
    values = [value + penalty for value, penalty in zip(raw_rewards, penalties, strict=True)]
    scored = list[Experience]()
    for (row, result), value in zip(kept, values, strict=True):
        fields = {"reward": value, "reward_components": result.components, "error": result.reason}
        if result.turns:
            turns = {f"turn_reward_{turn}": reward for turn, reward in enumerate(result.turns)}
            fields["metrics"] = row.metrics | turns
        scored.append(row.with_fields(**fields))
    report = replace(GroupReport.of(rows), reward_sum=sum(values), scored=len(values))
    dropped = Counter(reward_unknown=len(rows) - len(kept)) if len(kept) < len(rows) else Counter[str]()
    return ScoredGroup(scored, dropped, report, unknown[-1] if unknown else None, values, raw_rewards)


def reward_after_truncation(stop_reason: str | None, value: float, config: RewardConfig) -> float:
    """Return the reward of an answer scored ``value``: with ``reward.truncated: zero``, at most 0 if truncated."""
    return min(0.0, value) if stop_reason in TRUNCATED and config.truncated == "zero" else value


def overlong_penalty(row: Experience, max_tokens: int, buffer: int) -> float:
    """Compute the soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13) of the row's last turn: 0
    up to ``max_tokens - buffer`` tokens, then falling linearly to -1 at ``max_tokens``."""
    end = np.flatnonzero(row.action_mask)[-1]
    length = int(end - np.flatnonzero(row.action_mask[:end] == 0)[-1])
    return min(0.0, max(-1.0, (max_tokens - buffer - length) / buffer))


def length_rewards(lengths: Sequence[int], values: Sequence[float], config: LengthReward, step: int) -> list[float]:
    """Compute what the rows of a group earn for their lengths, in tokens, at an optimiser step; see `LengthReward`."""
    if not lengths or max(lengths) == min(lengths):
        return [0.0] * len(lengths)
    weight = config.weight * min(1.0, step / config.warm_up if config.warm_up else 1.0)
    shares = [0.5 - (length - min(lengths)) / (max(lengths) - min(lengths)) for length in lengths]
    return [
        weight * (share if reaches(value, config.right) else min(0.0, share))
        for share, value in zip(shares, values, strict=True)
    ]


def with_verified(group: ScoredGroup, verified: VerifiedGroup) -> ScoredGroup:
    """Return the group with the rows that operators have left, and the others counted. Where an operator has given a
    row another reward, that is its reward before shaping, too."""
    before = {row.experience_id: (row.reward, raw) for row, raw in zip(group.rows, group.raw_rewards, strict=True)}
    raw_rewards = list[float]()
    for row in verified.rows:
        reward, raw = before[row.experience_id]
        changed = row.reward is not None and row.reward != np.float32(reward or 0.0)
        raw_rewards.append(row.reward if changed and row.reward is not None else raw)
    dropped = group.dropped + verified.left_out
    return replace(group, rows=verified.rows, dropped=dropped, raw_rewards=raw_rewards, problem=verified.problem)


def mask_truncated(group: ScoredGroup) -> ScoredGroup:
    """Exclude truncated answers from training (overlong filtering): their rewards still count in the group's
    advantages. Without another answer, all rows are dropped."""
    rows = [row.with_fields(status=MASKED) if row.stop_reason in TRUNCATED else row for row in group.rows]
    masked = sum(row.status == MASKED for row in rows)
    dropped = group.dropped + Counter(truncated=masked)
    return replace(group, rows=rows if masked < len(rows) else [], dropped=dropped)


def mask_old(group: ScoredGroup, oldest: int) -> ScoredGroup:
    """Exclude the tokens that were sampled under weights before version ``oldest`` from training. A row without others
    is kept for its reward alone. So is one that would lose the token of a step with a reward, or one of the turns with
    rewards by their number. Without another row, all are dropped."""
    rows, dropped = [], 0
    for row in group.rows:
        old = [span for span in row.weight_versions if span.version < oldest]
        if old and row.status != MASKED:
            mask, logprobs = row.action_mask.copy(), row.logprobs.copy()
            for span in old:
                mask[span.start : span.end], logprobs[span.start : span.end] = 0, 0.0
            by_turn = any(name.startswith("turn_") for name in row.metrics)
            lost = [token for token in rewards_by_token(row.metrics) if not mask[token]]
            if mask.any() and not lost and not (by_turn and _turns(mask) < _turns(row.action_mask)):
                versions = tuple(span for span in row.weight_versions if span.version >= oldest)
                row = row.with_fields(action_mask=mask, logprobs=logprobs, weight_versions=versions)
            else:
                row = row.with_fields(status=MASKED)
                dropped += 1
        rows.append(row)
    if not dropped:
        return replace(group, rows=rows)
    trainable = any(row.status != MASKED for row in rows)
    return replace(group, rows=rows if trainable else [], dropped=group.dropped + Counter(old_tokens=dropped))


def _turns(mask: np.ndarray) -> int:
    return int(np.count_nonzero(np.diff(mask.astype(np.int8), prepend=0) == 1))


def with_baseline(group: ScoredGroup, greedy: ScoredGroup) -> ScoredGroup:
    """Set the greedy baseline, the mean reward of the greedy answer's rows; without one, drop all rows."""
    if greedy.rewards:
        reward = sum(greedy.rewards) / len(greedy.rewards)
        return replace(group, rows=[row.with_fields(greedy_reward=reward) for row in group.rows])
    dropped = group.dropped + Counter(baseline_unknown=len(group.rows))
    return replace(group, rows=[], rewards=[], dropped=dropped, unknown=greedy.unknown)


def with_failures(group: ScoredGroup, failed: Counter[str]) -> ScoredGroup:
    """Count every failed repeat as one row that was sampled and dropped."""
    if not failed:
        return group
    report = replace(group.report, rows=group.report.rows + failed.total())
    return replace(group, dropped=group.dropped + failed, report=report)


def drop_zero_variance(group: ScoredGroup, algorithm: Algorithm) -> ScoredGroup:
    """Drop all rows if the algorithm learns nothing from them: all advantages are 0, and such rows have no gradient.

    The test uses rewards before penalties, so that wrong answers are not kept for differing in length (DAPO,
    Yu et al. 2025, arXiv:2503.14476, eq. 11, filters by correctness).
    """
    if not group.rows or not algorithm.zero_advantage_is_noop:
        return group
    from rayrft.data.turns import compute_advantages  # imports torch, which the Master does not need

    if any(values.any() for values in compute_advantages(group.rows, algorithm, group.raw_rewards)):
        return group
    return replace(group, rows=[], dropped=group.dropped + Counter(zero_variance=len(group.rows)))
