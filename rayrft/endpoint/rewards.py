"""Rewards over HTTP, for training elsewhere: requests and replies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, Self

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

from rayrft.config.serve import RewardServiceConfig
from rayrft.experience import Task
from rayrft.rewards.base import RewardResult, Transcript
from rayrft.rewards.scorer import DomainStats, Rewards
from rayrft.rewards.service import RewardService, ServeBackend
from rayrft.runtime.serving.http import ApiError, HttpService, Route, parse, unless_gone


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RewardMessage(_Body):
    role: str
    content: str


class ScoredTask(_Body):
    """The task of an answer: its prompt, or the messages that led to the answer, and the reference answer."""

    prompt: str | None = None
    messages: list[RewardMessage] = Field(default_factory=list, max_length=4096)
    answer: str
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _question(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


class ScoreRequest(_Body):
    """The body of ``/v1/score``, or an entry of the list that it is."""

    domain: str = ""
    task: ScoredTask
    response: str | None = None
    messages: list[RewardMessage] = Field(default_factory=list, max_length=4096)
    """The whole conversation instead of ``response``, for rewards that see it. All of the assistant's messages are the
    model's, except for a beginning that equals the task's ``messages``."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        if (self.response is None) == (not self.messages):
            raise ValueError("give either response or messages")
        if self.messages and self.messages[-1].role != "assistant":
            raise ValueError("the last message must be the assistant's")
        return self

    def question(self) -> Task:
        """Return the task."""
        turns = self.task.messages
        asked = self.task.prompt if self.task.prompt is not None else turns[-1].content
        system = next((turn.content for turn in turns if turn.role == "system"), None)
        more = {"domain": self.domain, "system": system, "metadata": self.task.metadata}
        return Task.create("http", asked, self.task.answer, **more)

    def transcript(self) -> Transcript:
        """Return the conversation, in which a ``response`` is the only answer of the model."""
        asked = self.task.messages
        given = sum(turn.role == "assistant" for turn in asked)
        if self.response is None:
            begun = self.messages[: len(asked)] == asked
            return Transcript(tuple(turn.model_dump() for turn in self.messages), given=given if begun else 0)
        if not asked:
            return Transcript.of(self.question(), self.response)
        before = tuple(turn.model_dump() for turn in asked)
        return Transcript((*before, {"role": "assistant", "content": self.response}), given=given)


class ScoreRequests(RootModel[list[ScoreRequest]]):
    """Several at a time."""

    root: list[ScoreRequest] = Field(min_length=1, max_length=1024)


class RewardEndpoint(HttpService):
    """The API over a pool of rewards."""

    def __init__(self, config: RewardServiceConfig, key_digests: tuple[str, ...], pool: Rewards, version: str) -> None:
        super().__init__(config.serve, key_digests)
        self._reward, self._pool, self._version = config.reward, pool, version
        self._totals: dict[str, DomainStats] = {}

    def routes(self) -> Iterator[Route]:
        yield "POST", "/v1/score", self._score, True
        yield "GET", "/v1/stats", self._stats, False

    async def _score(self, request: Request) -> Response:
        body = await self.body(request)
        several = body.lstrip().startswith(b"[")
        asked = parse(ScoreRequests, body).root if several else [parse(ScoreRequest, body)]
        for number, each in enumerate(asked):
            if self._reward.domains and each.domain not in self._reward.domains:
                remedy = f"No reward scores domain {each.domain!r}; known: {', '.join(sorted(self._reward.domains))}."
                raise ApiError(404, remedy, code="domain_not_found", param=f"{number}.domain" if several else "domain")
        async with asyncio.timeout(self._config.deadline_s):
            results = await unless_gone(request, self._results(asked))
        replies = [self._reply(each, result) for each, result in zip(asked, results, strict=True)]
        if several:
            return JSONResponse({"object": "list", "version": self._version, "data": replies})
        return JSONResponse(replies[0])

    async def _results(self, asked: list[ScoreRequest]) -> list[RewardResult]:
        """Score answers concurrently; successive answers to one question share a call."""
        calls = [
            (each.question(), [one.transcript() for one in (each, *rest)])
            for _, (each, *rest) in groupby(asked, key=lambda each: (each.domain, each.task))
        ]
        found = await asyncio.gather(*(self._pool.score(task, transcripts) for task, transcripts in calls))
        return [result for results in found for result in results]

    def _reply(self, asked: ScoreRequest, result: RewardResult) -> dict[str, Any]:
        fields = asdict(result)
        del fields["tries"]
        return {"object": "score", "domain": asked.domain, **fields, "version": self._version}

    async def _stats(self, request: Request) -> Response:
        for domain, taken in self._pool.take_stats().items():
            before = self._totals.get(domain, DomainStats())
            self._totals[domain] = DomainStats.of([replace(before, pending=0), taken])
        domains = {domain: asdict(total) for domain, total in self._totals.items()}
        requests = {"open": self.open, "requests": dict(self.outcomes)}
        return JSONResponse({"version": self._version, **requests, "domains": domains})


def build_reward_endpoint(
    config: RewardServiceConfig, key_digests: tuple[str, ...], service: RewardService
) -> RewardEndpoint:
    """Build the API over the replicas of a service."""
    pool = Rewards(config.reward, [], lambda: ServeBackend(service))
    return RewardEndpoint(config, key_digests, pool, service.version)
