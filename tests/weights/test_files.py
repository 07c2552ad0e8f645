"""Weights as files: full versions and differences give the same bytes; what is missing, broken or late is read from a
full version, or refused by name."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pyarrow.fs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayrft.config import load_config
from rayrft.errors import ConfigError, NoRoom, StorageError, WeightSyncError
from rayrft.weights import files
from rayrft.weights.files import MANIFESTS, Manifest, VersionFolder, Versions, VersionWriter
from tests.config.given import base
from tests.errors import about
from tests.weights.ends import Ends, buckets, parcel, weights
from tests.weights.written import EVERY, Written, stepped


class Files(Ends):
    """The ends of a link over files in a folder."""

    def __init__(self, folder: Path, receivers: int = 1) -> None:
        self.folder = folder
        super().__init__("files", 2, receivers, options={"address": str(folder), "full_every": EVERY})

    def arrives(self, number: int, tensors: dict[str, Tensor]) -> None:
        """What is sent is what every receiver gets."""
        sent, got = self.transfer(number, tensors)
        for digest, received in got:
            assert digest == sent and all(torch.equal(received[name], tensor) for name, tensor in tensors.items())


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Callable[..., Files]]:
    made: list[Files] = []

    def make(receivers: int = 1) -> Files:
        made.append(Files(tmp_path / "weights", receivers))
        return made[-1]

    yield make
    for each in made:
        each.close()


def manifests(folder: Path) -> dict[int, Manifest]:
    """The complete versions of a folder, by serial number."""
    return {
        int(path.parent.name): MANIFESTS.validate_json(path.read_bytes()) for path in folder.glob("*/manifest.json")
    }


def nbytes(folder: Path, serial: int) -> int:
    return sum(path.stat().st_size for path in (folder / f"{serial:08d}").glob("*.bin"))


def test_a_version_is_a_difference_unless_it_is_the_first_or_the_nth(ends: Callable[..., Files]) -> None:
    link, tensors = ends(receivers=2), weights(0)
    for number in range(2 * EVERY + 1):
        link.arrives(number, tensors)
        tensors = stepped(tensors, number)
    found = manifests(link.folder)
    assert {serial for serial, each in found.items() if each.base is None} == {EVERY + 1, 2 * EVERY + 1}
    assert min(found) == EVERY + 1 and len(found) == EVERY + 1, "what no engine needs is removed"
    assert 0 < nbytes(link.folder, EVERY + 2) < 0.1 * nbytes(link.folder, EVERY + 1)


def test_buckets_that_have_changed_too_much_or_not_at_all_take_no_more_than_they_need(
    ends: Callable[..., Files],
) -> None:
    link, tensors = ends(), weights(0)
    for number, share in enumerate((0.0, 0.0, 0.9)):
        tensors = stepped(tensors, number, share)
        link.arrives(number, tensors)
    assert nbytes(link.folder, 2) == 0 and nbytes(link.folder, 3) == nbytes(link.folder, 1)


def test_other_tensors_are_sent_in_full(ends: Callable[..., Files]) -> None:
    link = ends()
    link.arrives(1, weights(0))
    link.arrives(2, {name: tensor.bfloat16() for name, tensor in weights(0).items()})
    assert [each.base for each in manifests(link.folder).values()] == [None, None]


def test_a_new_link_begins_with_a_full_version_after_those_that_were_there(ends: Callable[..., Files]) -> None:
    first, tensors = ends(), weights(0)
    first.arrives(1, tensors)
    first.arrives(2, stepped(tensors, 1))
    (first.folder / "00000003").mkdir()  # the sender was killed before the manifest
    (first.folder / "00000003" / "0.bin").write_bytes(b"half")
    second = ends(receivers=2)
    second.arrives(1, weights(1))
    second.arrives(2, stepped(weights(1), 1))
    assert {serial: each.first for serial, each in manifests(first.folder).items()} == {1: 1, 2: 1, 4: 4, 5: 4}
    second.arrives(3, weights(2))
    third = ends()
    third.arrives(1, weights(0))
    assert sorted(path.name for path in first.folder.iterdir())[0] == "00000004", "what was left half is removed, too"


class Damaging:
    """A storage that does not give the bytes of version 2 back, as an end finds it."""

    def __init__(self, storage: Any, kind: str, of: str, scratch: Path) -> None:
        self._storage, self._kind, self._of, self._scratch = storage, kind, of, scratch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open_input_file(self, path: str) -> Any:
        if "/00000002/" not in path or self._of not in path:
            return self._storage.open_input_file(path)
        if self._kind == "missing":
            raise FileNotFoundError(path)
        content = Path(path).read_bytes()
        self._scratch.write_bytes(content[:-1] if self._kind == "truncated" else bytes([content[0] ^ 1]) + content[1:])
        return self._storage.open_input_file(str(self._scratch))


@pytest.mark.parametrize("of", [".bin", ".json"])
@pytest.mark.parametrize("kind", ["truncated", "tampered", "missing"])
def test_a_difference_that_is_damaged_for_one_receiver_is_replaced_by_a_full_version(
    kind: str, of: str, ends: Callable[..., Files], tmp_path: Path
) -> None:
    link, tensors = ends(receivers=2), weights(0)
    link.arrives(1, tensors)
    folder = link.receivers[1]._transport._versions._folder  # type: ignore[attr-defined]
    folder._storage = Damaging(folder._storage, kind, of, tmp_path / "scratch")
    link.arrives(2, stepped(tensors, 1))
    found = manifests(link.folder)
    assert [found[serial].base is None for serial in (1, 2, 3)] == [True, False, True]
    assert found[2].digest == found[3].digest and found[3].parcel == found[2].parcel
    link.arrives(3, stepped(tensors, 2))
    assert manifests(link.folder)[4].base is not None


def test_a_full_version_that_is_damaged_is_an_error_of_both_sides_and_the_next_is_full(
    ends: Callable[..., Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = ends()

    def lost(self: VersionFolder, serial: int, name: str, digest: str | None = None) -> Any:
        raise WeightSyncError("is missing", field="0.bin")

    monkeypatch.setattr(VersionFolder, "read", lost)
    sent = link.start(1, weights(0))
    for future, about_what in zip(sent, ("weight_sync.files", "0.bin"), strict=True):
        with pytest.raises(WeightSyncError, check=about(about_what)):
            future.result(30)
    monkeypatch.undo()
    link.arrives(2, weights(0))


def test_a_full_disk_is_an_error_of_the_sender_and_of_the_receivers_that_wait(
    ends: Callable[..., Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, tensors, write = ends(), weights(0), Path.write_bytes
    link.arrives(1, tensors)

    def full(self: Path, data: Any) -> int:
        if self.name.startswith(".1.bin"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    sender, receiver = link.start(2, tensors)
    with pytest.raises(NoRoom, check=about("weights")):
        sender.result(30)
    with pytest.raises(WeightSyncError, match="No space left"):
        receiver.result(30)
    monkeypatch.undo()
    link.arrives(3, tensors)
    assert manifests(link.folder).keys() == {1, 3} and manifests(link.folder)[3].base is None, (
        "nothing half is built on"
    )


def test_two_runs_cannot_write_to_one_folder(ends: Callable[..., Files]) -> None:
    first, second = ends(), ends()
    first.arrives(1, weights(0))
    for future in second.start(1, weights(1)):
        with pytest.raises(WeightSyncError, match="another run"):
            future.result(30)
    first.arrives(2, weights(1))


def test_a_reader_that_is_late_or_has_missed_versions_reads_what_lies_between(tmp_path: Path) -> None:
    written = Written(tmp_path)
    early, reads = Versions(written.folder), list[int]()
    read = written.folder.read

    def recorded(serial: int, name: str, digest: str | None = None) -> Any:
        if name == "manifest.json" and digest is not None:
            reads.append(serial)
        return read(serial, name, digest)

    written.folder.read = recorded  # type: ignore[method-assign]
    assert written.step() and written.read_by(early) and written.read_by(early)
    written.step(1, 2)
    assert written.read_by(early) and reads == [1, 1, 3, 2], "differences alone"
    assert written.read_by(Versions(written.folder)) and reads[4:] == [3, 2, 1]
    written.step(3, 3)  # the fifth is full
    reads.clear()
    assert written.read_by(early) and reads == [6, 5], "not all that was missed"
    written.step(6, 2 * EVERY)
    assert written.read_by(early), "though its version has been removed"


def test_a_reader_whose_base_is_missing_or_another_says_so_and_reads_the_next_full_version(tmp_path: Path) -> None:
    written, late = Written(tmp_path), Versions(VersionFolder(str(tmp_path)))
    written.step(0, 2)
    (tmp_path / "00000001" / "manifest.json").rename(tmp_path / "kept")
    with pytest.raises(WeightSyncError, check=about("00000001/manifest.json")):
        written.read_by(late)
    other = json.loads((tmp_path / "kept").read_text()) | {"digest": "0"}
    (tmp_path / "00000001" / "manifest.json").write_text(json.dumps(other))
    with pytest.raises(WeightSyncError, match="not those that were written"):
        written.read_by(late)
    written.step(2, 3)
    assert written.read_by(late)


@pytest.mark.parametrize(
    "values",
    [{"digest": "0" * 16}, {"files": []}, {"format": 1}, {"parcel": {}}, {"base": "no"}],
    ids=lambda values: next(iter(values)),
)
def test_a_manifest_that_another_has_written_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.step()
    path = tmp_path / "00000001" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(WeightSyncError, check=about("00000001/manifest.json")):
        written.read_by(Versions(written.folder))


def test_a_difference_that_points_outside_of_its_bucket_is_refused(tmp_path: Path) -> None:
    written, reader = Written(tmp_path), Versions(VersionFolder(str(tmp_path)))
    written.step()
    assert written.read_by(reader)
    ref = written.step(1)
    manifest = json.loads((tmp_path / f"{ref[0]:08d}" / "manifest.json").read_text())
    for gap in (60_000, 0):
        data = pyarrow.compress(gap.to_bytes(2, "little") + bytes(4), "zstd")
        manifest["files"][0] = [written.folder.write(ref[0], "0.bin", data), 1]
        written.folder.write(ref[0], "manifest.json", json.dumps(manifest).encode())
        with pytest.raises(WeightSyncError, check=about("manifest.json")):
            written.read_by(reader)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_difference_gives_the_bytes_back_whatever_the_gaps_and_the_dtype(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]))
    size = data.draw(st.sampled_from([16, 65_536, 65_537, 200_000]))
    where = data.draw(st.sets(st.sampled_from([0, 1, size // 2, 65_535, 65_536, size - 1]), max_size=5))
    tensor = torch.zeros(size, dtype=torch.float64).to(dtype)
    changed = tensor.clone()
    for place in where:
        changed.view(torch.uint8)[min(place * tensor.itemsize, tensor.nbytes - 1)] = 0x80  # -0.0 is another value, too
    folder = VersionFolder(str(tmp_path_factory.mktemp("weights")))
    writer, reader = VersionWriter(folder, 10), Versions(folder)
    for each in (tensor, changed, tensor):
        sent = parcel({"w": each})
        reader.read(writer.write(sent, buckets({"w": each}))[0])
        assert torch.equal(reader.buckets[0], next(buckets({"w": each})))


def test_an_object_store_has_the_same_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = pyarrow.fs.FileSystem.from_uri("mock://")
    opened = SimpleNamespace(from_uri=lambda address: (Objects(store), address.removeprefix("s3://")))
    monkeypatch.setattr(files, "pafs", SimpleNamespace(**vars(pyarrow.fs) | {"FileSystem": opened}))
    assert_versions("s3://bucket/run")


@pytest.mark.slow
def test_a_server_of_objects_has_the_same_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    server.start()
    host, port = server.get_host_and_port()
    try:
        urlopen(Request(f"http://{host}:{port}/bucket", method="PUT")).close()
        assert_versions(f"s3://bucket/run?endpoint_override={host}:{port}&scheme=http&region=us-east-1")
        with urlopen(f"http://{host}:{port}/bucket?list-type=2") as listed:
            assert b"<Key>run/00000005/manifest.json</Key>" in listed.read()
    finally:
        server.stop()


def assert_versions(address: str) -> None:
    folder = VersionFolder(address)
    assert folder.newest() is None
    writer, reader, tensors = VersionWriter(folder, 2), Versions(folder), weights(0)
    for number in range(5):
        tensors = stepped(tensors, number)
        ref, manifest = writer.write(parcel(tensors), buckets(tensors))
        assert folder.newest() == ref and reader.read(ref) == manifest
        writer.remove_old()
    assert [*folder.serials()] == [3, 4, 5]


class Objects:
    """A store in which a folder exists by its objects alone."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_output_stream(self, path: str) -> Any:
        self._store.create_dir(path.rpartition("/")[0])
        return self._store.open_output_stream(path)


