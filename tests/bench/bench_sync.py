"""A weight transfer beside a plain broadcast of the same bytes, over gloo, between two processes in one run.

The transfer casts float32 parameters to bfloat16, fills buckets, digests them at both ends and copies every tensor into
the receiver's model, which holds bfloat16; the broadcast sends one buffer of as many bytes. Seconds from the sender's
begin to the receiver's end, and processor seconds of all processes, which a busy machine changes less. Several senders
hold shards, which they gather.
"""

from __future__ import annotations

import math
import time
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from rayrft.weights.messages import Parcel, TensorMeta
from tests.bench.helpers import parse, spread
from tests.trainer.ranks import on_ranks
from tests.weights.transfers import assert_arrived, carry, counted, open_channel, transfer

_LAYER = {
    "self_attn.q_proj": (2048, 1024),
    "self_attn.k_proj": (1024, 1024),
    "self_attn.v_proj": (1024, 1024),
    "self_attn.o_proj": (1024, 2048),
    "mlp.gate_proj": (3072, 1024),
    "mlp.up_proj": (3072, 1024),
    "mlp.down_proj": (1024, 3072),
    "input_layernorm": (1024,),
    "post_attention_layernorm": (1024,),
}
"""The weights of a layer of Qwen3-0.6B, of which the models are made."""


def _transfers(
    parameters: int, bucket_mib: int, rounds: int
) -> tuple[list[list[float]], list[list[float]], list[dict[str, float]]]:
    """Return the seconds of each round, of the transfer and of the broadcast; so many processor seconds; and of every
    process the bytes that it moved, of those of the weights."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    numbers = sum(map(math.prod, _LAYER.values()))
    metas = [
        TensorMeta(f"layers.{layer}.{name}.weight", "bfloat16", shape)
        for layer in range(max(1, round(parameters / numbers)))
        for name, shape in _LAYER.items()
    ]
    parcel, mesh = Parcel(metas, bucket_mib << 20), DeviceMesh("cpu", list(range(last)))
    weights: dict[str, Tensor] = {}
    for meta in metas:
        weights[meta.name] = torch.zeros(meta.shape, dtype=torch.bfloat16 if rank == last else torch.float32)
        if rank < last > 1:
            weights[meta.name] = distribute_tensor(torch.randn(meta.shape), mesh, [Shard(0)], src_data_rank=None)
    channel = open_channel()
    with counted() as counts:
        counts["loaded"] = transfer(channel, 0, parcel, weights)
    moved: list[dict[str, int]] = [{}] * (last + 1)
    dist.all_gather_object(moved, dict(counts))

    flat = torch.zeros(parcel.nbytes, dtype=torch.uint8)
    group = dist.new_group([0, last])
    seconds, processors = torch.zeros(2, rounds, 2, dtype=torch.float64)
    for number in range(rounds):
        works = lambda number=number: carry(channel, 1 + number, parcel, weights)[1], lambda: _broadcast(flat, group)
        for which, work in enumerate(works):
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            digest = work()
            processors[number, which] = time.process_time() - used
            dist.barrier()
            seconds[number, which] = time.perf_counter() - started
            assert_arrived(digest)
    channel.close()
    dist.all_reduce(processors)
    return (
        seconds.tolist(),
        processors.tolist(),
        [{name: each[name] / parcel.nbytes for name in sorted(each)} for each in moved],
    )


def _broadcast(flat: Tensor, group: dist.ProcessGroup) -> str:
    if dist.get_rank() in (0, dist.get_world_size() - 1):
        dist.broadcast(flat, 0, group=group)
    return ""


def main() -> None:
    options = parse(__doc__, millions=[62, 600], bucket_mib=[32], senders=[1], rounds=7)
    for millions, size, senders in product(options.millions, options.bucket_mib, options.senders):
        seconds, processors, moved = on_ranks(senders + 1, _transfers, int(millions * 1e6), size, options.rounds)
        print(f"{millions} M parameters, buckets of {size} MiB, senders {senders}:")
        for what, rounds in (("seconds", seconds), ("processor seconds", processors)):
            ours, raw = zip(*rounds, strict=True)
            ratios = [each / plain for each, plain in rounds]
            print(f"  {what}: {spread(ours)}, broadcast {spread(raw)}, ratio {spread(ratios)}")
        for who, counts in zip([*(f"sender {number}" for number in range(senders)), "receiver"], moved, strict=True):
            shares = ", ".join(f"{name} {share:.3g}" for name, share in counts.items())
            print(f"  {who}, times the bytes of the weights: {shares}")


if __name__ == "__main__":
    main()
