"""RFT-core: places, starts, paces and supervises the actors of a run."""
