"""Faults to be planted in a run by ``plugins``: each leaves the band of the recipe `spelling`."""
