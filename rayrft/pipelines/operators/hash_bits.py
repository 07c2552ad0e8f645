"""Bits of the hash of a word that tell its kind: it has a letter, or is a single ideograph."""

import numpy as np

LETTER, IDEOGRAPH = np.uint64(1), np.uint64(2)
