"""How many values of the weights an optimiser step changes in the dtype that is sent, and what that saves.

A Qwen3 with random weights in float32 takes steps of GRPO on rows with random advantages, with AdamW and clipping; the
weights of each step are cast and written as `weight_sync.backend: files` writes them. With --versions, the versions in
a run's folder are read instead.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from rayrft.config.trainer import OptimizerConfig
from rayrft.trainer.model import named_weights
from rayrft.trainer.policy import Policy
from rayrft.weights.buckets import allocate, empty_bucket, fill_bucket, plan_buckets
from rayrft.weights.files import Ref, VersionFolder, Versions, VersionWriter
from rayrft.weights.messages import Parcel, TensorMeta
from tests.bench.helpers import parse
from tests.bench.workload import Shape, join_alone, make_learner, make_rows

CPU = torch.device("cpu")


class Changes:
    """Reads the versions of a folder in their order, and prints of each what has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions, self._before = Versions(VersionFolder(str(folder))), list[Tensor]()
        print(f"{'version':>8} {'values':>12} {'changed':>8} {'bytes':>12} {'of all':>7}")

    def read(self, ref: Ref) -> None:
        manifest = self._versions.read(ref)
        kind = torch.int32 if manifest.parcel.metas[0].dtype == "float32" else torch.int16
        words = [bucket.view(kind) for bucket in self._versions.buckets]
        count = sum(each.numel() for each in words)
        changed = count
        if self._before:
            changed = sum(int((a != b).count_nonzero()) for a, b in zip(words, self._before, strict=True))
        self._before = [each.clone() for each in words]
        nbytes = sum(file.stat().st_size for file in (self._folder / f"{ref[0]:08d}").glob("*.bin"))
        share = nbytes / manifest.parcel.nbytes
        print(
            f"{manifest.parcel.version:>8} {count:>12,} {changed / count:>8.2%} {nbytes:>12,} {share:>7.2%}", flush=True
        )


def trained(shape: Shape, folder: Path, lr: float, steps: int, rows: int, length: int) -> Iterator[Ref]:
    """Train, and write a version after each step; iterate over them."""
    learner = make_learner(
        Policy(shape.model()),
        "grpo",
        tokens=rows * length,
        device=CPU,
        compute=torch.float32,
        optimizer=OptimizerConfig(lr=lr),
    )
    tensors = dict(named_weights(learner.policy))
    parcel = Parcel([TensorMeta.of(name, tensor, torch.bfloat16) for name, tensor in tensors.items()], 64 << 20)
    planned, writer = (
        plan_buckets(parcel.metas, parcel.bucket_bytes),
        VersionWriter(VersionFolder(str(folder)), 1 << 30),
    )

    def buckets() -> Iterator[Tensor]:
        for metas, memory in zip(planned, cycle(allocate(planned, CPU)), strict=False):
            buffer = empty_bucket(metas, memory)
            fill_bucket(buffer, metas, (tensors[meta.name].full_tensor() for meta in metas))  # type: ignore[attr-defined]
            yield buffer

    for step in range(steps + 1):
        if step:
            learner.step([make_rows([length] * rows, length // 4, shape.vocabulary, seed=step)])
        parcel = Parcel(parcel.metas, parcel.bucket_bytes, version=step)
        yield writer.write(parcel, buckets())[0]


def main() -> None:
    options = parse(
        __doc__,
        layers=(4, "of 1,024 as in Qwen3-0.6B, which has 28"),
        vocabulary=151936,
        steps=100,
        lr=1e-6,
        rows=4,
        length=128,
        versions=(str, "the folder of a run's weights"),
    )
    if options.versions:
        folder = Path(options.versions)
        changes = Changes(folder)
        for path in sorted(folder.glob("*/manifest.json")):
            changes.read((int(path.parent.name), hashlib.sha256(path.read_bytes()).hexdigest()))
        return
    join_alone(CPU)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        changes, shape = Changes(folder), Shape(1024, options.layers, 16, 8, 128, 3072, options.vocabulary)
        for ref in trained(shape, folder, options.lr, options.steps, options.rows, options.length):
            changes.read(ref)


if __name__ == "__main__":
    main()
