"""Words, n-grams and MinHash signatures of texts, computed on Arrow's memory: a million texts in about a minute.

A word is a run of letters and digits, a single ideograph, or a sign of a formula. Case, width (NFKC), punctuation and
white space do not count. A point between digits does, a comma between digits does not (1,000 is 1000). A minus, slash
or asterisk counts beside a digit or bracket, as in x - 1, though not in well-known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rayrft.registry import Lazy

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

PERMUTATIONS = 128
kernels: Any = Lazy("rayrft.pipelines.operators.hash_kernels")
"""The compiled loops: numba takes half a second to import in every process."""


def words(texts: pa.Array) -> tuple[U64, I64]:
    """Hash the words of texts. Return the hashes of all, and the offsets ``[texts + 1]`` of each text's in them. Of a
    hash, bit ``kernels.LETTER`` is set if the word has a letter, ``kernels.IDEOGRAPH`` if it is a single one."""
    plain = pc.utf8_lower(pc.utf8_normalize(pc.fill_null(texts, ""), "NFKC"))
    starts = np.append(0, np.cumsum(pc.utf8_length(plain), dtype=np.int64))
    data = plain.buffers()[2]  # of all texts, one after another
    codes = np.frombuffer(str(data or b"", "utf-8").encode("utf-32-le"), np.uint32)
    bounds = np.zeros(len(starts), np.int64)
    hashes = np.empty(len(codes), np.uint64)
    count = kernels.hash_words(codes, starts, hashes, bounds)
    return hashes[:count].copy(), bounds


def ngrams(hashes: U64, offsets: I64, length: int) -> tuple[U64, I64]:
    """Hash all n-grams of ``length`` words of each text, whose words and offsets these are; return them likewise. A
    text of fewer words has none."""
    bounds = _bounds(offsets, length)
    found = np.empty(int(bounds[-1]), np.uint64)
    kernels.hash_ngrams(hashes, offsets, length, bounds, found)
    return found, bounds


def count_words(hashes: U64, offsets: I64, length: int, kind: np.uint64) -> I64:
    """Count the words of a kind (``LETTER`` or ``IDEOGRAPH`` of the kernels) in each n-gram of `ngrams`."""
    counts = np.append(0, np.cumsum((hashes & kind) != 0))
    bounds = _bounds(offsets, length)
    starts = np.arange(bounds[-1]) + np.repeat(offsets[:-1] - bounds[:-1], np.diff(bounds))
    return counts[starts + length] - counts[starts]


def _bounds(offsets: I64, length: int) -> I64:
    """Return the offsets ``[texts + 1]`` of each text's n-grams."""
    return np.append(0, np.cumsum(np.maximum(np.diff(offsets) - length + 1, 0)))


def signatures(hashes: U64, offsets: I64, length: int, band_rows: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """MinHash the sets of n-grams (Broder 1997), of all its words for a text of fewer.

    Return the low byte of each of `PERMUTATIONS` minima ``[texts, PERMUTATIONS]`` (b-bit MinHash, Li and König 2010),
    and the keys of the bands of ``band_rows`` minima each ``[texts, PERMUTATIONS // band_rows]``. A text without words
    has the key 0 in all bands, and no other text has.
    """
    texts = len(offsets) - 1
    low = np.zeros((texts, PERMUTATIONS), np.uint8)
    keys = np.zeros((texts, PERMUTATIONS // band_rows), np.uint32)
    kernels.minhash(hashes, offsets, length, band_rows, _MULTIPLIERS, _ADDENDS, low, keys)
    return low, keys


def hash_numbers(hashes: U64, offsets: I64) -> U64:
    """Hash the words without a letter of each text together, ``[texts]``, in whatever order: its numbers and signs."""
    alone = hashes * np.uint64(0x2545F4914F6CDD1D) ^ (hashes >> np.uint64(17))
    sums = np.append(np.uint64(0), np.cumsum(np.where(hashes & kernels.LETTER, np.uint64(0), alone)))
    return sums[offsets[1:]] - sums[offsets[:-1]]


def band_rows(threshold: float) -> int:
    """Return how many minima a band may have so that two texts of this Jaccard similarity share a band with a
    probability of .999 or more: 1 - (1 - s^r)^b."""
    likely = (rows for rows in (16, 8, 4, 2) if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= 0.999)
    return next(likely, 1)


_RANDOM = np.random.default_rng(20260101)
_MULTIPLIERS = _RANDOM.integers(0, 1 << 64, PERMUTATIONS, np.uint64) | np.uint64(1)
_ADDENDS = _RANDOM.integers(0, 1 << 64, PERMUTATIONS, np.uint64)
