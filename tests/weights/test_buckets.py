"""Buckets and digest: what is sent is what is read, and any change shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrft.weights.buckets import Digest, allocate, empty_bucket, fill_bucket, plan_buckets, read_bucket
from rayrft.weights.messages import TensorMeta

TENSORS = {
    "a": torch.arange(5, dtype=torch.float32),
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "c": torch.ones(3, dtype=torch.bfloat16),
    "d": torch.randn(40, 30, generator=torch.Generator().manual_seed(0)),
}
METAS = [TensorMeta.of(name, tensor, tensor.dtype) for name, tensor in TENSORS.items()]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_tensors_come_back_as_they_went_in_whatever_the_bucket_size(bucket_bytes: int) -> None:
    got: dict[str, torch.Tensor] = {}
    filled, whole, read = Digest(), Digest(), Digest()
    for bucket in plan_buckets(METAS, bucket_bytes):
        buffer = empty_bucket(bucket, allocate([bucket], "cpu")[0])
        fill_bucket(buffer, bucket, [TENSORS[meta.name] for meta in bucket], filled)
        whole.update(buffer)
        got |= dict(read_bucket(buffer, bucket, read))
    assert filled.value == read.value == whole.value
    assert list(got) == list(TENSORS)
    assert all(torch.equal(got[name], tensor) for name, tensor in TENSORS.items())


@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=30), limit=st.integers(16, 8192))
@settings(deadline=None)
def test_buckets_keep_the_order_and_respect_their_size(sizes: list[int], limit: int) -> None:
    metas = [TensorMeta(str(i), "float32", (size,)) for i, size in enumerate(sizes)]
    buckets = plan_buckets(metas, limit)
    assert [meta for bucket in buckets for meta in bucket] == metas
    assert all(len(bucket) == 1 or sum(meta.padded for meta in bucket) <= limit for bucket in buckets)


def test_weights_are_cast_to_what_the_engine_computes_in() -> None:
    meta = TensorMeta.of("w", torch.zeros(3), torch.bfloat16)
    buffer = empty_bucket([meta], allocate([[meta]], "cpu")[0])
    fill_bucket(buffer, [meta], [torch.tensor([1.0, 2.0, 3.14159])])
    [(_, tensor)] = read_bucket(buffer, [meta], Digest())
    assert tensor.dtype == torch.bfloat16 and tensor[0].item() == 1.0


def test_a_shape_that_was_not_announced_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a has shape \(4,\), announced as \(5,\)"):
        fill_bucket(empty_bucket(METAS[:1], allocate([METAS[:1]], "cpu")[0]), METAS[:1], [torch.zeros(4)])


def digest(*buffers: torch.Tensor) -> str:
    state = Digest()
    for buffer in buffers:
        state.update(buffer)
    return state.value


def test_order_of_words_and_of_buckets_counts() -> None:
    buffer = torch.arange(64, dtype=torch.uint8)
    for size in (4, 8):  # half a word, and a whole one
        moved = torch.cat([buffer[size : 2 * size], buffer[:size], buffer[2 * size :]])
        assert digest(buffer) != digest(moved)
    assert digest(buffer[:32], buffer[32:]) != digest(buffer[32:], buffer[:32])


def test_a_lost_bucket_of_zeros_shows() -> None:
    buffer, zeros = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    assert digest(buffer) != digest(buffer, zeros)


def factors() -> list[int]:
    return [
        (2 * 0x85EBCA6B * line + 1) * (2 * 0x9E3779B1 * place + 1) % 2**64
        for line in range(512)
        for place in range(1024)
    ]


def test_the_digest_is_the_sum_that_it_says_it_is_however_the_stream_is_cut() -> None:
    stream, of_words = torch.randint(0, 256, (8 * ((1 << 19) + 3000),), dtype=torch.uint8), factors()
    state, words = 0, stream.view(torch.int64).tolist()
    for chunk in (words[: 1 << 19], words[1 << 19 :]):
        total = sum(word * factor for word, factor in zip(chunk, of_words, strict=False))
        state = (state * 1_000_003 + total + len(chunk)) % 2**64
    whole, rest = 8 << 19, 8 * 3000
    for sizes in (
        [stream.numel()],
        [8, 56, stream.numel() - 64],
        [whole, rest],
        [whole - 8, 16, rest - 8],
        [8 << 10, 8, 8 << 11, stream.numel() - (24 << 10) - 8],
    ):
        assert digest(*stream.split(sizes)) == f"{state:016x}"


def test_no_two_places_have_one_factor_and_none_is_even() -> None:
    """A changed bit changes its word times its factor by an odd multiple of a power of two, wherever it is."""
    assert len({*factors()}) == 1 << 19 and all(factor % 2 for factor in factors())
