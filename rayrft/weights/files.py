"""Weights as files in a folder or an object store, for engines that no network of the trainer reaches.

The first rank writes each version below one address, and engines read it. A version is a folder named by its serial
number, which is never used again. It has a file for each bucket of which anything has changed, and ``manifest.json``
(`Manifest`). The manifest is written last: without it the version does not exist.

A bucket's file has its bytes, or the difference to the version before, compressed by Zstandard. A word has as many
bytes as a value of the weights' dtype. A difference begins with a gap of 16 bits for each changed word: the number of
words between it and the changed word before. Then all changed words follow. Where a gap needs more bits, unchanged
words are listed, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter, ValidationError

from rayrft.errors import RayrftError, WeightSyncError, first_line
from rayrft.files import atomic_file, held, storage_errors
from rayrft.registry import Lazy
from rayrft.weights.messages import Parcel, TensorMeta
from rayrft.weights.transport import Endpoint, SignedStore, WeightTransport, register_transport

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.fs as pafs
    import torch
    from torch import Tensor

    import rayrft.weights.buckets as wire
else:
    np, pa, pafs, torch = Lazy("numpy"), Lazy("pyarrow"), Lazy("pyarrow.fs"), Lazy("torch")
    wire = Lazy("rayrft.weights.buckets")

_FIELD = "weight_sync.files"
_MANIFEST = "manifest.json"
_GAPS = 1 << 16

Ref = tuple[int, str]
"""A version's serial number, and the SHA-256 digest of its manifest, which covers its files and what it is based on."""


@dataclass(frozen=True)
class Manifest:
    """A version: its weights are those of ``base`` with the differences, or without a base are all in its files."""

    parcel: Parcel
    digest: str
    """`Digest` of the bytes of the buckets."""
    files: list[tuple[str, int | None]]
    """For each bucket the SHA-256 digest of its file, and the number of words of a difference, None for all bytes."""
    base: Ref | None
    first: int
    """Serial number of the full version that the differences begin with; its own if it is full."""
    format: Literal[3] = 3


MANIFESTS: TypeAdapter[Manifest] = TypeAdapter(Manifest)
"""Manifests as JSON."""


class VersionFolder:
    """The files below an address: a path, or the URI of a storage that pyarrow reads with the environment's
    credentials. Methods raise StorageError if the storage fails."""

    def __init__(self, address: str) -> None:
        self._root = address
        with self._errors("cannot be opened"):
            self._storage, self._root = pafs.FileSystem.from_uri(address)
            self._is_local = isinstance(self._storage, pafs.LocalFileSystem)
            if self._is_local:
                self._storage.create_dir(self._root)

    def serials(self) -> dict[int, bool]:
        """Return the serial numbers in order, and whether the version is complete."""
        found: dict[int, bool] = {}
        with self._errors("cannot be listed"):
            selector = pafs.FileSelector(self._root, allow_not_found=True, recursive=True)
            for each in self._storage.get_file_info(selector):
                serial, _, name = each.path.removeprefix(f"{self._root}/").partition("/")
                if serial.isdecimal():
                    found[int(serial)] = found.get(int(serial), False) or name == _MANIFEST
        return dict(sorted(found.items()))

    def newest(self) -> Ref | None:
        """Return the newest complete version, None if there is none."""
        complete = [serial for serial, complete in self.serials().items() if complete]
        return self.ref(complete[-1]) if complete else None

    def ref(self, serial: int) -> Ref:
        """Return the reference of the version that has this number."""
        return serial, hashlib.sha256(self.read(serial, _MANIFEST)).hexdigest()

    def manifest(self, ref: Ref) -> Manifest:
        """Return the manifest of a version. Raises WeightSyncError, as `read` does, and if it is none."""
        text = self.read(ref[0], _MANIFEST, ref[1])
        try:
            return MANIFESTS.validate_json(bytes(text))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise self._broken(ref[0], _MANIFEST, f"is not a manifest of weights: {where}: {first['msg']}") from None

    def read(self, serial: int, name: str, digest: str | None = None) -> pa.Buffer:
        """Return the bytes of a file. Raises WeightSyncError if it is missing, or they have another SHA-256 digest."""
        with self._errors("cannot be read"):
            try:
                with self._storage.open_input_file(self._path(serial, name)) as file:
                    data = file.read_buffer()
            except FileNotFoundError:
                raise self._broken(serial, name, "is missing") from None
        if digest not in (None, hashlib.sha256(data).hexdigest()):
            raise self._broken(serial, name, f"has {data.size} bytes, which are not those that were written")
        return data

    @held
    def write(self, serial: int, name: str, data: pa.Buffer | bytes) -> str:
        """Write a file, which appears as a whole; return its SHA-256 digest."""
        path = self._path(serial, name)
        with self._errors("cannot be written"):
            if self._is_local:
                Path(path).parent.mkdir(exist_ok=True)
                with atomic_file(Path(path)) as partial:
                    partial.write_bytes(data)
            else:
                with self._storage.open_output_stream(path) as stream:
                    stream.write(data)
        return hashlib.sha256(data).hexdigest()

    def remove_before(self, serial: int) -> None:
        """Remove older versions."""
        with self._errors("cannot be removed"):
            for old, complete in self.serials().items():
                if old < serial:
                    if complete:  # first: without it the version does not exist
                        self._storage.delete_file(self._path(old, _MANIFEST))
                    self._storage.delete_dir(self._path(old))

    def _path(self, serial: int, *name: str) -> str:
        return "/".join((self._root, f"{serial:08d}", *name))

    def _broken(self, serial: int, name: str, problem: str) -> WeightSyncError:
        remedy = "let nothing but the run write there, and see that the storage has no fault"
        return WeightSyncError(problem, remedy, field=self._path(serial, name))

    def _errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        remedy = "make room, or give the environment access; then: rayrft resume RUN"
        return storage_errors(Path(self._root), remedy, what)