def test_a_storage_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, check=about("file")):
        VersionFolder(str(tmp_path / "file"))


def test_the_config_says_where_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = {"weight_sync.backend": "files"}
    assert load_config(base(), {**chosen, "storage": "runs"}).transport_options == {
        "address": f"{tmp_path}/runs/a/weights",
        "full_every": 20,
    }
    for given_address, found in (("weights", f"{tmp_path}/weights"), ("s3://bucket/run", "s3://bucket/run")):
        config = load_config(base(), {**chosen, "weight_sync.files": {"address": given_address, "full_every": 3}})
        assert config.transport_options == {"address": found, "full_every": 3} and not config.colocated
    assert load_config(base(), {}).transport_options == {}, "auto is never files"


@pytest.mark.parametrize(
    ("given_values", "field"),
    [
        ({"weight_sync.files.address": "weights"}, "weight_sync.files"),
        ({"weight_sync.backend": "files", "weight_sync.files.address": "ftp://host/x"}, "weight_sync.files.address"),
        ({"weight_sync.backend": "files", "weight_sync.files.address": "s3://a:b@bucket"}, "weight_sync.files.address"),
        ({"weight_sync.backend": "files", "weight_sync.files.full_every": 0}, "weight_sync.files.full_every"),
        ({"weight_sync.backend": "files", "weight_sync.files.every": 2}, "weight_sync.files.every"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(given_values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)) as refused:
        load_config(base(), given_values)
    assert "a:b" not in str(refused.value)
