"""Workflows: how a task is acted on. A workflow turns a task into trajectories; their rewards come afterwards."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Experience, Task, VersionSpan
from rayrft.explorer.engine import Completion, Sampling
from rayrft.explorer.router import Router
from rayrft.registry import Registry


class PromptTooLong(Exception):
    """A prompt exceeds ``explorer.sampling.max_prompt_tokens``: the task is dropped and counted."""


@dataclass(frozen=True)
class Answer:
    """One answer with the prompt it continues; token ids are those the engine saw and gave."""

    prompt: list[int]
    completion: Completion
    text: str


class ModelClient:
    """The current model as a workflow sees it: token ids in, token ids and log-probs out, nothing re-tokenised."""

    def __init__(self, router: Router, tokenizer: ChatTokenizer, sampling: Sampling, *, max_prompt_tokens: int) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._max_prompt_tokens = max_prompt_tokens
        self._calls = 0

    async def chat(self, messages: list[dict[str, str]], n: int = 1, images: tuple[str, ...] = ()) -> list[Answer]:
        """``n`` answers to a conversation about images. Raises PromptTooLong."""
        return await self.generate(self._tokenizer.prompt(messages, images), n, images)

    async def generate(self, prompt: list[int], n: int = 1, images: tuple[str, ...] = ()) -> list[Answer]:
        """``n`` continuations of a token sequence, in which each image has as many placeholders as the model makes of
        it. Raises PromptTooLong."""
        if len(prompt) > self._max_prompt_tokens:
            raise PromptTooLong(f"{len(prompt)} tokens, at most {self._max_prompt_tokens}")
        completions = await self._router.generate(prompt, n, self._next(), images)
        return [Answer(prompt, each, self._tokenizer.decode(list(each.token_ids))) for each in completions]

    def _next(self) -> Sampling:
        """A workflow that asks the same twice gets two answers."""
        self._calls += 1
        if self._sampling.seed is None:
            return self._sampling
        return replace(self._sampling, seed=derive_seed(self._sampling.seed, str(self._calls)))


def derive_seed(seed: int, name: str) -> int:
    """A seed of its own for whatever has that name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little") >> 1


class Workflow(Protocol):
    """Acts on a task ``n`` times. Rows without a reward are scored on their last turn afterwards; what is known of each
    turn by itself is in the rows' ``metrics``, see `rayrft.data.turns.Turns`."""

    async def run(self, task: Task, model: ModelClient, group_id: str, n: int) -> list[Experience]: ...


workflows: Registry[type[Workflow]] = Registry("workflow")
register_workflow = workflows.register


@register_workflow("single_turn")
class SingleTurn:
    """One question, one answer."""

    async def run(self, task: Task, model: ModelClient, group_id: str, n: int) -> list[Experience]:
        started = time.time()
        answers = await model.chat(task.messages, n, task.images)
        return [
            to_experience(task, answer, f"{group_id}/{repeat}", group_id, started)
            for repeat, answer in enumerate(answers)
        ]


def to_experience(task: Task, answer: Answer, experience_id: str, group_id: str, started: float) -> Experience:
    """An answer as a row: prompt masked out, behaviour log-probs and version spans at their places."""
    prompt, completion = answer.prompt, answer.completion
    length = len(prompt) + len(completion.token_ids)
    mask = np.zeros(length, dtype=np.uint8)
    mask[len(prompt) :] = 1
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[len(prompt) :] = completion.logprobs
    return Experience(
        experience_id=experience_id,
        group_id=group_id,
        task_id=task.id,
        token_ids=np.array([*prompt, *completion.token_ids], dtype=np.int32),
        prompt_length=len(prompt),
        action_mask=mask,
        logprobs=logprobs,
        weight_versions=tuple(
            VersionSpan(len(prompt) + start, len(prompt) + end, version) for start, end, version in completion.versions
        ),
        stop_reason=completion.stop_reason,
        turns=(*task.messages, {"role": "assistant", "content": answer.text}),
        images=task.images,
        created_at=started,
        finished_at=time.time(),
    )
