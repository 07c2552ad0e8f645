"""Environments: what a workflow lets the model act in. Every attempt at a task has one of its own."""

from rayrft.explorer.environments import gymnasium, libraries  # noqa: F401  (they register their environments)
from rayrft.explorer.environments.base import (
    Environment,
    Observation,
    Pictured,
    Step,
    as_messages,
    images_of,
    register_environment,
)
from rayrft.explorer.environments.client import EnvironmentClient, Environments, check_environment

__all__ = [
    "Environment",
    "EnvironmentClient",
    "Environments",
    "Observation",
    "Pictured",
    "Step",
    "as_messages",
    "check_environment",
    "images_of",
    "register_environment",
]
