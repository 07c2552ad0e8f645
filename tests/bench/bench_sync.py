"""A weight transfer beside a plain broadcast of the same bytes, over gloo, between two processes in one run.

The transfer casts float32 parameters to bfloat16, fills buckets, digests them at both ends and copies every tensor into
the receiver's model; the broadcast sends one buffer of as many bytes. Seconds from the sender's begin to the receiver's
end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayrft.weights.buckets import Digest, empty_bucket, fill_bucket, plan_buckets, two_buffers
from rayrft.weights.channel import WeightChannel, open_store
from rayrft.weights.messages import Link, Parcel, TensorMeta
from tests.bench.helpers import parse, spread
from tests.trainer.ranks import on_ranks

HOST, CPU = "127.0.0.1", torch.device("cpu")
WIDTH = 1024


def _transfers(parameters: int, bucket_mib: int, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of each round: of the transfer, and of the broadcast."""
    sends = dist.get_rank() == 0
    names = [f"layers.{number}.weight" for number in range(max(1, parameters // (4 * WIDTH * WIDTH)))]
    metas = [TensorMeta(name, "bfloat16", (4 * WIDTH, WIDTH)) for name in names]
    model = {name: torch.randn(4 * WIDTH, WIDTH) if sends else torch.zeros(4 * WIDTH, WIDTH) for name in names}
    parcel = Parcel(metas, bucket_mib << 20, None)
    store = open_store(60, HOST) if sends else None
    port: list[Any] = [store.port if store is not None else None]
    dist.broadcast_object_list(port)
    link = Link("gloo", HOST, port[0], 1, senders=1, receivers=1, timeout_s=600, secret="s")
    channel = WeightChannel(link, sends=sends, index=0, device=CPU, store=store)

    def buckets() -> Iterator[Tensor]:
        planned = plan_buckets(metas, parcel.bucket_bytes)
        memory = cycle(two_buffers(planned, CPU))
        for bucket in planned:
            buffer = empty_bucket(bucket, next(memory))
            fill_bucket(buffer, bucket, (model[meta.name] for meta in bucket))
            yield buffer

    def transfer(number: int) -> None:
        if sends:
            sent = [channel.send(number, parcel, buckets())]
        else:
            digest = Digest()
            for bucket in channel.receive(channel.announced(number), digest):
                for name, tensor in bucket:
                    model[name].copy_(tensor)
            sent = [digest.value]
        both: list[Any] = [None, None]
        dist.all_gather_object(both, sent)
        assert both[0] == both[1]

    flat = torch.zeros(parcel.nbytes, dtype=torch.uint8)
    seconds = []
    for number in range(rounds + 1):
        taken = []
        for work in (lambda number=number: transfer(number), lambda: dist.broadcast(flat, 0)):
            dist.barrier()
            started = time.perf_counter()
            work()
            dist.barrier()
            taken.append(time.perf_counter() - started)
        seconds.append((taken[0], taken[1]))
    channel.close()
    return seconds[1:]


def main() -> None:
    options = parse(__doc__, millions=[62, 600], bucket_mib=[4, 64], rounds=7)
    for millions in options.millions:
        for size in options.bucket_mib:
            seconds = on_ranks(2, _transfers, int(millions * 1e6), size, options.rounds)
            ours, raw = zip(*seconds, strict=True)
            ratios = [each / plain for each, plain in seconds]
            print(
                f"{millions} M parameters, buckets of {size} MiB: {spread(ours)} s, broadcast {spread(raw)} s, "
                f"ratio {spread(ratios)}"
            )


if __name__ == "__main__":
    main()
