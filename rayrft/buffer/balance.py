"""Dealing rows to ranks so that each gets about the same number of tokens."""

from __future__ import annotations

import heapq


def balance(sizes: list[int], parts: int) -> list[list[int]]:
    """Partition items into ``parts`` lists of nearly equal total size, by the largest differencing method
    (Karmarkar and Karp 1982). Returns the indices of each part; deterministic.

    Where there are at least as many items as parts, no part is empty. Raises ValueError for fewer parts than one.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    # An entry is a partial partition, its parts sorted from largest to smallest; the two entries of the widest spread
    # are merged, large with small, until one is left.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, size in enumerate(sizes):
        heap.append((-size, index, [(size, [index])] + [(0, []) for _ in range(parts - 1)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    result = [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(parts)]
    return _fill_empty(result)


def _fill_empty(parts: list[list[int]]) -> list[list[int]]:
    """A part can stay empty beside one huge item: it gets an item of the part that has most."""
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            if len(donor) > 1:
                part.append(donor.pop())
    return parts