class Versions:
    """Writes or reads versions, and holds the bytes of the last one in host memory: differences are to these."""

    def __init__(self, folder: VersionFolder) -> None:
        self._folder = folder
        self.buckets: list[Tensor] = []
        self._held: tuple[Ref, Manifest] | None = None
        """The version whose bytes are held; None while they may be those of two."""

    def read(self, ref: Ref) -> Manifest:
        """Read a version, after those that it is based on: from the one that is held, or from a full one.

        Raises WeightSyncError if a file is missing or broken, or the weights have another digest than was written.
        """
        chain, at = [(ref, self._folder.manifest(ref))], self._held and self._held[0]
        while (base := chain[-1][1].base) is not None and at not in (base, ref):
            chain.append((base, self._folder.manifest(base)))
        self._held = None
        for each, manifest in reversed(chain) if at != ref else ():
            self._update(each[0], manifest)
        self._held = chain[0]
        return chain[0][1]

    def _update(self, serial: int, manifest: Manifest) -> None:
        digest, problem = wire.Digest(), "gives weights of another digest than was written"
        planned = self._plan(manifest.parcel)
        try:
            for number, (bucket, metas, file) in enumerate(zip(self.buckets, planned, manifest.files, strict=True)):
                if file[1] != 0:
                    _change(bucket, _word(metas), self._folder.read(serial, f"{number}.bin", file[0]), file[1])
                digest.update(bucket)
        except (ValueError, IndexError, OSError) as error:
            problem = f"does not fit: {first_line(error)}"
        if digest.value != manifest.digest:
            raise self._folder._broken(serial, _MANIFEST, problem)

    def _plan(self, parcel: Parcel) -> list[list[TensorMeta]]:
        """Plan the buckets of a parcel, and give held buckets their sizes."""
        planned = wire.plan_buckets(parcel.metas, parcel.bucket_bytes)
        sizes = [wire.bucket_bytes(metas) for metas in planned]
        if sizes != [bucket.numel() for bucket in self.buckets]:
            self.buckets = []
            self.buckets = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        return planned


class VersionWriter(Versions):
    """Writes a version in full if it is the first, if its tensors differ, or the ``full_every``-th time."""

    def __init__(self, folder: VersionFolder, full_every: int) -> None:
        super().__init__(folder)
        self._full_every = full_every
        self._serial = self._before = self._first = max(folder.serials(), default=0)
        with contextlib.suppress(WeightSyncError):  # of a broken version, which is not continued
            if (newest := folder.newest()) is not None:
                self._first = folder.manifest(newest).first

    def write(self, parcel: Parcel, buckets: Iterable[Tensor]) -> tuple[Ref, Manifest]:
        """Write a version. Raises WeightSyncError if another run has written one."""
        newest, base = max(self._folder.serials(), default=0), self._held
        if newest > self._serial:
            remedy = "give each run an address of its own"
            raise WeightSyncError("another run writes weights there", remedy, field=f"{_FIELD}.address")
        follows = newest == self._serial and self._serial + 1 - self._first < self._full_every
        if base is not None and not (follows and replace(base[1].parcel, version=parcel.version) == parcel):
            base = None
        return self._write(parcel, buckets, base)

    def write_full(self) -> tuple[Ref, Manifest]:
        """Write the version that was written last again, in full."""
        assert self._held is not None
        return self._write(self._held[1].parcel, self.buckets, None)

    def remove_old(self) -> None:
        """Remove the versions before the last full one but one."""
        self._folder.remove_before(self._before)

    def _write(
        self, parcel: Parcel, buckets: Iterable[Tensor], base: tuple[Ref, Manifest] | None
    ) -> tuple[Ref, Manifest]:
        self._held, self._serial = None, self._serial + 1  # what fails is not continued
        digest, files = wire.Digest(), list[tuple[str, int | None]]()
        planned = self._plan(parcel)
        for number, (old, metas, new) in enumerate(zip(self.buckets, planned, buckets, strict=True)):
            changed = _difference(old, new.cpu(), _word(metas)) if base is not None else None
            old.copy_(new)
            digest.update(old)
            data, listed = changed or (pa.py_buffer(old.numpy()), None)
            files.append((self._folder.write(self._serial, f"{number}.bin", data) if listed != 0 else "", listed))
        if base is None:
            self._before, self._first = self._first, self._serial
        manifest = Manifest(parcel, digest.value, files, base and base[0], self._first)
        written = self._folder.write(self._serial, _MANIFEST, MANIFESTS.dump_json(manifest))
        self._held = (self._serial, written), manifest
        return self._held


