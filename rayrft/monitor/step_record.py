"""Builders of step and evaluation records from the reports of the actors."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass

from rayrft.buffer.leases import Lease
from rayrft.errors import WeightSyncError
from rayrft.explorer.evaluation import Evaluation, wilson_interval
from rayrft.explorer.explorer import Timings
from rayrft.monitor.records import EvaluationRecord, PairsRecord, StepRecord
from rayrft.trainer.result import PairRanking, StepResult
from rayrft.weights.messages import SyncReport

_NOT_RECORDED = ("train_s", "first_update", "value_errors", "reward_sum", "scored")

_CLIPPED = 0.05
"""Largest share of clipped tokens that is plausible for a policy that has not been updated yet."""


@dataclass(frozen=True)
class StepSeconds:
    """Wall time of a step and its parts, as seen by the Master."""

    step: float
    wait: float
    train: float


def step_record(
    stage: str,
    step: int,
    lease: Lease,
    results: list[StepResult],
    report: SyncReport | None,
    seconds: StepSeconds,
    timings: Timings,
    lost: dict[str, int],
    *,
    explores: bool = True,
) -> StepRecord:
    """Build the record of an optimiser step from the ``results`` of all ranks.

    ``report`` is None if no weights were published, ``lost`` is from `Ledger.lost_since`. The groups of a run that does
    not explore come when their producers like: its reward and its rate are those of the trained rows.
    """
    rollouts, stale, result = lease.rollouts, lease.staleness, results[0]
    trained = result.policy_tokens + result.expert_tokens
    scored = rollouts.scored if explores else sum(each.scored for each in results)
    rewards = rollouts.reward_sum if explores else sum(each.reward_sum for each in results)
    numbers = {name: value for name, value in asdict(result).items() if name not in _NOT_RECORDED}
    return StepRecord(
        stage=stage,
        step=step,
        version=report.version if report else step,
        time=time.time(),
        usual_rows=lease.usual_rows,
        expert_rows=lease.expert_rows,
        reward=rewards / scored if scored else None,
        sampled_rows=rollouts.rows,
        sampled_tokens=rollouts.tokens,
        lost=lost,
        truncated_share=rollouts.truncated / rollouts.rows if rollouts.rows else None,
        staleness_mean=sum(stale) / len(stale) if stale else None,
        staleness_max=max(stale) if stale else None,
        probe_gap=report.probe_gap if report else None,
        tokens_per_s=((explores and rollouts.tokens) or trained) / seconds.step,
        step_s=seconds.step,
        wait_s=seconds.wait,
        train_s=seconds.train,
        sync_s=report.seconds if report else 0.0,
        **asdict(timings),
        **numbers,
    )


_WORST_GAP = 3.0
"""Multiple of the accepted mean gap between engine and trainer above which the run ends."""


def check_gap(lease: Lease, result: StepResult, bound: float, *, ends: bool) -> str | None:
    """Return a warning if engine and trainer log-probs differ by more than ``bound`` in the mean, though all rows were
    sampled under the current weights. Raises WeightSyncError above three times the bound if that ``ends`` the run."""
    if not _is_fresh(lease) or result.logprob_gap <= bound:  # NaN is above it
        return None
    problem = (
        f"engine and trainer disagree by {result.logprob_gap:.2g} nats a token (tolerance {bound:g}) on tokens that "
        "were sampled under these weights: their precision or the temperature differ, or the weights do"
    )
    if ends and not result.logprob_gap <= _WORST_GAP * bound:
        remedy = "find out what differs; if engine and trainer do compute alike, raise weight_sync.tolerance"
        raise WeightSyncError(problem, remedy, field="weight_sync.tolerance")
    return problem


def _is_fresh(lease: Lease) -> bool:
    return bool(lease.staleness) and max(lease.staleness) == 0


def check_on_policy_step(lease: Lease, result: StepResult, tolerance: float) -> str | None:
    """Return a warning unless no ratio is clipped and the KL to the reference is 0, as they must be on a stage's first
    step. The clipping is checked only if all rows were sampled under the current weights."""
    if _is_fresh(lease) and result.first_update.clip_fraction > _CLIPPED:
        return (
            f"the loss clips the ratio on {result.first_update.clip_fraction:.0%} of the tokens, though the policy has "
            f"not been updated yet: its bounds are narrower than the {result.logprob_gap:.2g} nats a token between "
            "engine and trainer; set a correction, such as truncated, for ratios to the trainer's own log-probs"
        )
    if abs(result.first_update.kl) > tolerance:
        return (
            f"the KL to the reference is {result.first_update.kl:.2g} and not 0, though the policy has not been "
            "updated yet"
        )
    return None


def pairs_record(stage: str, step: int, stage_step: int, found: PairRanking, seconds: float) -> PairsRecord:
    """Build the record of a ranking of held-out preference pairs, with the confidence interval of its accuracy."""
    low, high = wilson_interval(found.right, found.pairs)
    accuracy, now = found.right / found.pairs, time.time()
    return PairsRecord(
        stage, step, stage_step, now, accuracy, low, high, found.right, found.pairs, found.margin, seconds
    )


def evaluation_record(
    stage: str, step: int, stage_step: int, temperature: float, result: Evaluation, seconds: float, skipped: int = 0
) -> EvaluationRecord:
    """Build the record of an evaluation of the weights of ``step``, with its confidence interval."""
    return EvaluationRecord(
        stage=stage,
        step=step,
        stage_step=stage_step,
        time=time.time(),
        version=step,
        temperature=temperature,
        accuracy=result.accuracy.value,
        low=result.accuracy.low,
        high=result.accuracy.high,
        right=result.right,
        count=result.count,
        mean_reward=result.mean_reward,
        unknown=sum(result.unknown.values()),
        seconds=seconds,
        samples=result.samples,
        passed=result.passed[result.samples].value if result.samples else math.nan,
        mean_tokens=result.mean_tokens,
        cut_share=result.cut_share,
        skipped=skipped,
    )
