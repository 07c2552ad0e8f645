"""Operators that leave out rows which are there already, word for word or nearly."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from rayrft.pipelines.operator import Applied, Context, Operator, TextColumns, register_operator
from rayrft.pipelines.operators import hashing
from rayrft.pipelines.operators.clean import C, Columns
from rayrft.pipelines.rows import id_column

_REACH = 16
"""Earlier rows that a row is compared with, of those that share a band with it and not a group."""


class _FirstOfEach(Operator[C]):
    """Keeps the first row of each group of duplicates, in the order of the input; all rows are observed first."""

    kind = "clean"
    scope = "all"
    _what = "duplicate"

    def __init__(self, options: C, context: Context) -> None:
        super().__init__(options, context)
        self._ids: list[pa.Array] = []

    def observe(self, rows: pa.RecordBatch) -> None:
        self._ids.append(rows.column(id_column(rows.schema)))
        self._note([rows.column(name) for name in self.options.columns])

    def settle(self) -> None:
        self._root = self._roots()
        self._places = np.arange(len(self._root))
        self._names = pa.chunked_array(self._ids, pa.string())

    def apply(self, rows: pa.RecordBatch) -> Applied:
        here = self.take_next(self._places, rows)
        roots = self._root[here]
        reasons: list[str | None] = [None] * rows.num_rows
        for index in np.flatnonzero(roots != here).tolist():
            reasons[index] = f"{self._what}: of {self._names[int(roots[index])].as_py()}"
        return Applied(rows, reasons)

    def _note(self, columns: Sequence[pa.Array]) -> None:
        raise NotImplementedError

    def _roots(self) -> np.ndarray:
        """Return for each row the first that it is a duplicate of, or itself, as ``[rows]`` of int64."""
        raise NotImplementedError


@register_operator("exact_duplicates")
class ExactDuplicates(_FirstOfEach[Columns]):
    """Leave out rows whose texts are those of an earlier row, in all columns, but for white space at the ends.

    Memory: 16 bytes a row, and its id.
    """

    def __init__(self, options: Columns, context: Context) -> None:
        super().__init__(options, context)
        self._digests: list[bytes] = []

    def _note(self, columns: Sequence[pa.Array]) -> None:
        made = bytearray()
        for row in zip(*(column.to_pylist() for column in columns), strict=True):
            plain = repr(tuple(None if text is None else text.strip() for text in row))
            made += hashlib.blake2b(plain.encode(), digest_size=16).digest()
        self._digests.append(bytes(made))

    def _roots(self) -> np.ndarray:
        digests = np.frombuffer(b"".join(self._digests), "S16")
        _, first, group = np.unique(digests, return_index=True, return_inverse=True)
        return first[group]


class NearOptions(Columns):
    columns: TextColumns = Field(("question",), min_length=1)
    threshold: float = Field(0.6, gt=0, lt=1)
    """Jaccard similarity of the sets of n-grams from which two rows are duplicates. It is estimated with a standard
    error of 0.04 at most."""
    ngram: int = Field(3, ge=1)
    """Words of an n-gram."""
    same_numbers: bool = True
    """Only rows with the same numbers are duplicates: a problem with other numbers is another problem. Set it to false
    for prose and code, where a third of the duplicates of similarity .9 differ in a number."""


@register_operator("near_duplicates")
class NearDuplicates(_FirstOfEach[NearOptions]):
    """Leave out rows that are nearly an earlier one: MinHash of word n-grams with locality-sensitive hashing.

    Rows that are near to the same row, directly or over others, are one group. Memory: 256 bytes a row at most, and its
    id; half as much again while they are compared.
    """

    _what = "near duplicate"

    def __init__(self, options: NearOptions, context: Context) -> None:
        super().__init__(options, context)
        self._band_rows = hashing.band_rows(options.threshold)
        self._low = list[np.ndarray]()
        self._keys = list[np.ndarray]()

    def _note(self, columns: Sequence[pa.Array]) -> None:
        filled = [pc.fill_null(column.cast(pa.large_string()), "") for column in columns]
        words = hashing.words(pc.binary_join_element_wise(*filled, pa.scalar("\n", pa.large_string())))
        low, keys = hashing.signatures(*words, self.options.ngram, self._band_rows)
        if self.options.same_numbers:  # rows with other numbers share no key then
            numbers = (hashing.hash_numbers(*words) >> np.uint64(32)).astype(np.uint32)
            keys = np.where(keys == 0, keys, np.maximum(keys ^ numbers[:, None], 1))
        self._low.append(low)
        self._keys.append(keys)

    def _roots(self) -> np.ndarray:
        root = np.arange(sum(map(len, self._low)))
        if not len(root):
            return root
        low = np.concatenate(self._low)
        self._low.clear()
        # Of the low bytes of two signatures; others agree by chance once in 256.
        threshold = self.options.threshold
        needed = math.ceil(hashing.PERMUTATIONS * (threshold + (1 - threshold) / 256))
        for band in range(self._keys[0].shape[1]):
            keys = np.concatenate([part[:, band] for part in self._keys])
            hashing.kernels.link_near(np.argsort(keys, kind="stable"), keys, low, needed, root, _REACH)
        self._keys.clear()
        hashing.kernels.find_roots(root)
        return root