@register_transport("files")
class FileTransport(WeightTransport):
    """The first sender tells the receivers through the link's store which version to read, and waits until each has
    read it. It writes a version again, in full, if one of them could not read the difference."""

    automatic = False

    def connect(self, end: Endpoint) -> None:
        self._end, self._transfers = end, itertools.count()
        if end.store is not None:
            self._store = SignedStore(end.store, end.secret)
        self._published: Ref | None = None
        self.reads = not end.sends or end.index == 0
        if self.reads:
            self._folder = folder = VersionFolder(end.options["address"])
            self._versions = VersionWriter(folder, end.options["full_every"]) if end.sends else Versions(folder)

    def send(self, parcel: Parcel, buckets: Iterable[Tensor]) -> None:
        if not self.reads:
            deque(buckets, maxlen=0)
            return
        writer, transfer = self._versions, next(self._transfers)
        assert isinstance(writer, VersionWriter)
        key = f"{transfer}/0"
        try:
            ref, manifest = writer.write(parcel, buckets)
            problems = self._offer(key, ref, manifest, range(self._end.receivers))
            if problems and manifest.base is not None:
                key = f"{transfer}/1"
                problems = self._offer(key, *writer.write_full(), problems)
        except Exception as error:
            self._store.set(key, json.dumps([0, first_line(error), True]))
            raise
        if problems:
            problem = f"an engine could not read the weights: {next(iter(problems.values()))}"
            raise WeightSyncError(problem, field=_FIELD)
        writer.remove_old()

    def published(self, number: int) -> Parcel:
        self._published = self._folder.ref(number)
        return self._folder.manifest(self._published).parcel

    def receive(self, parcel: Parcel, sizes: Sequence[int]) -> Iterator[Tensor]:
        if self._published is None:
            self._receive_offered()
        else:
            self._versions.read(self._published)
        for bucket in self._versions.buckets:
            yield bucket.to(self._end.device, copy=True)

    def _receive_offered(self) -> None:
        """Read the version that the sender offers; one whose difference cannot be read is offered again, in full."""
        transfer, is_full = next(self._transfers), False
        for attempt in itertools.count():
            serial, text, is_full = json.loads(self._store.get(f"{transfer}/{attempt}"))
            if not serial:
                raise WeightSyncError(f"the trainer could not write the weights: {text}", field=_FIELD)
            problem = ""
            try:
                self._versions.read((serial, text))
                break
            except RayrftError as error:
                problem = str(error)
                if is_full:
                    raise
            finally:
                self._store.set(f"{transfer}/{attempt}/{self._end.index}", problem)

    def _offer(self, key: str, ref: Ref, manifest: Manifest, receivers: Iterable[int]) -> dict[int, str]:
        """Let receivers read a version; return the problems of those that could not."""
        self._store.set(key, json.dumps([*ref, manifest.base is None]))
        answers = {index: self._store.get(f"{key}/{index}") for index in receivers}
        for used in (key, *(f"{key}/{index}" for index in answers)):
            self._store.delete_key(used)
        return {index: problem for index, problem in answers.items() if problem}


def _word(metas: Sequence[TensorMeta]) -> int:
    """Return the bytes of a value in a bucket; of several dtypes those of the smallest."""
    return min(getattr(torch, meta.dtype).itemsize for meta in metas)


def _difference(old: Tensor, new: Tensor, word: int) -> tuple[pa.Buffer, int] | None:
    """Return gaps and words that have changed, and their number; None if these take more bytes than the bucket."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    changed = old.view(kind) != new.view(kind)
    if int(changed.count_nonzero()) * (word + 2) >= new.numel():
        return None
    gaps = changed.nonzero().flatten().diff(prepend=torch.tensor([-1])).numpy() - 1
    ends = np.cumsum(gaps // _GAPS + 1)
    listed = np.full(ends[-1] if len(ends) else 0, _GAPS - 1, np.uint16)
    listed[ends - 1] = gaps % _GAPS
    words = new.view(kind).numpy()[_positions(listed)]
    return pa.compress(listed.tobytes() + words.tobytes(), "zstd"), len(listed)


def _change(bucket: Tensor, word: int, data: pa.Buffer, listed: int | None) -> None:
    """Give a bucket its bytes, or apply the difference. Raises ValueError, IndexError or OSError if it does not fit."""
    words = bucket.numpy().view(f"u{word}")
    if listed is None:
        words[:] = np.frombuffer(data, words.dtype)
    else:
        raw = pa.decompress(data, listed * (2 + word), "zstd")
        words[_positions(np.frombuffer(raw, np.uint16, listed))] = np.frombuffer(raw, words.dtype, listed, 2 * listed)


def _positions(gaps: np.ndarray) -> np.ndarray:
    return np.cumsum(gaps + np.int64(1)) - 1
