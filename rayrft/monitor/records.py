"""The records of a run, one line each in ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rayrft.files import atomic_file
from rayrft.json_lines import open_lines, read_lines


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step. Losses are unweighted (before mu); seconds split the step's wall time.

    ``rewards`` has, by domain, how many answers were ``scored`` since the previous step, of how many the reward is
    ``unknown``, how many of these are ``errors``, how many calls were ``retried``, the ``seconds`` that this took
    together, the ``slowest_s`` of them, and how many are ``pending``.
    ``operators`` has, by operator on experiences, how many rows were ``taken``, ``left_out``, ``changed`` and ``made``
    since the previous step, of those left out how many as it ``failed``, and the ``seconds`` of its work.
    ``reward`` is the mean over all answers sampled since the previous step, kept or dropped, and in mode ``train`` over
    the step's own rows. ``rollout_s``,
    ``reward_s`` and ``pipeline_s`` are the wall time in which any rollout, scoring or verifying was running: with
    ``max_staleness`` 1 or more they overlap the rest.
    """

    kind: ClassVar[str] = "step"
    stage: str
    step: int
    version: int
    time: float
    loss: float
    policy_loss: float
    sft_loss: float
    preference_loss: float
    distillation_loss: float
    value_loss: float
    value_grad_norm: float
    kl: float
    kl_coef: float
    entropy_coef: float
    grad_norm: float
    lr: float
    entropy: float
    clip_fraction: float
    ratio: float
    correction_weight: float
    logprob_gap: float
    pair_accuracy: float
    pair_margin: float
    pair_score: float
    good_score: float
    bad_score: float
    label_margin: float
    good_logprob: float
    bad_logprob: float
    reference_kl: float
    policy_tokens: int
    expert_tokens: int
    usual_rows: int
    expert_rows: int
    reward: float | None
    sampled_rows: int
    sampled_tokens: int
    truncated_share: float | None
    lost: dict[str, int]
    """Rows and, where none came of them, tasks that were dropped since the step before, by reason."""
    staleness_mean: float | None
    staleness_max: int | None
    probe_gap: float | None
    tokens_per_s: float
    step_s: float
    wait_s: float
    rollout_s: float
    reward_s: float
    pipeline_s: float
    rewards: dict[str, dict[str, float]]
    operators: dict[str, dict[str, float]]
    train_s: float
    sync_s: float


@dataclass(frozen=True)
class EvaluationRecord:
    """Accuracy on the held-out tasks of the weights at the end of ``step`` (0: before the first).

    With evaluation engines of its own it comes among the records of later steps.
    """

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
    """Evaluations that were due since the record before, and skipped or lost."""


@dataclass(frozen=True)
class PairsRecord:
    """Ranking of held-out preference pairs by what a stage trains, a reward model or a policy, as it is after a step
    of it: how many of them have the higher score for the chosen answer, with the share's 95 % interval, and by how much
    on average."""

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


@dataclass(frozen=True)
class RolloutRecord:
    """What an explore job has put into its Buffer since the previous record. ``lost`` and ``held`` count all rows of
    the Buffer, whoever put them there."""

    kind: ClassVar[str] = "rollout"
    stage: str
    step: int
    """Groups of the job so far, which takes no optimiser steps."""
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
    rollout_s: float
    reward_s: float
    pipeline_s: float
    rewards: dict[str, dict[str, float]]
    operators: dict[str, dict[str, float]]


@dataclass(frozen=True)
class NoteRecord:
    """A text note, such as the start of a stage or a written checkpoint."""

    kind: ClassVar[str] = "note"
    stage: str
    step: int
    time: float
    text: str
    data: dict[str, Any] = field(default_factory=dict)


Record = StepRecord | RolloutRecord | EvaluationRecord | PairsRecord | NoteRecord
_KINDS: tuple[type[Record], ...] = (StepRecord, RolloutRecord, EvaluationRecord, PairsRecord, NoteRecord)
KINDS: dict[str, type[Record]] = {record.kind: record for record in _KINDS}


def read_records(folder: Path) -> list[Record]:
    """Read the records of a run folder; an incomplete last line, of a running or crashed run, is ignored."""
    return [record for _, record in read_lines(folder / "metrics.jsonl", _from_json)]


class RecordFile:
    """The file ``metrics.jsonl`` of a run: a record is visible to its readers when ``append`` returns.

    Records are read by their numbers, from 0; the object itself keeps 8 bytes of each.
    """

    def __init__(self, folder: Path) -> None:
        remedy = "free disk space or fix the storage, then: rayrft resume RUN"
        self._file, _ = open_lines(folder / "metrics.jsonl", lambda line: None, remedy)

    def __len__(self) -> int:
        return len(self._file)

    def append(self, record: Record) -> None:
        """Append a record. Raises StorageError, after which the file still ends with a complete line."""
        self._file.append(_to_line(record))

    def read(self, first: int = 0, end: int | None = None) -> Iterator[Record]:
        """Iterate over the records from number ``first`` to before ``end``, by default to the latest."""
        return map(_from_json, self._file.lines(first, end))

    def cut(self, count: int, others: Iterable[Record]) -> RecordFile:
        """Close this object and return that of the file with the first ``count`` records and then ``others`` only, by
        which it is replaced atomically."""
        path = self._file.path
        with atomic_file(path) as partial, partial.open("wb") as file:
            file.writelines(self._file.lines(0, count))
            file.writelines(map(_to_line, others))
            file.flush()
        self.close()
        return RecordFile(path.parent)

    def close(self) -> None:
        self._file.close()


def _to_line(record: Record) -> bytes:
    return json.dumps({"kind": record.kind, **asdict(record)}).encode() + b"\n"


def _from_json(line: bytes) -> Record:
    values = json.loads(line)
    return KINDS[values.pop("kind")](**values)
