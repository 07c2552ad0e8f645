"""The log where files do not grow: on an object store, every piece is an object of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import ray

from rayrft.buffer import events as e
from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.log import journal
from rayrft.buffer.log.journal import Journal
from rayrft.buffer.log.shard import RowSpan, Shard
from rayrft.buffer.log.storage import Storage
from rayrft.config import load_config
from rayrft.config.buffer import join
from rayrft.errors import StorageError
from rayrft.experience import pack, to_batch, unpack
from tests.buffer.in_process import small
from tests.buffer.rows import group, plan, trained_ids
from tests.config.test_load import base
from tests.scripted import handle

SIZES: dict[str, Any] = {"max_rows": 1000, "max_bytes": 1 << 30, "memory_bytes": 1 << 30, "log_bytes": 40_000}
CONFIG = small(**SIZES, segment_bytes=1 << 20)


@pytest.fixture
def memory() -> Iterator[Storage]:
    """An object store in this process."""
    files = fsspec.filesystem("memory")
    storage = Storage("bucket/log", pafs.PyFileSystem(pafs.FSSpecHandler(files)))
    storage.create()
    yield storage
    files.store.clear()


class TestInMemory:
    def test_a_journal_is_read_back_in_the_order_in_which_it_was_written(self, memory: Storage) -> None:
        events = [e.Advanced(version) for version in range(25)]
        for some in (events[:12], events[12:]):
            journal = Journal(memory)
            assert journal.open().events == events[: events.index(some[0])]
            for event in some:
                journal.append([event])
        assert Journal(memory).open().events == events
        assert len(memory.files()) == 25

    def test_a_snapshot_takes_the_place_of_all_parts_before_it(self, memory: Storage) -> None:
        journal = Journal(memory)
        journal.open()
        for version in range(3):
            journal.append([e.Advanced(version)])
            journal.append([e.Acked(version)])
            journal.begin(pa.py_buffer(b"state %d" % version))
        journal.append([e.Advanced(9)])
        recovered = Journal(memory).open()
        assert (bytes(recovered.snapshot), recovered.events) == (b"state 2", [e.Advanced(9)])
        assert [name.split("-")[0] for name in memory.files()] == ["journal", "snapshot"]

    def test_a_part_that_is_gone_is_named(self, memory: Storage) -> None:
        journal = Journal(memory)
        journal.open()
        for version in range(4):
            journal.append([e.Advanced(version)])
        memory.delete("journal-00000000.jsonl.00000001")
        with pytest.raises(StorageError, match=r"journal-00000000\.jsonl\.00000001: is gone\. Restore it"):
            Journal(memory).open()

    def test_a_last_part_that_was_not_written_to_its_end_is_cut(self, memory: Storage) -> None:
        journal = Journal(memory)
        journal.open()
        for version in range(3):
            journal.append([e.Advanced(version), e.Acked(version)])
        name = "journal-00000000.jsonl.00000002"
        memory.write(name, memory.read(name)[:-3])
        journal = Journal(memory)
        recovered = journal.open()
        assert recovered.events[-2:] == [e.Acked(1), e.Advanced(2)] and recovered.torn_bytes > 0
        journal.append([e.Advanced(7)])
        assert Journal(memory).open().events == [*recovered.events, e.Advanced(7)]
        memory.write(name, b"torn")
        with pytest.raises(StorageError, match=rf"{name}: the end of it is damaged"):
            Journal(memory).open()

    def test_rows_are_read_back_and_what_was_not_committed_is_gone(self, memory: Storage) -> None:
        objects: list[pa.Buffer] = []

        def put(message: pa.Buffer) -> int:
            objects.append(message)
            return len(objects) - 1

        shard = Shard(memory.folder("shard-0"), CONFIG, put)
        shard.open([])
        done = [shard.append(pack(to_batch(group(number)))) for number in range(12)]
        shard = Shard(memory.folder("shard-0"), CONFIG, put)
        assert shard.open([each.extent for each in done[:11]]) == done[11].extent.nbytes
        spans = [RowSpan(each.extent.segment, each.row, 2) for each in done[:11]]
        assert shard.read(spans).column("group_id").to_pylist() == [str(i // 2) for i in range(22)]
        blocks = [(unpack(objects[ref]), row) for ref, row, _ in shard.refs(spans)]
        assert [block.column("group_id")[row].as_py() for block, row in blocks] == [str(i) for i in range(11)]
        shard.delete([0, 1])
        assert len(memory.folder("shard-0").files()) == 9
        with pytest.raises(KeyError):
            shard.refs(spans[:1])


@pytest.mark.parametrize(
    ("location", "inside"),
    [
        ("/data/runs", "/data/runs/name"),
        ("/data/what?/", "/data/what?/name"),
        ("s3://bucket/runs/", "s3://bucket/runs/name"),
        ("s3://bucket?region=here&scheme=http", "s3://bucket/name?region=here&scheme=http"),
    ],
)
def test_the_options_of_a_uri_stay_behind_what_is_joined_to_it(location: str, inside: str) -> None:
    assert join(location, "name") == inside
    config = load_config(base(), {"buffer.storage": location, "name": "name"})
    assert config.buffer_location == inside


def test_a_folder_that_is_not_absolute_is_the_drivers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(base(), {"buffer.storage": "logs"}).buffer_location == f"{tmp_path}/logs/{base()['name']}"


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(
        StorageError, match=r"buffer\.storage: no such file system: .*nothing.*found 'nothing://at/all'"
    ):
        Storage("nothing://at/all")


class EagerBuffer(Buffer):
    """Takes a snapshot whenever it can."""

    def __init__(self, *arguments: Any) -> None:
        journal._SNAPSHOT_BYTES, journal._SNAPSHOT_RATIO = 3000, 0
        super().__init__(*arguments)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URI of an empty bucket of a server on this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    yield f"s3://user:secret@bucket/runs?{options}"
    server.stop()


@pytest.mark.usefixtures("ray_cluster")
class TestS3:
    @pytest.fixture
    def start(self) -> Iterator[Callable[[str], Any]]:
        actors: list[Any] = []

        def begin(location: str) -> Any:
            options = {"num_cpus": 0, "max_concurrency": 100, "max_restarts": -1, "max_task_retries": -1}
            actors.append(ray.remote(EagerBuffer).options(**options).remote("run", location, CONFIG, 0))
            return actors[-1]

        yield begin
        for actor in actors:
            ray.kill(actor)

    def put(self, buffer: Any, *numbers: int) -> None:
        async def one_by_one() -> None:
            writer = BufferWriter(handle(buffer))
            for number in numbers:
                await writer.put(to_batch(group(number)))

        asyncio.run(one_by_one())

    def kill(self, buffer: Any) -> None:
        pid = ray.get(buffer.pid.remote())
        os.kill(pid, signal.SIGKILL)
        assert ray.get(buffer.pid.remote(), timeout=60) != pid

    def test_what_was_put_is_there_after_a_kill(self, start: Callable[[str], Any], bucket: str) -> None:
        buffer = start(join(bucket, "killed"))
        self.put(buffer, *range(6))
        ray.get(buffer.open_stage.remote(plan(2, scheduled=False)))
        before = trained_ids(ray.get(buffer.lease.remote(0, 2, 10)))
        self.kill(buffer)
        assert trained_ids(ray.get(buffer.lease.remote(0, 2, 10))) == before == [0, 1, 10, 11]
        self.put(buffer, 6)
        assert trained_ids(ray.get(buffer.lease.remote(1, 2, 10))) == [20, 21, 30, 31]
        stats = ray.get(buffer.stats.remote())
        assert (stats.ledger.sampled, stats.ledger.held, stats.sizes.torn_bytes) == (14, 14, 0)

    def test_many_small_objects_are_deleted_as_they_are_trained(self, start: Callable[[str], Any], bucket: str) -> None:
        location = join(bucket, "many")
        buffer = start(location)
        ray.get(buffer.open_stage.remote(plan(2, scheduled=False)))
        for step in range(20):
            self.put(buffer, 2 * step, 2 * step + 1)
            ray.get(buffer.lease.remote(step, 1, 10))
            ray.get([buffer.ack.remote(step), buffer.cover.remote(step + 1)])
            if step == 10:
                self.kill(buffer)
        storage = Storage(location)
        assert sum(storage.folder("shard-0").files().values()) <= CONFIG.log_bytes
        assert len(storage.files()) < 20, "parts of old journals are still there"
        self.kill(buffer)
        stats = ray.get(buffer.stats.remote())
        assert (stats.ledger.sampled, stats.ledger.trained, stats.ledger.held) == (80, 80, 0)
