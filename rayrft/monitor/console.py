"""Formatting of records for the console."""

from __future__ import annotations

from rayrft.explorer.explorer import Timings
from rayrft.monitor.records import NoteRecord, PairsRecord, Record, RestartRecord, RolloutRecord, StepRecord

_BY_DESIGN = {"zero_variance", "stale", "surplus", "late", "truncated", "evicted_oldest", "evicted_lowest_priority"}
"""Reasons for which rows are dropped by design."""


def format_record(record: Record) -> str:
    """Format a record as one line."""
    if isinstance(record, StepRecord):
        return _step(record)
    if isinstance(record, RolloutRecord):
        return _rollout(record)
    head = f"[{record.stage} {record.step:>4}]"
    if isinstance(record, NoteRecord):
        return f"{head} {record.text}" if record.stage else record.text
    if isinstance(record, RestartRecord):
        return f"{head} restarted {record.actor} after {record.seconds:.1f} s: {record.cause}"
    counts = f"{record.right} of {record.count}, 95 % {record.low:.3f}-{record.high:.3f}"
    if isinstance(record, PairsRecord):
        return f"{head} held-out pairs {record.accuracy:.3f} right ({counts}), by {record.margin:.3f}"
    counts += f", pass@{record.samples} {record.passed:.3f}" if record.samples > 1 else ""
    counts += f", {record.unknown} unknown" if record.unknown else ""
    return f"{head} held-out accuracy {record.accuracy:.3f} ({counts}) {temperature_name(record.temperature)}"


def temperature_name(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"at temperature {temperature:g}"


def _step(r: StepRecord) -> str:
    m, parts = r.metrics, [f"[{r.stage} {r.step:>4}]"]
    if r.usual_rows:
        parts += [_reward(r), f"policy {m.policy_loss:+.4f}"]
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
    if m.skipped_updates:
        parts.append(f"{m.skipped_updates} updates skipped: not finite")
    parts.append(f"{r.tokens_per_s:,.0f} tok/s")
    if r.usual_rows:
        parts += [f"stale {r.staleness_mean:.1f}/{r.staleness_max}", f"gap {m.logprob_gap:.1e}"]
        split = f"wait {r.wait_s:.2f} ({_rollouts(r.timings)}) + train {r.train_s:.2f} + sync {r.sync_s:.2f}"
        parts.append(f"{r.step_s:.2f} s = {split}")
    else:
        parts.append(f"{r.step_s:.2f} s")
    return "  ".join([*parts, *_rows(r)]) + _problems(r)


def _problems(r: StepRecord | RolloutRecord) -> str:
    return "".join(f"\n  {reason}: {text}" for reason, text in r.timings.problems.items())


def _rollout(r: RolloutRecord) -> str:
    parts = [f"[{r.stage} {r.step:>5} groups]", _reward(r), f"{r.tokens_per_s:,.0f} tok/s"]
    parts += [f"held {r.held}", f"{r.seconds:.2f} s ({_rollouts(r.timings)})"]
    return "  ".join([*parts, *_rows(r)]) + _problems(r)


def _reward(r: StepRecord | RolloutRecord) -> str:
    return "reward -" if r.reward is None else f"reward {r.reward:.3f}"


def _rollouts(timings: Timings) -> str:
    return f"rollout {timings.rollout_s:.2f}, reward {timings.reward_s:.2f}"


def _rows(r: StepRecord | RolloutRecord) -> list[str]:
    """Return the rows that operators left out by design, that they made, that faults lost, and unknown rewards."""
    operators = r.timings.operators

    def expected(reason: str) -> bool:
        operator, _, why = reason.partition(": ")
        by_design = operator in operators and not why.startswith(("failed", "timeout", "raised "))
        return by_design or reason in _BY_DESIGN

    kinds = {
        "left out": {name: each.left_out - each.failed for name, each in operators.items()},
        "made": {name: each.made for name, each in operators.items()},
        "lost": {reason: count for reason, count in r.lost.items() if not expected(reason)},
        "unknown": {f"rewards {domain}".strip(): each.unknown for domain, each in r.timings.rewards.items()},
    }
    return [
        f"{kind} " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        for kind, counts in kinds.items()
        if any(counts.values())
    ]
