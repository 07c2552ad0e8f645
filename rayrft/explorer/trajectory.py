"""Trajectory builder for workflows: one growing token sequence, in which nothing is tokenised twice."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path

import numpy as np

from rayrft.config.auxiliary import require_auxiliary
from rayrft.data.chat_template import Tools
from rayrft.data.images import Picture, keep_image
from rayrft.data.tokenizer import ChatTokenizer, fills
from rayrft.experience import TOKEN_REWARD, Experience, Task, VersionSpan
from rayrft.explorer.engines.auxiliary import AuxiliaryModel
from rayrft.explorer.engines.exchange import Completion, Session
from rayrft.rewards import RewardResult, StepReward, Transcript

Generate = Callable[[list[int], int, tuple[str, ...], str, int], Awaitable[Completion]]
"""Sample one continuation, of at most so many tokens, of a sequence with placeholders for the images at the paths; it
follows the JSON schema, if that is not empty, and has so many alternatives to each token."""


ScoreAnswer = Callable[[Task, str], Awaitable[RewardResult]]
"""Score an answer to a task."""


class PromptTooLong(Exception):
    """A prompt exceeds ``explorer.sampling.max_prompt_tokens``: the attempt ends, and without an answer is dropped."""


class ContextFull(Exception):
    """The sequence cannot continue: it has reached ``model.max_length``, or an answer beside images has tokens that
    stand for images. The trajectory ends with stop reason ``length``."""


class Model:
    """The current model, for one attempt at a task. ``repeat`` numbers the attempts of a group from 0."""

    def __init__(
        self,
        generate: Generate,
        score: ScoreAnswer,
        tokenizer: ChatTokenizer,
        *,
        max_tokens: int,
        max_prompt_tokens: int,
        max_length: int,
        images: Path,
        repeat: int = 0,
        auxiliary: Mapping[str, AuxiliaryModel] | None = None,
        session: Session | None = None,
    ) -> None:
        """``images`` is the folder of pictures that are given without a path, ``session`` that of the requests."""
        self._generate = generate
        self._score = score
        self._session = session or Session()
        self._max_prompt_tokens = max_prompt_tokens
        self.max_tokens = max_tokens
        self.max_length = max_length
        self._images = images
        self._auxiliary = auxiliary or {}
        self.tokenizer = tokenizer
        self.repeat = repeat
        self.started: list[Trajectory] = []

    def start(self, messages: list[dict[str, str]], images: Sequence[Picture] = (), tools: Tools = ()) -> Trajectory:
        """Start a trajectory from messages, images, and the JSON schemas of the tools that the chat template is to
        show. Raises PromptTooLong, and DataError if the template rejects the messages."""
        if fills((message["content"] for message in messages), self._max_prompt_tokens):
            raise PromptTooLong(f"more than {self._max_prompt_tokens} tokens")
        paths = self.keep(images)
        prompt = self.tokenizer.prompt(messages, paths, tools)
        if len(prompt) > self._max_prompt_tokens:
            raise PromptTooLong(f"{len(prompt)} tokens, at most {self._max_prompt_tokens}")
        self.started.append(Trajectory(self, messages, paths, tools, prompt))
        return self.started[-1]

    def recorded(
        self,
        token_ids: Sequence[int],
        prompt_length: int,
        answers: Sequence[tuple[int, Completion]],
        messages: list[dict[str, str]],
        images: tuple[str, ...] = (),
    ) -> Trajectory:
        """Return a trajectory of answers that `generate` gave, by their start index, which was built elsewhere."""
        trajectory = Trajectory(self, messages, images, (), list(token_ids[:prompt_length]))
        trajectory.record(token_ids, answers)
        self.started.append(trajectory)
        return trajectory

    def queued(self) -> AbstractContextManager[None]:
        """Let the attempt's deadline stand still meanwhile, as where it waits for its turn."""
        return self._session.queued()

    def keep(self, images: Sequence[Picture]) -> tuple[str, ...]:
        """Return the paths of pictures; those that have none are written to the run's folder first."""
        return tuple(keep_image(image, self._images) for image in images)

    async def score(self, task: Task, response: str) -> RewardResult:
        """Score an answer by the run's reward, for workflows that act on it."""
        return await self._score(task, response)

    def auxiliary(self, name: str) -> AuxiliaryModel:
        """Return an auxiliary model of the config by its name. Raises ConfigError if there is none."""
        require_auxiliary([name], self._auxiliary)
        return self._auxiliary[name]

    async def generate(
        self,
        token_ids: Sequence[int],
        images: tuple[str, ...] = (),
        max_tokens: int | None = None,
        json_schema: str = "",
        alternatives: int = 0,
    ) -> Completion:
        """Continue a token sequence by at most ``max_tokens``, by default ``explorer.sampling.max_tokens``. What
        follows a ``json_schema`` is not sampled as the run samples, and is not to be trained. ``alternatives`` is the
        number of most probable tokens to return per token.

        Raises ContextFull, RequestRefused if the engine rejects the request, and ActorDied.
        """
        token_ids = list(token_ids)  # what the caller does with its list changes nothing of the call
        room = self.max_length - len(token_ids)
        if room <= 0:
            raise ContextFull(f"{len(token_ids)} tokens, at most {self.max_length} with the answer")
        most = min(max_tokens or self.max_tokens, room)
        return await self._generate(token_ids, most, images, json_schema, alternatives)


