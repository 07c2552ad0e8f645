"""Environments of other libraries: OpenEnv servers, and tasks of reasoning-gym, none of which is interactive by itself,
tried until solved."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from typing import TYPE_CHECKING, Any

from rayrft.data.reasoning import split_reasoning
from rayrft.errors import ConfigError, nearest
from rayrft.experience import Task, reaches
from rayrft.explorer.environments.base import Step, register_environment
from rayrft.registry import check_installed

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection


_TIMEOUT_S = 60.0
_PAUSE_S = 1.0
"""Seconds between two tries to open a session."""
_FULL = "CAPACITY_REACHED"
_NEEDS_MORE = re.compile(f"EXECUTION_ERROR|{_FULL}")
"""Errors with which a server that begins no episode now may still begin those of tasks."""


@register_environment("openenv")
class OpenEnvEnvironment:
    """A session with the OpenEnv server at ``url``, of `openenv` 0.2 to 0.10: actions and observations are fields.

    The answer is the field ``action`` of an action with ``fixed`` other fields; without ``action``, it is the action as
    JSON, and another text does nothing and counts as metric ``invalid_actions``. ``observation`` names the field that
    is shown; by default all are, as JSON. A task's ``metadata["environment"]`` may have arguments of ``reset``.

    ``reset`` tries for ``wait_s`` seconds to open a session: a server that restarts, or has no session free, costs no
    attempt that has not begun.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        fixed: dict[str, Any] | None = None,
        wait_s: float = 20.0,
    ) -> None:
        self._url, self._wait_s = url, wait_s
        self._socket: ClientConnection | None = None
        self._action, self._observation, self._fixed = action, observation, fixed or {}

    @staticmethod
    def check(
        url: str,
        action: str | None = None,
        observation: str | None = None,
        fixed: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Raise ConfigError unless a server at ``url`` begins an episode, and its actions and observations have the
        fields that are named."""
        extra, field = "pip install 'rayrft[openenv]'", "explorer.environment.options"
        check_installed("websockets", extra, ConfigError, "explorer.environment.name", "openenv")
        from websockets.exceptions import WebSocketException

        session, seen = OpenEnvEnvironment(url), dict[str, Any]()
        try:
            seen = session._ask("reset", {"seed": 0}, _TIMEOUT_S)["observation"]
        except (OSError, WebSocketException, RuntimeError, LookupError, TypeError, ValueError) as error:
            if not _NEEDS_MORE.search(str(error)):
                problem = f"no OpenEnv server begins an episode there: {type(error).__name__}: {error}"
                remedy = "start the server, or give the URL of one of openenv 0.2 to 0.10, which answers at /ws"
                raise ConfigError(problem, remedy, field=f"{field}.url", value=url) from None
        finally:
            session.close()
        if seen and observation is not None and observation not in seen:
            remedy = f"name one of {', '.join(seen)}"
            raise ConfigError("observations lack it", remedy, field=f"{field}.observation", value=observation)
        _check_action(url, action, fixed or {}, field)

    @staticmethod
    def prepare(**_: Any) -> None:
        """Import the client."""
        import websockets.sync.client  # noqa: F401

    def reset(self, task: Task, seed: int) -> str:
        from websockets.exceptions import WebSocketException

        until = time.monotonic() + self._wait_s
        while True:
            try:
                return self._told(self._ask("reset", {"seed": seed, **task.metadata.get("environment", {})}))
            except (OSError, WebSocketException, RuntimeError) as error:
                if isinstance(error, RuntimeError) and _FULL not in str(error):
                    raise
                self.close()
                if time.monotonic() >= until:
                    problem = f"{self._url} opens no session within {self._wait_s:g} s: {type(error).__name__}: {error}"
                    remedy = "start the server, let it have more sessions, or lower explorer.environment.processes"
                    raise ConnectionError(f"{problem}; {remedy}") from error
                time.sleep(_PAUSE_S)

    def step(self, action: str) -> Step:
        action = split_reasoning(action)[1]
        if self._action is not None:
            fields = {**self._fixed, self._action: action}
        else:
            try:
                fields = {**self._fixed, **json.loads(action)}
            except (ValueError, TypeError):
                return Step("That is not an action: answer with a JSON object.", info={"invalid_actions": 1})
        found = self._ask("step", fields)
        return Step(self._told(found), reward=float(found.get("reward") or 0.0), done=bool(found.get("done")))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, kind: str, data: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Send a message of the session, and return the data of the answer. Raises RuntimeError for an error there."""
        if self._socket is None:
            from websockets.sync.client import connect

            self._socket = connect(re.sub("^http", "ws", self._url.rstrip("/")) + "/ws", max_size=None)
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv(timeout_s))
        if answer["type"] != "observation":
            raise RuntimeError(f"the server answers {answer}")
        return answer["data"]

    def _told(self, found: dict[str, Any]) -> str:
        fields = found["observation"]
        text = fields if self._observation is None else fields[self._observation]
        return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _check_action(url: str, action: str | None, fixed: dict[str, Any], field: str) -> None:
    """Raise ConfigError unless the server's actions have these fields and need no other, as far as it shows them."""
    try:
        place = re.sub("^ws", "http", url.rstrip("/")) + "/schema"
        with urllib.request.urlopen(place, timeout=_TIMEOUT_S) as answer:
            shown = json.load(answer)["action"]
            fields, required = shown["properties"], shown.get("required", [])
    except (OSError, ValueError, LookupError, TypeError):
        return
    for key, names in ("action", [action] if action else []), ("fixed", [*fixed]):
        for name in names:
            if name not in fields and shown.get("additionalProperties") is False:
                raise ConfigError("actions lack it", nearest(name, fields), field=f"{field}.{key}", value=name)
    if action is not None and (lacking := [name for name in required if name not in (action, *fixed)]):
        problem, remedy = f"actions need {', '.join(lacking)}, too", "give them fixed values"
        raise ConfigError(problem, remedy, field=f"{field}.fixed", value=fixed)


@register_environment("reasoning_gym")
class ReasoningGymEnvironment:
    """The data set's verifier as a game: every action is an answer, and the observation says how good it was.

    An episode ends when an answer scores ``enough``, or after ``attempts``; its reward is the best score, paid as it
    improves. ``dataset`` names the data set of the tasks. An ``<answer>`` is taken from the text if it has one.
    """

    def __init__(self, dataset: str, attempts: int = 5, enough: float = 1.0) -> None:
        from reasoning_gym.factory import create_dataset

        # It is needed for its verifier alone.
        self._dataset = create_dataset(dataset, size=1, seed=0)
        self._attempts, self._enough = attempts, enough

    @staticmethod
    def prepare(**_: Any) -> None:
        """Import the data sets."""
        import reasoning_gym  # noqa: F401

    def reset(self, task: Task, seed: int) -> str:
        self._entry = {"question": task.question, "answer": task.answer, "metadata": task.metadata}
        self._left, self._best = self._attempts, 0.0
        return task.question

    def step(self, action: str) -> Step:
        from reasoning_gym.utils import extract_answer

        answer = split_reasoning(action)[1].strip()
        answer = extract_answer(answer) if "<answer>" in answer else answer
        score = float(self._dataset.score_answer(answer, self._entry))
        self._left -= 1
        earned = max(0.0, score - self._best)
        self._best = max(self._best, score)
        if reaches(score, self._enough):
            return Step("That is right.", earned, done=True, info={"solved": 1})
        text = f"That is not right: it scores {score:.2f} of 1, your best answer {self._best:.2f}."
        return Step(f"{text} Attempts left: {self._left}.", earned, done=self._left == 0)

    def close(self) -> None:
        pass
