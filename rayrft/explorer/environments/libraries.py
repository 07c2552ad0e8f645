"""Environments of other libraries: `verifiers`, played step by step with its dialogue and rubric and our model and
tokens; OpenEnv servers; and tasks of reasoning-gym, none of which is interactive by itself, tried until solved."""

from __future__ import annotations

import json
import uuid
from functools import cache
from typing import Any

from rayrft.data.episodes import ROW_FIELDS
from rayrft.data.reasoning import split_reasoning
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task, reaches
from rayrft.explorer.environments.base import Step, register_environment
from rayrft.registry import check_installed


@register_environment("verifiers")
class VerifiersEnvironment:
    """A ``MultiTurnEnv`` of chat, by the ``id`` that ``verifiers.load_environment`` takes with ``arguments``.

    The task's ``metadata`` is a row of its data set (task source ``verifiers``). The reward is that of its rubric, at
    the end of the dialogue, and each of the rubric's metrics is one of the row. An environment that calls tools by the
    API's tool calls, or that rewrites earlier messages, is refused. It lives in a process although its methods are
    coroutine functions, as those that users write call what blocks.
    """

    blocking = True

    def __init__(self, id: str, arguments: dict[str, Any] | None = None) -> None:
        self._environment = _load(id, json.dumps(arguments or {}))
        self._state: Any = None

    @staticmethod
    def check(id: str, arguments: dict[str, Any] | None = None) -> None:
        """Raise ConfigError unless `verifiers` and the environment's package are installed."""
        for module, remedy in [
            ("verifiers", "pip install 'rayrft[verifiers]'"),
            (id.replace("-", "_").split("/")[-1], "install the environment's package (prime env install …)"),
        ]:
            check_installed(module, remedy, ConfigError, "explorer.environment.options.id", id)

    @staticmethod
    def prepare(id: str, arguments: dict[str, Any] | None = None) -> None:
        """Load it, with its data, once for all processes."""
        _load(id, json.dumps(arguments or {}))

    async def reset(self, task: Task, seed: int) -> list[dict[str, str]]:
        row = {name: task.metadata[name] for name in ROW_FIELDS if name in task.metadata}
        if "prompt" not in row:
            problem = "the task does not come from a verifiers environment"
            raise DataError(problem, "take tasks of source verifiers", field="task", value=task.id)
        # The model is never called by the library, so that it needs no client.
        self._state = await self._environment.init_state(row, client=None, model="rayrft", sampling_args={})
        self._state = await self._environment.setup_state(self._state)
        self._prompt: list[dict[str, Any]] = await self._environment.get_prompt_messages(self._state)
        return _texts(self._prompt)

    async def step(self, action: str) -> Step:
        environment, state = self._environment, self._state
        await environment.add_model_response(state, self._prompt, _response(action))
        done = await environment.is_completed(state)
        observation: list[dict[str, str]] = []
        if not done:
            earlier = [*_texts(self._prompt), {"role": "assistant", "content": action}]
            self._prompt = await environment.get_prompt_messages(state)
            texts = _texts(self._prompt)
            if texts[: len(earlier)] != earlier:
                raise ValueError("the environment changes earlier messages, so that the dialogue is no single sequence")
            observation = texts[len(earlier) :]
            done = state.get("final_env_response") is not None and await environment.is_completed(state)
        if state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        if not done:
            return Step(observation)
        await environment.render_completion(state)
        await environment.rubric.score_rollout(state)
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Step(observation or "", reward=float(state["reward"]), done=True, info=metrics)

    async def close(self) -> None:
        if self._state is not None and not self._state["is_completed"]:
            await self._environment._cleanup(self._state)  # what is not played to its end holds resources, too


@cache
def _load(id: str, arguments: str) -> Any:
    """Load an environment. Raises ConfigError if it cannot be played."""
    import verifiers

    environment = verifiers.load_environment(id, **json.loads(arguments))
    field = "explorer.environment.options.id"
    if not isinstance(environment, verifiers.MultiTurnEnv) or environment.message_type != "chat":
        problem = f"is a {type(environment).__name__}, not a MultiTurnEnv of chat"
        raise ConfigError(problem, "choose another", field=field, value=id)
    if environment.oai_tools:
        problem = "calls tools by the API's tool calls, which are not played"
        raise ConfigError(problem, "choose another", field=field, value=id)
    return environment


def _texts(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    for message in messages:
        if not isinstance(message["content"], str):
            raise TypeError(f"a message of the environment is no text: {message!r}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _response(text: str) -> Any:
    """The model's answer as the library has it from an API."""
    from openai.types.chat import ChatCompletion

    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return ChatCompletion.model_validate(
        {"id": uuid.uuid4().hex, "object": "chat.completion", "created": 0, "model": "rayrft", "choices": [choice]}
    )


@register_environment("openenv")
class OpenEnvEnvironment:
    """A session with the OpenEnv server at ``url``, by the generic client: actions and observations are fields.

    The answer is the field ``action`` of an action with ``fixed`` other fields; without ``action``, it is the action as
    JSON, and another text does nothing and counts as metric ``invalid_actions``. ``observation`` names the field that
    is shown; by default all are, as JSON. A task's ``metadata["environment"]`` may have arguments of ``reset``.
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
        told = f"That is not right: it scores {score:.2f} of 1, your best answer {self._best:.2f}."
        return Step(f"{told} Attempts left: {self._left}.", earned, done=self._left == 0)

    def close(self) -> None:
        pass
