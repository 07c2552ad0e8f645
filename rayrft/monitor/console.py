"""Formatting of records for the console."""

from __future__ import annotations

from rayrft.monitor.records import EvaluationRecord, PairsRecord, Record, RolloutRecord, StepRecord

_BY_DESIGN = {"zero_variance", "stale", "surplus", "late", "truncated", "evicted_oldest", "evicted_lowest_priority"}
"""Reasons for which rows are dropped where nothing is wrong."""


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
    parts = [f"[{r.stage} {r.step:>4}]"]
    if r.usual_rows:
        reward = "-" if r.reward is None else f"{r.reward:.3f}"
        parts += [f"reward {reward}", f"policy {r.policy_loss:+.4f}"]
    if r.distillation_loss:
        parts.append(f"distillation {r.distillation_loss:.4f}")
    if r.preference_loss:
        parts.append(f"preference {r.preference_loss:.4f}")
        if r.pair_margin:
            parts.append(f"pairs {r.pair_accuracy:.0%} right, by {r.pair_margin:.3f}")
        if r.good_score or r.bad_score:
            parts.append(f"good {r.good_score:+.3f}, bad {r.bad_score:+.3f}")
    elif r.expert_rows:
        parts.append(f"sft {r.sft_loss:.4f}")
    parts.append(f"{r.tokens_per_s:,.0f} tok/s")
    if r.usual_rows:
        parts += [f"stale {r.staleness_mean:.1f}/{r.staleness_max}", f"gap {r.logprob_gap:.1e}"]
        parts.append(
            f"{r.step_s:.2f} s = wait {r.wait_s:.2f} (rollout {r.rollout_s:.2f}, reward {r.reward_s:.2f}) "
            f"+ train {r.train_s:.2f} + sync {r.sync_s:.2f}"
        )
    else:
        parts.append(f"{r.step_s:.2f} s")
    return "  ".join([*parts, *_verified(r.operators), *_mistakes(r)])


def _rollout(r: RolloutRecord) -> str:
    reward = "-" if r.reward is None else f"{r.reward:.3f}"
    parts = [f"[{r.stage} {r.step:>5} groups]", f"reward {reward}", f"{r.tokens_per_s:,.0f} tok/s"]
    parts += [f"held {r.held}", f"{r.seconds:.2f} s (rollout {r.rollout_s:.2f}, reward {r.reward_s:.2f})"]
    return "  ".join([*parts, *_verified(r.operators), *_mistakes(r)])


def _verified(operators: dict[str, dict[str, float]]) -> list[str]:
    """Say what operators have left out because they should, and what they have made."""
    left_out = {name: round(each["left_out"] - each["failed"]) for name, each in operators.items()}
    made = {name: round(each["made"]) for name, each in operators.items()}
    return [
        f"{what} " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        for what, counts in (("left out", left_out), ("made", made))
        if any(counts.values())
    ]


def _mistakes(r: StepRecord | RolloutRecord) -> list[str]:
    """Say which rows were lost though they should not have been."""

    def meant(reason: str) -> bool:
        operator, _, why = reason.partition(": ")
        return reason in _BY_DESIGN or (
            operator in r.operators and not why.startswith(("failed", "timeout", "raised "))
        )

    mistakes = {reason: count for reason, count in r.lost.items() if not meant(reason)}
    return ["lost " + ", ".join(f"{count} {reason}" for reason, count in mistakes.items())] if mistakes else []
