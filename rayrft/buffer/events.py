"""Everything that can happen to the Buffer's state, as records: what is applied in memory is what the journal says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from rayrft.buffer.log.segments import Extent
from rayrft.buffer.schedule import StagePlan


@dataclass(frozen=True)
class GroupReport:
    """What a producer says of a finished group, kept or not: the source of the step's rollout metrics."""

    rows: int = 0
    reward_sum: float = 0.0
    """Over rows of known reward."""
    scored: int = 0
    tokens: int = 0
    truncated: int = 0
    """Rows cut at max_tokens."""

    def __add__(self, other: GroupReport) -> GroupReport:
        return GroupReport(
            self.rows + other.rows,
            self.reward_sum + other.reward_sum,
            self.scored + other.scored,
            self.tokens + other.tokens,
            self.truncated + other.truncated,
        )


@dataclass(frozen=True)
class StoredGroup:
    """A group that passed the door. Its rows are ``row`` .. ``row + rows`` of the segment."""

    key: int
    """64 bits of its id's hash."""
    digest: int
    """Of what was put, where it came without a ticket; else 0."""
    row: int
    rows: int
    tokens: int
    nbytes: int
    version: int
    """Oldest weights that any of its tokens was sampled under."""
    score: float
    """What its priority rests on."""
    sequence: int | None
    """Of its ticket."""
    dropped: dict[str, int]
    """By reason, rows that were sampled and are not among those stored."""
    report: GroupReport


@dataclass(frozen=True)
class Began:
    run: str
    schema: str
    event: Literal["began"] = "began"


@dataclass(frozen=True)
class StageOpened:
    plan: StagePlan
    event: Literal["stage_opened"] = "stage_opened"


@dataclass(frozen=True)
class StageResumed:
    """The stage is open again, as it was; what may have changed is what it asks for each step."""

    plan: StagePlan
    event: Literal["stage_resumed"] = "stage_resumed"


@dataclass(frozen=True)
class StageClosed:
    event: Literal["stage_closed"] = "stage_closed"


@dataclass(frozen=True)
class Admitted:
    """A request for tickets was answered: with none where ``count`` is 0, for no more come.

    ``tasks`` are those that the tickets came with: recovery draws them again and compares."""

    producer: str
    call: int
    count: int
    tasks: list[int | None]
    event: Literal["admitted"] = "admitted"


@dataclass(frozen=True)
class Abandoned:
    """The producer is gone: its tickets go to the next who asks."""

    producer: str
    event: Literal["abandoned"] = "abandoned"


@dataclass(frozen=True)
class Stored:
    """Groups are in the segment of shard ``shard`` that now has this extent."""

    shard: int
    extent: Extent
    groups: list[StoredGroup]
    event: Literal["stored"] = "stored"


@dataclass(frozen=True)
class Dropped:
    """A group of which no row was stored."""

    sequence: int | None
    dropped: dict[str, int]
    report: GroupReport
    key: int | None = None
    digest: int = 0
    """Of a group that came and was refused."""
    event: Literal["dropped"] = "dropped"


@dataclass(frozen=True)
class TaskFailed:
    """A task that gave no rows."""

    sequence: int
    reason: str
    event: Literal["task_failed"] = "task_failed"


@dataclass(frozen=True)
class Leased:
    step: int
    slots: list[int]
    weights: list[float]
    """Importance weight of each group."""
    expert: list[int]
    event: Literal["leased"] = "leased"


@dataclass(frozen=True)
class Acked:
    step: int
    scores: dict[int, float] = field(default_factory=dict)
    """By slot, where training told a group's score."""
    event: Literal["acked"] = "acked"


@dataclass(frozen=True)
class Blamed:
    """Training failed on one of these: groups, by slot, and demonstrations, by row."""

    step: int
    life: str
    """Of the run."""
    slots: list[int]
    expert: list[int]
    event: Literal["blamed"] = "blamed"


@dataclass(frozen=True)
class Covered:
    """A checkpoint holds the work of all steps before ``step``."""

    step: int
    event: Literal["covered"] = "covered"


@dataclass(frozen=True)
class Requeued:
    step: int
    event: Literal["requeued"] = "requeued"


@dataclass(frozen=True)
class RolledBack:
    """The trainer starts again at ``step``: what was leased from there on is to be trained again."""

    step: int
    life: str
    """Of the trainer, or with ``whole_run`` of the run."""
    whole_run: bool = False
    event: Literal["rolled_back"] = "rolled_back"


@dataclass(frozen=True)
class Advanced:
    version: int
    event: Literal["advanced"] = "advanced"


@dataclass(frozen=True)
class Evicted:
    slots: list[int]
    reason: str
    event: Literal["evicted"] = "evicted"


@dataclass(frozen=True)
class Moved:
    """These groups were written again, one behind another from row ``row`` of the extent's segment on."""

    shard: int
    extent: Extent
    slots: list[int]
    row: int
    score: float | None = None
    """Given where feedback changed the rows."""
    event: Literal["moved"] = "moved"


@dataclass(frozen=True)
class Deleted:
    shard: int
    segments: list[int]
    event: Literal["deleted"] = "deleted"


@dataclass(frozen=True)
class FeedbackNoted:
    """Feedback that came after its row was trained."""

    experience_id: str
    reward: float | None
    labels: dict[str, str]
    version: int
    event: Literal["feedback_noted"] = "feedback_noted"


@dataclass(frozen=True)
class Loaded:
    """Demonstrations lie in the file ``expert-<name>-<crc>.arrow``, of this extent."""

    name: str
    extent: Extent
    unit: int = 1
    """Rows that belong together: 2 for preference pairs."""
    event: Literal["loaded"] = "loaded"


@dataclass(frozen=True)
class ProducersEnded:
    """No more groups will come."""

    reason: str
    event: Literal["producers_ended"] = "producers_ended"


Event = (
    Began
    | StageOpened
    | StageResumed
    | StageClosed
    | Admitted
    | Abandoned
    | Stored
    | Dropped
    | TaskFailed
    | Leased
    | Acked
    | Blamed
    | Covered
    | Requeued
    | RolledBack
    | Advanced
    | Evicted
    | Moved
    | Deleted
    | FeedbackNoted
    | Loaded
    | ProducersEnded
)

# A reward that is not a number is rejected with its row, but the report that counts it comes here.
_config = ConfigDict(ser_json_inf_nan="constants")
_adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Event, Field(discriminator="event")], config=_config)


def encode(event: Event) -> bytes:
    """An event as one line of JSON."""
    return _adapter.dump_json(event)


def decode(line: bytes) -> Event:
    """The event of a line."""
    event: Event = _adapter.validate_json(line)
    return event
