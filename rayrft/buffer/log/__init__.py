"""The durable log: events in a journal, rows in segments, in one folder."""
