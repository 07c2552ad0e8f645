"""Advisories: causes for which a reward stays flat, each with numbers, rows as evidence, and the key to change.

Causes have an order. A fault of the run itself (engines compute something else, rewards fail) hides what its numbers
show about data and settings, so then only this fault is reported. Nor is a setting blamed while the data explain it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

_Kind = Literal["run", "data", "setting"]

_FEWEST = 10
"""Steps before which nothing is said, and of the shortest window."""
_WINDOW = 0.2
"""Share of the steps in the first and in the last window, which are compared."""
_SOLVED = 0.95
"""Share of the highest reward above which there is nothing left to gain."""
_FAILED = ("timeout", "environment_error", "workflow_error")
"""Reasons for which attempts without a trajectory are dropped."""


@dataclass(frozen=True)
class Advisory:
    """A cause: what was found, with numbers, and what to change."""

    name: str
    kind: _Kind
    found: str
    remedy: str
    where: str = ""
    """Condition that the rows meet which show it."""
    curve: str = ""
    """Field of the records that shows it."""
    logged: bool = True
    """Whether the run folder has answers that show it; if not, ``where`` are the latest rows of the log."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a run's last stage with usual rows: its steps as columns of equal length
    (`RecordTable.columns`), its evaluations at the lowest temperature, all marks, and its answers."""

    columns: Mapping[str, np.ndarray]
    evaluations: Sequence[Mapping[str, Any]]
    marks: Sequence[Mapping[str, Any]]
    rows: Any
    """A connection to the table ``answers`` (`RowIndex.cursor`)."""
    widest_gaps: Sequence[str] = ()
    """Rows whose log-probs of engine and trainer differ most."""

    @property
    def steps(self) -> int:
        return len(self.columns["step"])

    @cached_property
    def _window(self) -> int:
        return max(_FEWEST, int(_WINDOW * self.steps))

    def early(self, name: str) -> float:
        """Return the mean of a column over the first window; NaN without a number there."""
        return _mean(self.columns.get(name, np.empty(0))[: self._window])

    def late(self, name: str) -> float:
        """Return the mean of a column over the last window; NaN without a number there."""
        return _mean(self.columns.get(name, np.empty(0))[-self._window :])

    def lost(self, *reasons: str) -> float:
        """Return the share of the attempts of the last window that were dropped for these reasons."""
        columns = (self.columns.get(f"lost: {reason}", np.zeros(1)) for reason in reasons)
        lost = np.nansum([column[-self._window :].sum() for column in columns])
        trained = np.nansum(self.columns["usual_rows"][-self._window :])
        return float(lost / max(lost + trained, 1.0))

    @cached_property
    def recent(self) -> str:
        """The condition that rows of the last window meet."""
        return f"source = 'usual' and version >= {int(self.columns['version'][-self._window]) - 1}"

    @property
    def incomplete(self) -> str:
        """The condition that rows of the last window meet whose groups lack attempts."""
        return f"{self.recent} and group_rows < (select max(group_rows) from answers where source = 'usual')"

    @cached_property
    def beginning(self) -> str:
        """The condition that rows of the first window meet."""
        return f"source = 'usual' and version < {int(self.columns['version'][self._window - 1])}"

    def ask(self, what: str, where: str) -> tuple[Any, ...]:
        """Return the row of a query of the rows that meet a condition, with NaN for a number that is missing."""
        [found] = self.rows.execute(f"select {what} from answers where {where}").fetchall()
        return tuple(np.nan if value is None else value for value in found)

    @cached_property
    def highest(self) -> float:
        """The highest reward of a row."""
        return float(self.ask("max(reward)", "source = 'usual'")[0])

    @cached_property
    def is_flat(self) -> bool:
        """Whether the reward has not risen by more than chance, and could."""
        early, late = self.columns["reward"][: self._window], self.columns["reward"][-self._window :]
        chance = 2 * np.hypot(np.nanstd(early), np.nanstd(late)) / np.sqrt(self._window)
        is_solved = self.late("reward") >= _SOLVED * self.highest > 0
        return bool(_mean(late) - _mean(early) <= chance + 0.01) and not is_solved


Check = Callable[[Evidence], tuple[str, str, str, str] | None]
"""Returns what was found, the remedy, rows and optionally a curve; None if the run has no such trouble."""

CHECKS: list[tuple[str, _Kind, Check]] = []
"""All causes, in the order in which they are reported."""


def _cause(name: str, kind: _Kind) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CHECKS.append((name, kind, check))
        return check

    return add


def advise(evidence: Evidence) -> list[Advisory]:
    """Return the causes that explain why the reward of a run does not rise, most fundamental first: those of the run
    alone, if there are any; settings only if there are no others."""
    if evidence.steps < _FEWEST:
        return []
    told: list[Advisory] = []
    for name, kind, check in CHECKS:
        if told and kind != told[0].kind and (told[0].kind == "run" or kind == "setting"):
            break
        if (found := check(evidence)) is not None:
            text, remedy, where, curve = found
            logged = bool(where and evidence.ask("count(*)", where)[0])
            told.append(Advisory(name, kind, text, remedy, where if logged else evidence.recent, curve, logged))
    return told


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


@_cause("Engine and trainer disagree", "run")
def _gap(run: Evidence) -> tuple[str, str, str, str] | None:
    if not (gap := run.late("logprob_gap")) > 0.05:
        return None
    found = f"log-probs of one token differ by {gap:.2g} nats in the mean: the trainer learns from another policy"
    remedy = "set weight_sync.probe_every: 1, which stops the run where they part; compare model.dtype and templates"
    named = ", ".join("'" + row.replace("'", "''") + "'" for row in run.widest_gaps)
    return found, remedy, f"experience_id in ({named})" if named else "", "logprob_gap"


@_cause("Updates are skipped", "run")
def _skipped(run: Evidence) -> tuple[str, str, str, str] | None:
    if not (skipped := run.late("skipped_updates")) > 0.2:
        return None
    found = f"{skipped:.1f} updates of a step are skipped, as loss or gradient are not finite"
    return found, "lower optimizer.lr, and look for rows with extreme rewards", run.recent, "skipped_updates"


@_cause("Rewards are unknown", "run")
def _unknown(run: Evidence) -> tuple[str, str, str, str] | None:
    if not (share := run.lost("reward_unknown")) > 0.2:
        return None
    found = f"{share:.0%} of the answers have no reward: scoring fails or takes too long"
    remedy = "see the notes of the run; raise reward.deadline_s or reward.workers, or fix the reward"
    return found, remedy, run.incomplete, "lost: reward_unknown"


@_cause("Attempts fail", "run")
def _failed(run: Evidence) -> tuple[str, str, str, str] | None:
    if not (share := run.lost(*_FAILED)) > 0.2:
        return None
    found = f"{share:.0%} of the attempts end without a trajectory: their workflow, environment or deadline fails"
    remedy = "see the notes of the run; fix explorer.workflow or explorer.environment"
    return found, remedy, run.incomplete, f"lost: {max(_FAILED, key=run.lost)}"


@_cause("Answers come too late", "run")
def _stale(run: Evidence) -> tuple[str, str, str, str] | None:
    if not (share := run.lost("stale", "late")) > 0.3:
        return None
    found = f"{share:.0%} of the answers are too old when they could be trained, and are thrown away"
    remedy = "raise max_staleness, add engines (explorer.engine.count), or lower explorer.over_sampling"
    return found, remedy, "drop_reason in ('stale', 'late')", "staleness_max"


@_cause("Parts restart again and again", "run")
def _restarts(run: Evidence) -> tuple[str, str, str, str] | None:
    deaths = [mark for mark in run.marks if mark["kind"] == "restart"]
    if len(deaths) < max(3, 0.2 * run.steps):
        return None
    found = f"{len(deaths)} restarts in {run.steps} steps; the last: {deaths[-1]['text']}"
    remedy = "end the cause of the deaths; for want of memory raise explorer.engine.memory_gib or trainer.memory_gib"
    steps = ", ".join(str(mark["step"] + 1) for mark in deaths[-50:])
    return found, remedy, f"step in ({steps})", "step_s"


@_cause("Answers are cut", "data")
def _truncated(run: Evidence) -> tuple[str, str, str, str] | None:
    if not run.is_flat or not (share := run.late("truncated_share")) > 0.3:
        return None
    found = f"{share:.0%} of the answers reach the limit of their length before they end"
    remedy = "raise explorer.sampling.max_tokens and model.max_length, or reward short answers (reward.length)"
    return found, remedy, f"{run.recent} and stop_reason in ('length', 'repetition')", "truncated_share"


@_cause("Answers are not understood", "data")
def _parsed(run: Evidence) -> tuple[str, str, str, str] | None:
    value = "coalesce(components['parsed'], components['format'])"
    [share] = run.ask(f"avg({value})", run.recent)
    if not run.is_flat or not share < 0.5:
        return None
    found = f"the reward finds an answer in {share:.0%} of the responses only"
    remedy = "say in tasks.sources.system how an answer is written, or teach it by a stage of SFT"
    return found, remedy, f"{run.recent} and {value} < 0.5", ""


@_cause("Tool calls fail", "data")
def _tool_errors(run: Evidence) -> tuple[str, str, str, str] | None:
    calls, errors = run.ask("sum(metrics['tool_calls']), sum(metrics['tool_errors'])", run.recent)
    if not run.is_flat or not errors / calls > 0.3:
        return None
    found = f"{errors / calls:.0%} of the tool calls fail, or are not written as the tools ask for"
    remedy = "see the tools' answers; compare explorer.workflow_options (call format, tools) with the model's template"
    return found, remedy, f"{run.recent} and metrics['tool_errors'] > 0", ""


@_cause("Tools are called less and less", "data")
def _fewer_calls(run: Evidence) -> tuple[str, str, str, str] | None:
    before, now = (run.ask("avg(metrics['tool_calls'])", where)[0] for where in (run.beginning, run.recent))
    if not run.is_flat or not before > 0.5 or not now < 0.5 * before:
        return None
    found = f"{before:.2g} calls an answer at the beginning, {now:.2g} now"
    where = f"{run.recent} and metrics['tool_calls'] < {0.5 * before:.3g}"
    return found, "reward answers that use the tools, or lower optimizer.lr", where, ""


@_cause("Parts of the reward contradict each other", "data")
def _conflict(run: Evidence) -> tuple[str, str, str, str] | None:
    keys = f"select distinct unnest(map_keys(components)) as name from answers where {run.recent}"
    parts = [name.replace("'", "''") for (name,) in run.rows.execute(f"{keys} order by name limit 8").fetchall()]
    worst, pair = 0.0, ("", "")
    for at, one in enumerate(parts):
        for other in parts[at + 1 :]:
            first, second = f"components['{one}']", f"components['{other}']"
            what = f"corr({first}, {second}), stddev_pop({first}), stddev_pop({second})"
            found, spread, wide = run.ask(what, run.recent)
            if min(spread, wide) > 0.05 and found < worst:
                worst, pair = float(found), (one, other)
    if not run.is_flat or not worst < -0.5:
        return None
    found_text = f"{pair[0]} and {pair[1]} are correlated by {worst:.2f}: what raises one lowers the other"
    remedy = "weigh them differently (reward.parts.weight), or let one bound the other (reward.parts.role: gate)"
    return found_text, remedy, run.recent, "reward"


@_cause("Tasks are memorised", "data")
def _memorised(run: Evidence) -> tuple[str, str, str, str] | None:
    held_out = [each["accuracy"] for each in run.evaluations]
    gained = run.late("reward") - run.early("reward")
    if len(held_out) < 3 or not gained > 0.1 * run.highest or not run.late("reward") > 0.7 * run.highest:
        return None
    if not held_out[-1] < min(max(held_out) - 0.05, 0.7):
        return None
    found = f"the reward rose by {gained:.2f}; held-out accuracy fell from {max(held_out):.2f} to {held_out[-1]:.2f}"
    remedy = "give more tasks (tasks.sources), stop earlier, or keep the best checkpoint (checkpoint.keep_best)"
    return found, remedy, run.recent, "reward"


@_cause("Nothing tells answers apart", "data")
def _zero_variance(run: Evidence) -> tuple[str, str, str, str] | None:
    if not run.is_flat:
        return None
    equal = "count(distinct group_id) filter (group_deviation = 0)"
    kept = f"{run.recent} and group_rows > 1 and group_status <> 'dropped'"
    groups, alike = run.ask(f"count(distinct group_id), {equal}", kept)
    dropped = run.lost("zero_variance")
    share = dropped + (1 - dropped) * (alike / groups if groups else 0.0)
    if not share > 0.8:
        return None
    right = run.late("reward") > 0.5 * run.highest
    found = f"all answers to a task earn the same in {share:.0%} of the groups: they have no advantage to learn from"
    remedy = "give harder tasks" if right else "give easier tasks or a reward in parts, or begin with a stage of SFT"
    remedy += "; the order near_half (tasks.sampler) draws tasks that are sometimes solved"
    return found, remedy, f"{run.recent} and group_deviation = 0", "reward"


@_cause("The policy has collapsed", "setting")
def _collapsed(run: Evidence) -> tuple[str, str, str, str] | None:
    before, now = run.early("entropy"), run.late("entropy")
    if not run.is_flat or not now < min(0.2 * before, 0.15):
        return None
    found = f"the entropy of a token fell from {before:.2g} to {now:.2g} nats: all answers to a task are about the same"
    return found, "lower optimizer.lr, or set algorithm.entropy_coef or algorithm.kl_coef", run.recent, "entropy"


@_cause("Answers drift in length", "setting")
def _lengths(run: Evidence) -> tuple[str, str, str, str] | None:
    before, now = (run.ask("avg(tokens)", where)[0] for where in (run.beginning, run.recent))
    if not run.is_flat or not (now > 2 * before or now < 0.5 * before):
        return None
    found = f"an answer had {before:.0f} tokens at the beginning, and has {now:.0f} now, for the same reward"
    remedy = "set reward.overlong_buffer or reward.length, or divide by a constant length (algorithm.aggregation)"
    return found, remedy, run.recent, "sampled_tokens"


@_cause("Steps are too large", "setting")
def _clipped(run: Evidence) -> tuple[str, str, str, str] | None:
    if not run.is_flat or not (share := run.late("clip_fraction")) > 0.3:
        return None
    found = f"{share:.0%} of the tokens are clipped: what they would teach is ignored"
    return found, "lower optimizer.lr, update.epochs or update.mini_batches", run.recent, "clip_fraction"


@_cause("Steps are too small", "setting")
def _still(run: Evidence) -> tuple[str, str, str, str] | None:
    before, now = run.early("entropy"), run.late("entropy")
    moved = abs(now - before) > 0.02 * abs(before) or run.late("kl") > 1e-3
    if not run.is_flat or run.steps < 2 * _FEWEST or moved or not run.late("grad_norm") > 0:
        return None
    found = f"the policy hardly changes: its entropy is {now:.3g} after {run.steps} steps, and was {before:.3g}"
    remedy = f"raise optimizer.lr ({run.late('lr'):.2g} now), or the number of groups in a step"
    return found, remedy, run.recent, "entropy"
