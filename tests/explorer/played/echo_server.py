"""An OpenEnv server that echoes what it is told, and counts: ``python -m tests.explorer.played.echo_server PORT``."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    text: str
    loud: bool = False


class Heard(Observation):
    echo: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Heard:
        self.count = 0
        return Heard(echo=f"{options.get('greeting', 'hello')} {seed is not None}", done=False, reward=None)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:  # type: ignore[override]
        self.count += 1
        echo = action.text.upper() if action.loud else action.text
        return Heard(echo=echo, done=self.count == 2, reward=float(len(echo)))

    @property
    def state(self) -> State:
        return State(step_count=self.count)


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=False)
