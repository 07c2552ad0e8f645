"""Events that change the Buffer's state. The same events are applied in memory and written to the journal."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from operator import add
from typing import Annotated, Any, Union, dataclass_transform

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, Discriminator, Tag, TypeAdapter

from rayrft.buffer.schedule import StagePlan
from rayrft.errors import StorageError
from rayrft.experience import SCHEMA_VERSION, TRUNCATED, Experience, Task


@dataclass(frozen=True)
class GroupReport:
    """A producer's report on a finished group, kept or dropped: the source of the step's rollout metrics."""

    rows: int = 0
    reward_sum: float = 0.0
    """Over rows with known rewards."""
    scored: int = 0
    tokens: int = 0
    truncated: int = 0
    """Rows truncated at max_tokens."""

    @classmethod
    def of(cls, group: list[Experience]) -> GroupReport:
        """Return the report on a group whose rows have their rewards."""
        rewards = [row.reward for row in group if row.reward is not None]
        tokens = sum(int(np.count_nonzero(row.action_mask)) for row in group)
        truncated = sum(row.stop_reason in TRUNCATED for row in group)
        return cls(len(group), sum(rewards), len(rewards), tokens, truncated)

    def __add__(self, other: GroupReport) -> GroupReport:
        return GroupReport(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class StoredRows:
    """Rows ``row`` .. ``row + rows`` of a segment, which are a group."""

    row: int
    rows: int
    masked: int
    """Rows that are stored for their rewards alone, counted in the report's ``dropped``."""
    tokens: int
    nbytes: int
    version: int
    """Oldest weight version among the tokens that are trained."""
    score: float
    """Score for its priority."""


@dataclass(frozen=True)
class StoredGroup:
    """A group that was stored."""

    key: int
    """64-bit hash of its id."""
    digest: int
    """Checksum of a group put without a ticket; else 0."""
    stored: StoredRows
    sequence: int | None
    """Sequence number of its ticket."""
    dropped: dict[str, int]
    """Rows that were sampled and not stored, by reason."""
    report: GroupReport


@dataclass(frozen=True)
class Extent:
    """Committed extent of a segment, or of a file of demonstrations; ``crc`` is the CRC-32 of these bytes."""

    segment: int
    rows: int = 0
    nbytes: int = 0
    crc: int = 0

    def grown(self, rows: int, data: pa.Buffer) -> Extent:
        """Return the extent after ``data``, which holds this many rows, was appended."""
        return Extent(self.segment, self.rows + rows, self.nbytes + len(data), zlib.crc32(data, self.crc))


_TAGS: dict[type[Event], str] = {}
"""The kinds of events in the journal: their names in snake case."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Event:
    """A change of the Buffer's state. Its subclasses are frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        _TAGS[cls] = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__).lower()


class Began(Event):
    run: str
    schema: str


class StageOpened(Event):
    plan: StagePlan


class StageResumed(StageOpened):
    """The stage is open again in its old state; the plan's numbers may have changed."""


class StageClosed(Event):
    """The stage admits no more groups."""


class TicketsIssued(Event):
    """A request for tickets was answered, with none if ``count`` is 0.

    ``tasks`` are those of the tickets, None before they are drawn: recovery draws them again and compares."""

    producer: str
    call: int
    count: int
    tasks: list[str | None] | None
    feed: str = ""
    """The feed that the producer belongs to."""


class TasksAdded(Event):
    """The task set has grown: these tasks belong to its source ``source``, by index."""

    tasks: list[Task]
    source: int


class ProducerAbandoned(Event):
    """The producer is abandoned: its tickets are issued to the next request."""

    producer: str


class GroupsStored(Event):
    """Groups were stored in the segment that now has this extent."""

    extent: Extent
    groups: list[StoredGroup]


class GroupParked(Event):
    """Calls of a group's unfinished attempts were stored in the segment of this extent. Its ticket is issued again."""

    extent: Extent
    group: StoredGroup
    resumes: int
    """Of the ticket."""


class GroupDropped(Event):
    """A group was dropped without storing any row."""

    sequence: int | None
    dropped: dict[str, int]
    report: GroupReport
    key: int | None = None
    digest: int = 0
    """Checksum of a rejected group without a ticket."""


class TaskFailed(Event):
    """A task gave no rows."""

    sequence: int
    reason: str


