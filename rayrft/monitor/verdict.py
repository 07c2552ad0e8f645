"""Verdicts on steps: the bottleneck of a run, and numbers that cannot be right."""

from __future__ import annotations

from collections import defaultdict

from rayrft.buffer.leases import Lease
from rayrft.errors import WeightSyncError
from rayrft.monitor.records import StepRecord
from rayrft.trainer.result import StepResult

_CLIPPED = 0.05
"""Largest share of clipped tokens that is plausible for a policy that has not been updated yet."""

_WORST_GAP = 3.0
"""Multiple of the accepted mean gap between engine and trainer above which the run ends."""


class Bottleneck:
    """The seconds of steps by part, each step added once."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, step: StepRecord) -> None:
        """Add a step, unless it trained without usual rows."""
        if step.usual_rows:
            for part, seconds in {**step.seconds, "step": step.step_s}.items():
                self._seconds[part] += seconds

    def verdict(self, max_staleness: int, *, explores: bool = True) -> str:
        """Name the bottleneck over the steps, and its remedy. Empty without usual rows."""
        seconds = self._seconds
        if not (total := seconds["step"]):
            return ""
        wait, train, sync = (seconds[part] / total for part in ("wait", "train", "sync"))
        if wait >= max(train, sync):
            if not explores:
                return f"trainer waited {wait:.0%} of the step: short of groups; let more be put into its Buffer"
            if seconds["reward"] > seconds["rollout"]:
                return f"trainer waited {wait:.0%} of the step: reward-bound; raise reward.workers"
            more = "add engines" if max_staleness else "add engines or raise max_staleness"
            return f"trainer waited {wait:.0%} of the step: rollout-bound; {more}"
        if sync > train:
            more = "raise weight_sync.bucket_mib or the batch size"
            return f"weight sync took {sync:.0%} of the step: sync-bound; {more}"
        return f"training took {train:.0%} of the step: trainer-bound; add trainer ranks or raise micro_batch_tokens"


def check_gap(lease: Lease, result: StepResult, bound: float, *, ends: bool) -> str | None:
    """Return a warning if engine and trainer log-probs differ by more than ``bound`` in the mean, though all rows were
    sampled under the current weights. Raises WeightSyncError above three times the bound if that ``ends`` the run."""
    gap = result.metrics.logprob_gap
    if not _is_fresh(lease) or gap <= bound:  # NaN is above it
        return None
    problem = (
        f"engine and trainer disagree by {gap:.2g} nats a token (tolerance {bound:g}) on tokens "
        "that were sampled under these weights: their precision or the temperature differ, or the weights do"
    )
    if ends and not gap <= _WORST_GAP * bound:
        remedy = "find out what differs; if engine and trainer do compute alike, raise weight_sync.tolerance"
        raise WeightSyncError(problem, remedy, field="weight_sync.tolerance")
    return problem


def _is_fresh(lease: Lease) -> bool:
    return bool(lease.staleness) and max(lease.staleness) == 0


def check_on_policy_step(lease: Lease, result: StepResult, tolerance: float) -> str | None:
    """Return a warning unless no ratio is clipped and the KL to the reference is 0, as they must be on a stage's first
    step. The clipping is checked only if all rows were sampled under the current weights."""
    first, gap = result.first_update, result.metrics.logprob_gap
    if _is_fresh(lease) and first.clip_fraction > _CLIPPED:
        return (
            f"the loss clips the ratio on {first.clip_fraction:.0%} of the tokens, though the policy has "
            f"not been updated yet: its bounds are narrower than the {gap:.2g} nats a token between "
            "engine and trainer; set a correction, such as truncated, for ratios to the trainer's own log-probs"
        )
    if abs(first.kl) > tolerance:
        return f"the KL to the reference is {first.kl:.2g} and not 0, though the policy has not been updated yet"
    return None
