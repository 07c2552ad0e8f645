"""The records of a run, one line each in ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import TypeAdapter

from rayrft.buffer.leases import Lease
from rayrft.buffer.ledger import Ledger
from rayrft.explorer.evaluation import Evaluation, wilson_interval
from rayrft.explorer.explorer import Timings
from rayrft.files import Room, atomic_file
from rayrft.json_lines import open_lines, read_lines
from rayrft.trainer.result import PairRanking, RowGap, StepMetrics, StepResult
from rayrft.weights.messages import SyncReport


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step. Seconds split its wall time. Those of ``timings`` count the time in which any rollout,
    scoring or verification was running; they overlap the rest if ``max_staleness`` is 1 or more.

    ``reward`` is the mean over all answers sampled since the previous step, kept or dropped, and in mode ``train`` over
    the step's usual rows.
    """

    kind: ClassVar[str] = "step"
    stage: str
    step: int
    version: int
    time: float
    metrics: StepMetrics
    usual_rows: int
    expert_rows: int
    reward: float | None
    sampled_rows: int
    sampled_tokens: int
    truncated_share: float | None
    lost: dict[str, int]
    """Rows, and tasks without rows, that were dropped since the previous step, by reason."""
    staleness_mean: float | None
    staleness_max: int | None
    probe_gap: float | None
    tokens_per_s: float
    step_s: float
    wait_s: float
    timings: Timings
    """Since the previous step, operators on the step's batch included."""
    train_s: float
    sync_s: float
    ledger: Ledger | None = None
    """When the step's batch was leased, which it counts as held. None in records of earlier releases."""
    widest_gap: RowGap | None = None
    """None if the step has no sampled rows, or nothing differs."""

    @classmethod
    def of(
        cls,
        stage: str,
        step: int,
        lease: Lease,
        results: list[StepResult],
        report: SyncReport | None,
        timings: Timings,
        lost: dict[str, int],
        *,
        step_s: float,
        wait_s: float,
        train_s: float,
        explores: bool = True,
    ) -> Self:
        """Build the record of an optimiser step from the ``results`` of all ranks. ``report`` is None if no weights
        were published, ``lost`` is from `Ledger.lost_since`. If the run does not explore, other producers' groups come
        at any time: reward and rate are those of the trained rows."""
        rollouts, stale, metrics = lease.rollouts, lease.staleness, results[0].metrics
        scored = rollouts.scored if explores else sum(each.scored for each in results)
        rewards = rollouts.reward_sum if explores else sum(each.reward_sum for each in results)
        tokens = (explores and rollouts.tokens) or metrics.policy_tokens + metrics.expert_tokens
        return cls(
            stage,
            step,
            version=report.version if report else step,
            time=time.time(),
            metrics=metrics,
            usual_rows=lease.usual_rows,
            expert_rows=lease.expert_rows,
            reward=rewards / scored if scored else None,
            sampled_rows=rollouts.rows,
            sampled_tokens=rollouts.tokens,
            truncated_share=rollouts.truncated / rollouts.rows if rollouts.rows else None,
            lost=lost,
            staleness_mean=sum(stale) / len(stale) if stale else None,
            staleness_max=max(stale) if stale else None,
            probe_gap=report.probe_gap if report else None,
            tokens_per_s=tokens / step_s,
            step_s=step_s,
            wait_s=wait_s,
            timings=timings,
            train_s=train_s,
            sync_s=report.seconds if report else 0.0,
            ledger=lease.ledger,
            widest_gap=max(filter(None, (each.widest_gap for each in results)), key=attrgetter("mean"), default=None),
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by part; rollout and reward may overlap the others."""
        rollout, reward = self.timings.rollout_s, self.timings.reward_s
        return {"wait": self.wait_s, "rollout": rollout, "reward": reward, "train": self.train_s, "sync": self.sync_s}


@dataclass(frozen=True)
class EvaluationRecord:
    """Accuracy on the held-out tasks of the weights at the end of ``step`` (0: before the first). With evaluation
    engines it is written among the records of later steps."""

    kind: ClassVar[str] = "evaluation"
    stage: str
    step: int
    stage_step: int
    time: float
    version: int
    """Version of the weights, under which every answer was sampled."""
    temperature: float
    accuracy: float
    """mean@samples"""
    low: float
    high: float
    right: int
    """Of the ``count`` attempts whose reward is known."""
    count: int
    mean_reward: float
    unknown: int
    seconds: float
    samples: int
    """Attempts per task."""
    passed: float
    """pass@samples"""
    mean_tokens: float
    cut_share: float
    skipped: int
    """Evaluations that were due since the previous record, and skipped or lost."""

    @classmethod
    def of(
        cls, stage: str, step: int, stage_step: int, temperature: float, found: Evaluation, seconds: float, skipped: int
    ) -> Self:
        """Build the record of an evaluation of the weights of ``step``."""
        return cls(
            stage,
            step,
            stage_step,
            time.time(),
            step,
            temperature,
            accuracy=found.accuracy.value,
            low=found.accuracy.low,
            high=found.accuracy.high,
            right=found.right,
            count=found.count,
            mean_reward=found.mean_reward,
            unknown=sum(found.unknown.values()),
            seconds=seconds,
            samples=found.samples,
            passed=found.passed[found.samples].value if found.samples else math.nan,
            mean_tokens=found.mean_tokens,
            cut_share=found.cut_share,
            skipped=skipped,
        )


@dataclass(frozen=True)
class PairsRecord:
    """Ranking of held-out preference pairs by the model that a stage trains: the share of pairs whose chosen answer has
    the higher score, with its 95 % interval, and the mean difference of the scores."""

    kind: ClassVar[str] = "pairs"
    stage: str
    step: int
    stage_step: int
    time: float
    accuracy: float
    low: float
    high: float
    right: int
    count: int
    margin: float
    seconds: float

    @classmethod
    def of(cls, stage: str, step: int, stage_step: int, found: PairRanking, seconds: float) -> Self:
        """Build the record of a ranking after ``step``."""
        accuracy = found.right / found.pairs
        counts = accuracy, *wilson_interval(found.right, found.pairs), found.right, found.pairs
        return cls(stage, step, stage_step, time.time(), *counts, found.margin, seconds)


@dataclass(frozen=True)
class RolloutRecord:
    """The groups that an explore job has put into its Buffer since the previous record. ``lost`` and ``held`` count all
    rows of the Buffer, those of other producers too."""

    kind: ClassVar[str] = "rollout"
    stage: str
    step: int
    """Groups of the job so far: it takes no optimiser steps."""
    time: float
    groups: int
    rows: int
    tokens: int
    reward: float | None
    truncated_share: float | None
    lost: dict[str, int]
    held: int
    tokens_per_s: float
    seconds: float
    timings: Timings


@dataclass(frozen=True)
class NoteRecord:
    """A text note, such as the start of a stage or a written checkpoint."""

    kind: ClassVar[str] = "note"
    stage: str
    step: int
    time: float
    text: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RestartRecord:
    """An actor died, and was restarted while the run continued."""

    kind: ClassVar[str] = "restart"
    stage: str
    step: int
    time: float
    part: str
    """Kind of the actor, the name of its placement group."""
    actor: str
    cause: str
    seconds: float
    """Seconds without the actor."""


Record = StepRecord | RolloutRecord | EvaluationRecord | PairsRecord | NoteRecord | RestartRecord
_KINDS: tuple[type[Record], ...] = get_args(Record)
_READERS: dict[str, TypeAdapter[Record]] = {kind.kind: TypeAdapter(kind) for kind in _KINDS}
_NESTED: dict[str, type[StepMetrics | Timings]] = {"metrics": StepMetrics, "timings": Timings}
"""Fields of records whose own fields are written beside the others."""


def accuracy_text(record: EvaluationRecord | PairsRecord) -> str:
    return f"{record.accuracy:.3f} ({record.right}/{record.count}, {record.low:.3f}-{record.high:.3f})"


RecordKey = tuple[str, str, int]
"""Kind, stage and step of a record."""


def record_key(record: Record) -> RecordKey:
    return record.kind, record.stage, record.step


def read_records(folder: Path) -> list[Record]:
    """Read the records of a run folder; an incomplete last line, of a running or crashed run, is ignored."""
    return [record for _, record in read_lines(folder / "metrics.jsonl", record_from_json)]


class RecordFile:
    """The file ``metrics.jsonl`` of a run: a record is visible to its readers when ``append`` returns. Records are read
    by their numbers, from 0; the object itself keeps 8 bytes of each."""

    def __init__(self, folder: Path) -> None:
        remedy = "free disk space or fix the storage, then: rayrft resume RUN"
        self._file, _ = open_lines(folder / "metrics.jsonl", lambda line: None, remedy)
        self.late: list[bytes] = []
        """The last records, for which the disk has no room yet."""

    def __len__(self) -> int:
        return len(self._file) + len(self.late)

    def append(self, *records: Record) -> None:
        """Append records, after the late ones. Raises StorageError; then all of them are late."""
        self.late += map(_to_line, records)
        self._file.append(*self.late)
        self.late.clear()
        Room.waits.pop(str(self._file.path), None)

    def read(self, first: int = 0, end: int | None = None) -> Iterator[Record]:
        """Iterate over the records from number ``first`` to before ``end``, by default to the latest."""
        late = islice(self.late, max(first - len(self._file), 0), end and max(end - len(self._file), 0))
        return map(record_from_json, chain(self._file.lines(first, end), late))

    def cut(self, count: int, others: Iterable[Record]) -> RecordFile:
        """Replace the file by its first ``count`` records and ``others``; close this object and return the new one."""
        path = self._file.path
        with atomic_file(path) as partial, partial.open("wb") as file:
            file.writelines(chain(self._file.lines(0, count), map(_to_line, others)))
            file.flush()
        self.close()
        return RecordFile(path.parent)

    def close(self) -> None:
        self._file.close()


def flat(record: Record) -> dict[str, Any]:
    """Return the fields of a record as in ``metrics.jsonl``, those of its metrics and timings beside the others."""
    values: dict[str, Any] = {}
    for name, value in asdict(record).items():
        values |= value if name in _NESTED else {name: value}
    return values


def _to_line(record: Record) -> bytes:
    return json.dumps({"kind": record.kind, **flat(record)}).encode() + b"\n"


def record_from_json(line: bytes) -> Record:
    """Return the record in a line of ``metrics.jsonl``. Raises ValueError if it is none."""
    values = json.loads(line)
    kind = values.pop("kind")
    for name, nested in _NESTED.items():
        inner = {each.name: values.pop(each.name) for each in fields(nested) if each.name in values}
        values |= {name: inner} if inner else {}
    return _READERS[kind].validate_python(values)
