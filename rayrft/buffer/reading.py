"""The state that a log speaks of, read by whoever wants to look: nothing is locked, cut off or written."""

from __future__ import annotations

from dataclasses import dataclass

from rayrft.buffer.experience import SCHEMA_VERSION
from rayrft.buffer.log.journal import Journal, Recovered
from rayrft.buffer.log.segments import segment_name
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.state import State
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import StorageError

_ATTEMPTS = 5


@dataclass(frozen=True)
class Reading:
    """A log's state when it was read. ``torn_bytes`` lie in its files and do not count: a crash left them behind, or a
    live Buffer is just writing them."""

    state: State
    torn_bytes: int


def read_state(storage: Storage, sampler: SamplerConfig, seed: int) -> Reading:
    """Read a log's journal; ``sampler`` and ``seed`` are those of its run.

    Raises StorageError when there is no log, it has another schema version, or its journal is damaged.
    """
    recovered = _read_journal(storage)
    state = State(sampler, seed, None)
    if recovered.snapshot is not None:
        state.restore(recovered.snapshot)
    for event in recovered.events:
        state.apply(event)
    if not state.book.run:
        raise StorageError(
            "no Buffer has written here", field=storage.location, remedy="give the folder of a run that has begun"
        )
    if state.book.schema != SCHEMA_VERSION:
        raise StorageError(
            f"the log has schema version {state.book.schema}; this rayrft reads {SCHEMA_VERSION}",
            field=storage.location,
            remedy="read it with the rayrft that wrote it; its segments open with plain pyarrow",
        )
    return Reading(state, recovered.torn_bytes + _uncommitted_bytes(storage, state))


def _read_journal(storage: Storage) -> Recovered:
    """A live Buffer may begin a new journal and delete the old one at any time: then it is read again."""
    for _ in range(_ATTEMPTS):
        before = _snapshots(storage)
        try:
            recovered = Journal(storage).read()
        except FileNotFoundError:
            continue
        except StorageError:
            if _snapshots(storage) == before:
                raise
            continue
        if _snapshots(storage) == before:
            return recovered
    raise StorageError(
        f"a new journal was begun each of the {_ATTEMPTS} times that it was read",
        field=storage.location,
        remedy="read it again",
    )


def _snapshots(storage: Storage) -> list[str]:
    return [name for name in storage.files() if name.startswith("snapshot")]


def _uncommitted_bytes(storage: Storage, state: State) -> int:
    """Bytes of segments that the journal does not speak of."""
    total = 0
    for shard in {0, *state.book.extents}:
        extents = state.book.extents.get(shard, {})
        committed = {segment_name(number): extent.nbytes for number, extent in extents.items()}
        for name, size in storage.folder(f"shard-{shard}").files().items():
            total += max(0, size - committed.get(name, 0))
    return total
