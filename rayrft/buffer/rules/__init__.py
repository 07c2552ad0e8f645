"""What each event does to the state: one function an event."""

from rayrft.buffer.rules import admission, groups, leases
from rayrft.buffer.rules.rule import RULES

__all__ = ["RULES", "admission", "groups", "leases"]
