"""Formatting of records for the console."""

from __future__ import annotations

from rayrft.explorer.explorer import Timings
from rayrft.monitor.records import EvaluationRecord, PairsRecord, Record, RolloutRecord, StepRecord
from rayrft.pipelines.report import OperatorStats

_BY_DESIGN = {"zero_variance", "stale", "surplus", "late", "truncated", "evicted_oldest", "evicted_lowest_priority"}
"""Reasons for which rows are dropped by design."""


def format_record(record: Record) -> str:
    """Format a record as one line."""
    if isinstance(record, StepRecord):
        return _step(record)
    if isinstance(record, RolloutRecord):
        return _rollout(record)
    if isinstance(record, EvaluationRecord):
        passed = f", pass@{record.samples} {record.passed:.3f}" if record.samples > 1 else ""
        return (
            f"[{record.stage} {record.step:>4}] held-out accuracy {record.accuracy:.3f} "
            f"({record.right} of {record.count}, 95 % {record.low:.3f}-{record.high:.3f}{passed}) "
            f"{temperature_name(record.temperature)}"
        )
    if isinstance(record, PairsRecord):
        return (
            f"[{record.stage} {record.step:>4}] held-out pairs {record.accuracy:.3f} right ({record.right} of "
            f"{record.count}, 95 % {record.low:.3f}-{record.high:.3f}), by {record.margin:.3f}"
        )
    return f"[{record.stage} {record.step:>4}] {record.text}" if record.stage else record.text


def temperature_name(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"at temperature {temperature:g}"


def _step(r: StepRecord) -> str:
    m, parts = r.metrics, [f"[{r.stage} {r.step:>4}]"]
    if r.usual_rows:
        reward = "-" if r.reward is None else f"{r.reward:.3f}"
        parts += [f"reward {reward}", f"policy {m.policy_loss:+.4f}"]
    if m.distillation_loss:
        parts.append(f"distillation {m.distillation_loss:.4f}")
    if m.preference_loss:
        parts.append(f"preference {m.preference_loss:.4f}")
        if m.pair_margin:
            parts.append(f"pairs {m.pair_accuracy:.0%} right, by {m.pair_margin:.3f}")
        if m.good_score or m.bad_score:
            parts.append(f"good {m.good_score:+.3f}, bad {m.bad_score:+.3f}")
    elif r.expert_rows:
        parts.append(f"sft {m.sft_loss:.4f}")
    parts.append(f"{r.tokens_per_s:,.0f} tok/s")
    if r.usual_rows:
        parts += [f"stale {r.staleness_mean:.1f}/{r.staleness_max}", f"gap {m.logprob_gap:.1e}"]
        parts.append(
            f"{r.step_s:.2f} s = wait {r.wait_s:.2f} ({_rollouts(r.timings)}) "
            f"+ train {r.train_s:.2f} + sync {r.sync_s:.2f}"
        )
    else:
        parts.append(f"{r.step_s:.2f} s")
    return "  ".join([*parts, *_verified(r.timings.operators), *_unexpected_losses(r)])


def _rollout(r: RolloutRecord) -> str:
    reward = "-" if r.reward is None else f"{r.reward:.3f}"
    parts = [f"[{r.stage} {r.step:>5} groups]", f"reward {reward}", f"{r.tokens_per_s:,.0f} tok/s"]
    parts += [f"held {r.held}", f"{r.seconds:.2f} s ({_rollouts(r.timings)})"]
    return "  ".join([*parts, *_verified(r.timings.operators), *_unexpected_losses(r)])


def _rollouts(timings: Timings) -> str:
    return f"rollout {timings.rollout_s:.2f}, reward {timings.reward_s:.2f}"


def _verified(operators: dict[str, OperatorStats]) -> list[str]:
    """Return the rows that operators left out by design, and the rows that they made."""
    left_out = {name: each.left_out - each.failed for name, each in operators.items()}
    made = {name: each.made for name, each in operators.items()}
    return [
        f"{what} " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        for what, counts in (("left out", left_out), ("made", made))
        if any(counts.values())
    ]


def _unexpected_losses(r: StepRecord | RolloutRecord) -> list[str]:
    """Return the rows that were lost by faults, by reason."""

    def expected(reason: str) -> bool:
        operator, _, why = reason.partition(": ")
        return reason in _BY_DESIGN or (
            operator in r.timings.operators and not why.startswith(("failed", "timeout", "raised "))
        )

    losses = {reason: count for reason, count in r.lost.items() if not expected(reason)}
    return ["lost " + ", ".join(f"{count} {reason}" for reason, count in losses.items())] if losses else []