class Trajectory:
    """One attempt in progress, made by `Model.start`: ``messages`` so far, and ``stop_reason`` of the last answer."""

    def __init__(
        self, model: Model, messages: list[dict[str, str]], images: tuple[str, ...], tools: Tools, prompt: list[int]
    ) -> None:
        self._model = model
        self._tools = tools
        self._ids = list(prompt)
        self._prompt_length = len(prompt)
        self._actions: list[tuple[int, Completion]] = []
        """Start index and completion of every answer."""
        self._metrics: dict[str, float] = {}
        self._started = time.time()
        self._answered, self._seen = 0, 0
        """Numbers of messages and of images up to the last answer."""
        self.messages = list(messages)
        self.images = images
        self.stop_reason: str | None = None
        self.result: RewardResult | None = None
        """The reward that the workflow has set."""

    async def act(self, max_tokens: int | None = None) -> str:
        """Sample the model's next answer and return its whole text. Raises the errors of `Model.generate`."""
        images = self.images and self._actions
        try:
            if images and self._model.tokenizer.images.token_id in self._actions[-1][1].token_ids:
                raise ContextFull("the last answer has tokens that stand for images, which no prompt can contain")
            completion = await self._model.generate(self._ids, self.images, max_tokens)
        except ContextFull:
            self.end_for_length()
            raise
        text = self._model.tokenizer.answer(completion.token_ids)
        self._actions.append((len(self._ids), completion))
        self._ids += completion.token_ids
        self.stop_reason = completion.stop_reason
        self.messages.append({"role": "assistant", "content": text})
        self._answered, self._seen = len(self.messages), len(self.images)
        return text

    def observe(self, observation: str | list[dict[str, str]], images: Sequence[Picture] = ()) -> None:
        """Append an observation, one user message or several messages, with further images, which stand where these
        say ``<image>``, else before the first text of the user; its tokens are masked.

        Raises DataError if the chat template cannot place the messages after the answer, and ContextFull for a text
        that is too long for the context whatever its tokens are.
        """
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        if fills((message["content"] for message in messages), self._model.max_length):
            self.end_for_length()
            raise ContextFull(f"an observation of more than {self._model.max_length} tokens")
        paths = self._model.keep(images)
        last = self._ids[-1]
        self._ids += self._model.tokenizer.observation(self.messages, messages, paths, self._tools, last=last)
        self.messages += messages
        self.images += paths

    def record(self, token_ids: Sequence[int], answers: Sequence[tuple[int, Completion]]) -> None:
        """Take tokens and answers for what has been acted and observed; all messages are said."""
        self._ids, self._actions = list(token_ids), list(answers)
        self._answered, self._seen = len(self.messages), len(self.images)
        self.stop_reason = answers[-1][1].stop_reason

    def reward(self, value: float | RewardResult, components: dict[str, float] | None = None) -> None:
        """Set the reward of the trajectory, which may be an unknown result; without one, the run's reward scores it."""
        self.result = value if isinstance(value, RewardResult) else RewardResult(float(value), components or {})

    def step_reward(self, value: float, state: float | None = None) -> None:
        """Set the reward of the last answer alone and a key of the state before it (equal states, equal keys), for
        step-level advantages (see `rayrft.data.turns.Turns`)."""
        if not math.isfinite(value) or (state is not None and not math.isfinite(state)):
            raise ValueError(f"the reward of a step, and its state, are finite numbers, not {value} and {state}")
        step = len(self._actions) - 1
        self._metrics[f"turn_reward_{step}"] = float(value)
        if state is not None:
            self._metrics[f"turn_state_{step}"] = float(state)

    def count(self, name: str, by: float = 1.0) -> None:
        """Add to a metric of the row."""
        self._metrics[name] = self._metrics.get(name, 0.0) + by

    def end_for_length(self) -> None:
        """Mark the trajectory as truncated because the context is full."""
        self.stop_reason = "length"

    def step_rewards_by_token(self, steps: Sequence[StepReward]) -> dict[str, float]:
        """Return a row's metrics of rewards of steps inside answers: each is at the token where its step ends; several
        are summed. Raises ValueError if the text of an answer is not what its tokens say."""
        found, said, tokenizer = dict[str, float](), self.transcript.answers, self._model.tokenizer
        for turn, group in groupby(steps, key=lambda step: step.turn):
            (start, completion), of_turn = self._actions[turn], list(group)
            opening = tokenizer.template.opening() if said[turn] == tokenizer.answer(completion.token_ids) else ""
            ends = [max(0, step.end - len(opening)) for step in of_turn]
            places = tokenizer.tokens_at(completion.token_ids, said[turn].removeprefix(opening), ends)
            for place, step in zip(places, of_turn, strict=True):
                name = f"{TOKEN_REWARD}{start + place}"
                found[name] = found.get(name, 0.0) + step.value
        return found

    @property
    def answers(self) -> int:
        """Number of the model's answers."""
        return len(self._actions)

    def prompted(self) -> Iterator[tuple[list[int], Completion]]:
        """Yield every answer with the tokens before it."""
        for start, completion in self._actions:
            yield self._ids[:start], completion

    @property
    def transcript(self) -> Transcript:
        """The conversation up to the last answer."""
        turns = tuple(self.messages[: self._answered])
        given = [turn["role"] for turn in turns].count("assistant") - len(self._actions)
        ids = tuple(self._ids[self._prompt_length : self._end])
        return Transcript(turns, self.images[: self._seen], self.stop_reason, max(0, given), ids)

    @property
    def _end(self) -> int:
        """The number of tokens up to the end of the last answer; 0 without one."""
        return self._actions[-1][0] + len(self._actions[-1][1].token_ids) if self._actions else 0

    def to_experience(self, experience_id: str, group_id: str, task: Task) -> Experience:
        """Build the row up to the end of the last answer. Arrays are [tokens]; the action mask is 1 on answers."""
        end = self._end
        mask, logprobs, versions = action_columns(self._actions, end)
        return _UNFILLED.with_fields(
            experience_id=experience_id,
            group_id=group_id,
            task_id=task.id,
            token_ids=np.array(self._ids[:end], np.int32),
            prompt_length=self._prompt_length,
            action_mask=mask,
            logprobs=logprobs,
            weight_versions=versions,
            reward=None if self.result is None else math.nan if self.result.value is None else self.result.value,
            stop_reason=self.stop_reason,
            turns=tuple(self.messages[: self._answered]),
            images=self.images[: self._seen],
            metrics=self._metrics,
            reward_components={},
            labels={},
            created_at=self._started,
            finished_at=time.time(),
        )


_UNFILLED = Experience("", "", "", np.zeros(0), 0, np.zeros(0), np.zeros(0))
"""Copying it takes a third of the time in which a row is made from its fields."""


def action_columns(
    answers: Sequence[tuple[int, Completion]], length: int
) -> tuple[np.ndarray, np.ndarray, tuple[VersionSpan, ...]]:
    """Return ``[length]`` action mask and log-probs, and the versions of answers, each from its start index on."""
    mask, logprobs, versions = np.zeros(length, np.uint8), np.zeros(length, np.float32), list[VersionSpan]()
    for start, completion in answers:
        stop = start + len(completion.token_ids)
        mask[start:stop] = 1
        logprobs[start:stop] = completion.logprobs
        versions += [VersionSpan(start + first, start + last, version) for first, last, version in completion.versions]
    return mask, logprobs, tuple(versions)