class BatchLeased(Event):
    step: int
    slots: list[int]
    weights: list[float]
    """Importance weights of the groups."""
    expert: list[int]


class StepAcked(Event):
    step: int
    scores: dict[int, float] = field(default_factory=dict)
    """New scores by slot, if training reported any."""


class RowsBlamed(Event):
    """Training failed on one of these groups (by slot) and demonstrations (by row)."""

    step: int
    attempt: str
    """Attempt of the run."""
    slots: list[int]
    expert: list[int]


class BatchDiscarded(Event):
    """Training failed on the batch of a step as a whole; the step gets another one."""

    step: int


class StepsCovered(Event):
    """A checkpoint covers all steps before ``step``."""

    step: int


class LeaseRequeued(Event):
    step: int


class StepsRolledBack(Event):
    """The run resumes at ``step``: leases from there on are trained again."""

    step: int
    attempt: str
    """Attempt of the run."""


class VersionAdvanced(Event):
    version: int


class GroupsEvicted(Event):
    slots: list[int]
    reason: str


class GroupsMoved(Event):
    """Groups were rewritten contiguously from row ``row`` of the extent's segment."""

    extent: Extent
    slots: list[int]
    row: int
    score: float | None = None
    """New score if feedback changed the rows."""


class SegmentsDeleted(Event):
    segments: list[int]
    forgotten: list[str] = field(default_factory=list)
    """Experience ids whose late feedback is deleted, too."""


class FeedbackNoted(Event):
    """Feedback that came after its row was trained, or dropped. It is forgotten with the segment of the row."""

    segment: int
    experience_id: str
    reward: float | None
    labels: dict[str, str]
    version: int


class DemonstrationsLoaded(Event):
    """Demonstrations are stored in the file ``expert-<name>-<segment>.arrow`` of this extent."""

    name: str
    extent: Extent
    unit: int = 1
    """Rows per unit: 2 for preference pairs."""
    labelled: bool = False
    """Whether they are single answers that are labelled good or bad."""


class DemonstrationsExtended(DemonstrationsLoaded):
    """Demonstrations were added to those of a name, whose file has this extent now."""


class DemonstrationsWithdrawn(Event):
    """Demonstrations of a name are not drawn any more, by their row numbers; leases that have them keep them."""

    name: str
    rows: list[int]


@dataclass(frozen=True)
class ModelTerms:
    """The model of all jobs that meet at a named Buffer: its limits on rows, and a digest of its tokenizer."""

    vocabulary: int
    max_length: int
    tokenizer: str


class FeedJoined(Event):
    """An attempt of explore job ``job`` starts or resumes its feed: see `Feed`."""

    feed: str
    attempt: str
    job: str
    model: ModelTerms
    in_flight: int
    group_size: int


class TrainerJoined(Event):
    """The train job ``job``, whose run has this id, takes the batches from now on."""

    run: str
    job: str
    model: ModelTerms


class ProducersEnded(Event):
    """No more groups will arrive."""


_tagged: Any = Union[tuple(Annotated[kind, Tag(tag)] for kind, tag in _TAGS.items())]  # noqa: UP007 - not written out
# Rows with non-finite rewards are rejected, but reports may contain such rewards.
_config = ConfigDict(ser_json_inf_nan="constants")
# The kind of an event, or of its JSON.
_kind = Discriminator(lambda event: _TAGS.get(type(event)) if isinstance(event, Event) else event.get("event"))
_adapter: TypeAdapter[Any] = TypeAdapter(Annotated[_tagged, _kind], config=_config)


def check_version(schema: str, log: str) -> None:
    """Raise StorageError unless this version of rayrft reads and writes logs of that schema version."""
    if schema != SCHEMA_VERSION:
        problem = f"the log has schema version {schema}; this rayrft reads {SCHEMA_VERSION}"
        remedy = "use the version of rayrft that wrote it; its segments are plain Arrow files"
        raise StorageError(problem, remedy, field=log)


def encode(event: Event) -> bytes:
    """Encode an event as one line of JSON."""
    body = _adapter.dump_json(event)[1:]
    return b'{"event":"%s"%s%s' % (_TAGS[type(event)].encode(), b"" if body == b"}" else b",", body)


def decode(line: bytes) -> Event:
    """Decode an event from a line. Raises pydantic's ValidationError."""
    return _adapter.validate_json(line)
