"""Trainer: FSDP2 updates by Ray Train on the batches that the Buffer leases."""
