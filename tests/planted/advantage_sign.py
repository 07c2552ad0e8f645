"""Advantages have the wrong sign: answers that are better than their group become rarer."""

from rayrft.algorithms import Algorithm

right = Algorithm.group_advantages
Algorithm.group_advantages = lambda self, rewards, group: -right(self, rewards, group)  # type: ignore[method-assign]
