"""The bottleneck of a run, in one sentence."""

from __future__ import annotations

from collections import Counter

from rayrft.monitor.records import StepRecord

_PARTS = ("step", "wait", "train", "sync", "rollout", "reward")


class Bottleneck:
    """The seconds of steps by part, each step added once."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def add(self, step: StepRecord) -> None:
        """Add a step, unless it trained without own rows."""
        if step.usual_rows:
            self._seconds.update({part: getattr(step, f"{part}_s") for part in _PARTS})

    def verdict(self, max_staleness: int, *, explores: bool = True) -> str:
        """Name the bottleneck over the steps, and its remedy. Empty without own rows."""
        total, *seconds = (self._seconds[part] for part in _PARTS)
        if not total:
            return ""
        wait, train, sync, rollout, reward = (each / total for each in seconds)
        if wait >= max(train, sync):
            if not explores:
                return f"trainer waited {wait:.0%} of the step: short of groups; let more be put into its Buffer"
            if reward > rollout:
                return f"trainer waited {wait:.0%} of the step: reward-bound; raise reward.workers"
            more = "add engines" if max_staleness else "add engines or raise max_staleness"
            return f"trainer waited {wait:.0%} of the step: rollout-bound; {more}"
        if sync > train:
            more = "raise weight_sync.bucket_mib or the batch size"
            return f"weight sync took {sync:.0%} of the step: sync-bound; {more}"
        return f"training took {train:.0%} of the step: trainer-bound; add trainer ranks or raise micro_batch_tokens"
