"""The bottleneck of a run, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rayrft.monitor.records import StepRecord


def verdict(steps: Sequence[StepRecord], max_staleness: int) -> str:
    """Name the bottleneck over the given steps, and its remedy. Empty without rollouts."""
    steps = [step for step in steps if step.usual_rows]
    total = sum(step.step_s for step in steps)
    if not total:
        return ""
    wait, train, sync = (sum(getattr(s, name) for s in steps) / total for name in ("wait_s", "train_s", "sync_s"))
    rollout, reward = (sum(getattr(s, name) for s in steps) for name in ("rollout_s", "reward_s"))
    if wait >= max(train, sync):
        if reward > rollout:
            return f"trainer waited {wait:.0%} of the step: reward-bound; raise reward.workers"
        more = "add engines" if max_staleness else "add engines or raise max_staleness"
        return f"trainer waited {wait:.0%} of the step: rollout-bound; {more}"
    if sync > train:
        return f"weight sync took {sync:.0%} of the step: sync-bound; raise weight_sync.bucket_mib or the batch size"
    return f"training took {train:.0%} of the step: trainer-bound; add trainer ranks or raise micro_batch_tokens"
