"""The durable log: events in a journal, rows in segments, on any file system."""
