"""Events that change the Buffer's state, and the values in them. `rayrft.buffer.transitions` has the events."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Any, dataclass_transform

import numpy as np
import pyarrow as pa

from rayrft.errors import StorageError
from rayrft.experience import SCHEMA_VERSION, TRUNCATED, Experience

if TYPE_CHECKING:
    from rayrft.buffer.state import State


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


EVENT_TAGS: dict[type[Event], str] = {}
"""The kinds of events in the journal: their names in snake case."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Event:
    """A change of the Buffer's state. Its subclasses are frozen dataclasses. The same events are applied in memory and
    written to the journal."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        EVENT_TAGS[cls] = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__).lower()

    def apply(self, state: State) -> Any:
        """Change the state; return what follows, such as admitted tickets."""
        raise NotImplementedError


class FeedbackNoted(Event):
    """Feedback that came after its row was trained, or dropped. It is forgotten with the segment of the row."""

    segment: int
    experience_id: str
    reward: float | None
    labels: dict[str, str]
    version: int

    def apply(self, state: State) -> None:
        noted = state.contents.late_feedback.setdefault(self.segment, [])
        if self not in noted:  # else it is a repeat
            noted.append(self)
            state.contents.late_feedback_count += 1


@dataclass(frozen=True)
class ModelTerms:
    """The model of all jobs that meet at a named Buffer: its limits on rows, and a digest of its tokenizer."""

    vocabulary: int
    max_length: int
    tokenizer: str


def check_version(schema: str, log: str) -> None:
    """Raise StorageError unless this version of rayrft reads and writes logs of that schema version."""
    if schema != SCHEMA_VERSION:
        problem = f"the log has schema version {schema}; this rayrft reads {SCHEMA_VERSION}"
        remedy = "use the version of rayrft that wrote it; its segments are plain Arrow files"
        raise StorageError(problem, remedy, field=log)
