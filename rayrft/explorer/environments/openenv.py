"""Environments on OpenEnv servers."""

from __future__ import annotations

import json
from typing import Any

from rayrft.data.reasoning import split_reasoning
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.environments.base import Step, register_environment
from rayrft.registry import check_installed


@register_environment("openenv")
class OpenEnvEnvironment:
    """A session with the OpenEnv server at ``url``, by the generic client: actions and observations are fields.

    The answer is the field ``action`` of an action, whose ``fixed`` fields are always the same; without ``action``, the
    answer is the action as JSON, and another text does nothing and counts as metric ``invalid_actions``.
    ``observation`` names the field that is shown; without it all are, as JSON. A task may have arguments of ``reset``
    in ``metadata["environment"]``.
    """

    def __init__(
        self, url: str, action: str | None = None, observation: str | None = None, fixed: dict[str, Any] | None = None
    ) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url)
        self._action, self._observation, self._fixed = action, observation, fixed or {}

    @staticmethod
    def check(url: str, **_: Any) -> None:
        """Raise ConfigError unless the client is installed."""
        extra = "pip install 'rayrft[openenv]'"
        check_installed("openenv", extra, ConfigError, "explorer.environment.name", "openenv")

    @staticmethod
    def prepare(**_: Any) -> None:
        """Import the client."""
        import openenv.core  # noqa: F401

    def reset(self, task: Task, seed: int) -> str:
        return self._told(self._client.reset(seed=seed, **task.metadata.get("environment", {})).observation)

    def step(self, action: str) -> Step:
        action = split_reasoning(action)[1]
        if self._action is not None:
            fields = {**self._fixed, self._action: action}
        else:
            try:
                fields = {**self._fixed, **json.loads(action)}
            except (ValueError, TypeError):
                return Step("That is no action: answer with a JSON object.", info={"invalid_actions": 1})
        result = self._client.step(fields)
        return Step(self._told(result.observation), reward=float(result.reward or 0.0), done=bool(result.done))

    def close(self) -> None:
        self._client.close()

    def _told(self, observation: dict[str, Any]) -> str:
        told = observation if self._observation is None else observation[self._observation]
        return told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
