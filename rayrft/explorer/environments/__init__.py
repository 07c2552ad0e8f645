"""Environments: what a workflow lets the model act in. Every attempt at a task has one of its own."""

from rayrft.explorer.environments import gymnasium, openenv, reasoning_gym, verifiers
from rayrft.explorer.environments.base import (
    Environment,
    Observation,
    Step,
    as_messages,
    environment_factory,
    environments,
    register_environment,
)
from rayrft.explorer.environments.client import EnvironmentClient, Environments

__all__ = [
    "Environment",
    "EnvironmentClient",
    "Environments",
    "Observation",
    "Step",
    "as_messages",
    "environment_factory",
    "environments",
    "gymnasium",
    "openenv",
    "reasoning_gym",
    "register_environment",
    "verifiers",
]
