"""The durable log: what happened in a journal, rows in segments, on any file system."""
