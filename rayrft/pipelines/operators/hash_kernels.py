"""The loops of `hashing`, compiled by numba. Arrays are changed in place."""

from __future__ import annotations

import numpy as np
from numba import njit

LETTER, IDEOGRAPH = np.uint64(1), np.uint64(2)
"""Bits of the hash of a word that tell its kind: it has a letter, or is a single ideograph."""
_PLAIN = ~(LETTER | IDEOGRAPH)
_SECOND = np.uint64(0x9E3779B97F4A7C15)
_PRIME = np.uint64(0x100000001B3)
_BASIS = np.uint64(0xCBF29CE484222325)


@njit(cache=True, nogil=True)
def _mixed(value):  # type: ignore[no-untyped-def]  # splitmix64
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def _kind_of(code):  # type: ignore[no-untyped-def]
    """Return 0 for what separates words, 1 for a letter or digit, 2 for a word by itself, 3 for - / *, 4 for . ,"""
    if code < 128:
        if 48 <= code <= 57 or 97 <= code <= 122 or 65 <= code <= 90:
            return 1
        if code in (43, 60, 61, 62, 94):  # + < = > ^
            return 2
        if code in (45, 47, 42):
            return 3
        return 4 if code in (44, 46) else 0
    if code in (0xD7, 0xF7):
        return 2
    if code < 0xC0:
        return 1 if code in (0xAA, 0xB5, 0xBA) else 0
    if 0x2000 <= code <= 0x206F or 0x3000 <= code <= 0x303F or 0xFE30 <= code <= 0xFE6F or 0xFF00 <= code <= 0xFF0F:
        return 3 if code == 0x2212 else 0
    if 0x2190 <= code <= 0x22FF or 0x3040 <= code <= 0x30FF or 0x3400 <= code <= 0x9FFF:
        return 2
    if 0xAC00 <= code <= 0xD7A3 or 0xF900 <= code <= 0xFAFF or code >= 0x20000:
        return 2
    return 1


@njit(cache=True, nogil=True)
def hash_words(codes, starts, hashes, bounds):  # type: ignore[no-untyped-def]
    count = 0
    for text in range(len(starts) - 1):
        end = starts[text + 1]
        current, inside, last_digit, after, lettered = _BASIS, False, False, False, np.uint64(0)
        for at in range(starts[text], end):
            code = np.int64(codes[at])
            kind = _kind_of(code)
            follows = codes[at + 1] if at + 1 < end else np.uint32(0)
            if kind == 4 and last_digit and 48 <= follows <= 57:
                if code == 46:
                    current = (current ^ np.uint64(46)) * _PRIME
                continue
            if kind == 3:
                beyond = codes[at + 2] if follows == 32 and at + 2 < end else follows
                kind = 2 if after or 48 <= beyond <= 57 or beyond == 92 or beyond == 40 else 0
            if kind == 1:
                current, inside = (current ^ np.uint64(code)) * _PRIME, True
                if code > 57:
                    lettered = LETTER
            else:
                if inside:
                    hashes[count] = (_mixed(current) & _PLAIN) | lettered
                    count += 1
                    current, inside, lettered = _BASIS, False, np.uint64(0)
                if kind == 2:
                    sign = code < 0x2300 or code == 0xD7 or code == 0xF7
                    mark = np.uint64(0) if sign else LETTER | IDEOGRAPH
                    hashes[count] = (_mixed((_BASIS ^ np.uint64(code)) * _PRIME) & _PLAIN) | mark
                    count += 1
            last_digit = bool(48 <= code <= 57)
            if code != 32:
                after = bool(last_digit or code == 41 or code == 125 or code == 93)
        if inside:
            hashes[count] = (_mixed(current) & _PLAIN) | lettered
            count += 1
        bounds[text + 1] = count
    return count


@njit(cache=True, nogil=True)
def _joined(hashes, start, end):  # type: ignore[no-untyped-def]
    value = _SECOND
    for at in range(start, end):
        value = _mixed(value * _PRIME + hashes[at])
    return value


@njit(cache=True, nogil=True)
def hash_ngrams(hashes, offsets, length, bounds, found):  # type: ignore[no-untyped-def]
    for text in range(len(offsets) - 1):
        for place in range(bounds[text + 1] - bounds[text]):
            start = offsets[text] + place
            found[bounds[text] + place] = _joined(hashes, start, start + length)


@njit(cache=True, nogil=True)
def minhash(hashes, offsets, length, band_rows, multipliers, addends, low, keys):  # type: ignore[no-untyped-def]
    minima = np.empty(len(multipliers), np.uint64)
    for text in range(len(offsets) - 1):
        size = offsets[text + 1] - offsets[text]
        if size == 0:
            continue
        minima[:] = np.uint64(0xFFFFFFFFFFFFFFFF)
        for place in range(max(size - length + 1, 1)):
            start = offsets[text] + place
            gram = _joined(hashes, start, start + min(length, size))
            for number in range(len(multipliers)):
                value = (gram * multipliers[number] + addends[number]) >> np.uint64(32)
                minima[number] = min(minima[number], value)
        low[text] = minima.astype(np.uint8)
        for band in range(len(multipliers) // band_rows):
            key = np.uint32(_joined(minima, band * band_rows, (band + 1) * band_rows) >> np.uint64(32))
            keys[text, band] = key if key else np.uint32(1)


@njit(cache=True, nogil=True)
def link_near(order, keys, low, needed, root, reach):  # type: ignore[no-untyped-def]
    """Unite texts that share this band's key and agree in at least ``needed`` bytes; ``root`` ``[texts]`` names the
    earliest text that each is united with, directly or over others, once `find_roots` has followed it.

    order: indices by key, and by place where keys are equal. Each text is compared with the first ``reach`` texts of
    its key that were not united with an earlier one, so that a key which many share takes no more than linear time.
    """
    seen = np.empty(reach, np.int64)
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and keys[order[end]] == keys[order[start]]:
            end += 1
        if keys[order[start]] != 0 and end - start > 1:
            count = 0
            for place in range(start, end):
                text = order[place]
                for other in range(count):
                    one, two = _find(root, text), _find(root, seen[other])
                    if one == two:
                        break
                    agree = 0
                    for number in range(low.shape[1]):
                        agree += low[text, number] == low[seen[other], number]
                    if agree >= needed:
                        root[max(one, two)] = min(one, two)
                        break
                else:
                    if count < reach:
                        seen[count] = text
                        count += 1
        start = end


@njit(cache=True, nogil=True)
def _find(root, text):  # type: ignore[no-untyped-def]
    while root[text] != text:
        root[text] = root[root[text]]
        text = root[text]
    return text


@njit(cache=True, nogil=True)
def find_roots(root):  # type: ignore[no-untyped-def]
    """Make each text's root the last one that it leads to."""
    for text in range(len(root)):
        root[text] = _find(root, text)
